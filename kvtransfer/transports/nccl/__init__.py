"""`torch.distributed` point to point: NCCL between pools in GPU memory, gloo between pools in host memory.

The front door: `receiver.NcclReceiver` and `sender.NcclSender`.

Owns a two-rank group for each (prefill node, decode node) pair and the threads that wait for it. Two connections make a
pair: a ZMQ one (encrypted and authenticated with a cluster key) for the group's formation and the headers, and the
group for the blocks. Every message of the group has a number and a header that came before it, so both sides take
messages in the same order.

The pool's memory is never handed to torch.distributed: a sender's thread gathers blocks into a slot, a receiver's
thread receives into a slot, and only the transfer thread copies from there into the pool, in `poll`, what a grant
announces at that moment. So what a library does late, or after an abort, cannot touch a block.

A pair ends as a whole: whatever goes wrong with it (a peer that died, a payload that does not come in `STALL_S`, a
header that cannot be) ends its group, and the peer has to connect anew. What has no pair changes nothing.

Bounds: a few slots per pair and side (see `line`), `_MAX_PAIRS` pairs, with those whose thread has not ended
yet, `_MAX_WAITING` messages ahead of a receiver. Each wait of a thread has a deadline, and each thread ends with the
main thread of its process.
"""
