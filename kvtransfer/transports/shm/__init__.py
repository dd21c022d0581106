"""Memory that processes of one host share, and two transports that use it.

`shm` (`direct`): D's pool is a segment of shared memory, and P writes into it. For pools in host memory.

`shm_slots` (`slots_receiver`, `slots_sender`): P copies blocks into slots of shared memory, D copies them from there.
For pools in device memory. P owns a ring of slots for each receiver (`ring`) and knows which of them are in flight; D
maps the rings of its senders. Headers and acknowledgements go over a ZMQ connection, and a slot belongs to one side at
a time: to P until its header is sent, then to D until D has acknowledged the number of that header.

Copies are waited for where they are made: P's blocks are not read any more when `push` returns, D's blocks hold their
bytes before they are reported, and nothing is written any more once a grant is forgotten. No part of a block is pushed
before the block is complete: every part would cost a copy, a message and a wait of its own, and all chunks of a prompt
but the last are pushed as whole blocks while the next is computed.
"""
