"""The front: one process with stock's HTTP server and tokenizer manager, and our ASGI layer around them.

- `process.py`: the process itself: settings, router, server; `launcher.py`: starts the router;
- `asgi.py`: health, readiness, refusals and the draining of requests; `link.py`: what the router says;
- `entry.py`: the way in; `flags.py`: our flags;
- `settings.py`: from the command line to checked settings; `address.py`: can the server listen there;
- `memory.py`: the memory plan of a deployment; `layout_api.py`: `/adapt/layout`;
- `gate.py`: what tier a request is of, and whether it is served; `early.py`: refusals that it remembers, told before
  stock's layers; `refusal_log.py`: refusals in the log;
- `errors.py`: bodies of our own errors.
"""
