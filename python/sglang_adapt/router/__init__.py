"""The router: one process between the front and the engines, in the seat of stock's data-parallel controller.

- `router.py`: what to do with each message; `places.py`: where each request is that an engine has; `waiting.py`: those
  that wait in no engine; `serving.py`: which engines serve; `engine.py`: the router's view of one engine; `outlets.py`:
  where all else goes; `status.py`: what the front is told;
- `control.py`: control requests to all engines, their answers merged into one;
- `supervisor.py`: starts, watches and restarts the engines' processes;
- `keepers.py`: the same for the keepers; `restarts.py`: how often;
- `calls.py`: asks an engine's ranks for one thing and waits; `pools.py`: the ledgers of KV blocks and engines' leases;
- `modes.py`: the switch of layout, with a file for each phase: `preparing.py`, `precopy.py`, `leaving.py`,
  `placing.py`, `entering.py`; `switch.py`: its data; `kept.py`: what stays paused outside the layout;
- `copying.py`: a copy of KV into blocks set aside; `mappings.py`: who can read the KV of all GPUs; `filling.py`: free
  blocks for the layout's engines; `asking.py`: calls in the messages of `core`; `lives.py`: which engines are up;
- `handovers.py`: single requests from an engine that prefills to one that decodes: `takers.py`: to which; `moves.py`:
  those under way; `readers.py`: what engines that prefill are told; `ahead.py`: what goes before; `told.py`: counts;
  `handover_steps.py`: how long steps take;
- `readback.py`: the layout as engines say it; `repair.py`: requests whose engine has died, with `journal.py`;
- `admission.py`: requests by tiers, over `records.py`, `tickets.py`, `held.py`, `loads.py`, `prefixes.py`,
  `outputs.py`, `expected.py` and `learning.py`; `tiers.py`: what makes and runs it; `limits.py`: limits of engines'
  iterations;
- `process.py`: the process, which makes all of these and connects them; `args.py`: what it is given;
- `lifecycle.py`: what follows when an engine or keeper comes or goes;
- `starts.py`: a start of an engine: sockets, ranks, warm-up; `observe.py`: what memory it takes;
- `memory.py`: what keepers are to own, and who gets it;
- `front_link.py`: the control socket to the front; `layout_requests.py`: what is asked there about the layout;
- `start_report.py`: what the front is told once; `drain.py`: shutting down; `sockets.py`: zmq on an event loop.

All output of all engines passes through here, so an engine's messages reach the front in the order in which they
were sent, and the router knows of every request where it is and whether it has ended.
"""
