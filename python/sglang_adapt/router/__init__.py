"""The router: one process between the front and the engines, in the seat of stock's data-parallel controller.

- `router.py`: what to do with each message; `engine.py`: the router's view of one engine;
- `control.py`: control requests to all engines, their answers merged into one;
- `supervisor.py`: starts, watches and restarts the engines' processes;
- `keepers.py`: the same for the keepers; `restarts.py`: how often;
- `calls.py`: asks an engine's ranks for one thing and waits; `pools.py`: the ledgers of KV blocks and engines' leases;
- `process.py`: the process itself, which wires these to sockets; `sockets.py`: zmq on an event loop.

All output of all engines passes through here, so an engine's messages reach the front in the order in which they
were sent, and the router knows of every request where it is and whether it has ended.
"""
