"""How the router's cost grows with nodes, requests and streams: `python -m baton.bench.scale`."""
