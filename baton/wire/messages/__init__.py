"""Messages between the router and the nodes, one module for each thing that they are about.

One connection per node and router: the node dials each router's control address and stays connected. A request is named
by its `handoff_id` (128 bits, chosen by the router, see `baton.wire.request_key`) and `attempt`; whatever carries an
older attempt is dropped. `docs/protocol.md` says when each message is sent and what answers it.
"""
