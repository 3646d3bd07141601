"""A deployment in simulated time, with the router's own decisions: `python -m sglang_adapt.simulate`.

- `cli.py`, `flags.py`: the command line; `load.py`: what arrives; `hardware.py`: how fast engines are, what they hold;
- `engine.py`: one engine: iterations of prompts and decode steps; `node.py`: the events of all engines;
- `routing.py`: where requests go: the router's `Admission`, or the least load; `control.py`: layouts and switches;
- `outcome.py`: what became of the requests, as a table; `systems.py`: ours and its rivals;
- `study.py`: series of runs; `check.py`: simulated beside measured.

Decisions are not written anew: admission, placement and limits are `router/admission.py` over `policy/`, the planner is
`policy/planner.py` with `policy/pilot.py`, and requests are carried by `policy/carry.py`.
"""
