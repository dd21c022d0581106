"""How blocks travel. `base` is the contract; `registry` knows the names and opens receivers and senders.

`shm` holds two transports over shared memory; `tcp_zmq`, `nixl` and `nccl` are one each. Receivers that write their own
pool share `announced` (what a grant allows), those that speak ZMQ `zmq_sockets`.
"""
