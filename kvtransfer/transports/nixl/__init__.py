"""Registered pools and one-sided writes through NIXL and UCX: RDMA, TCP, or a copy between two processes of one host.

The front door: `receiver.NixlReceiver`, `receiver.NixlDeviceReceiver` and `sender.NixlSenders`, each over an agent that
runs: `process.AgentProcess` or `thread.AgentThread`.

Owns the receiving and sending ends as the transfer thread sees them. For pools in host memory nothing native runs in
this process: one agent process per node and direction does (`agent`), so that a crash or a stale peer costs an
agent and never the node. For pools on a GPU the agent is a thread of the node (`thread` says why).

An endpoint's address is the name of the receiver's agent, random in every life, so an old life is never taken for a
new one. While no agent is up its details are empty; the endpoint changes once more when the next one is. It changes
only when the life that it named has ended.

What ends a write. UCX cannot take back a write that has begun, and over TCP (or for what it sends through a queue) the
*receiver's* agent puts the bytes in place, even after the writer is gone. So:
- a write that ended without an error has landed: nothing of it is in flight anywhere;
- after any other end (`NixlSender.needs_fence`) this side no longer reads its blocks, but the receiver's may still be
  written: only the end of the receiver's agent (`NixlReceiver.fence`) puts a stop to that. The end of the writing
  process is no proof here.

Pools on a GPU add one way: with CUDA IPC the *writing* process copies, through a mapping of the receiver's pool of its
own. Nothing that the receiver does takes that mapping away. A receiver whose UCX may choose it
(`WriteProof.BOTH_ENDED`: a node on a loopback address) therefore needs two proofs before
blocks of a broken handoff are used again:
- its own agent's life has ended: nothing is carried on by it (TCP) or through its registration (RDMA);
- and the writer has done with the blocks: it says so (`Revoked`, whatever it says about a fence, is sent only after
  its agent has waited for the copies on its GPU), or its process does not exist any more. A peer that cannot see this
  process (another machine, another table of processes) cannot have mapped it: CUDA IPC needs the same one.
A receiver whose UCX is told to keep to the network needs the first only, like one in host memory.

Are bytes on a GPU visible when the notice comes? A notice is sent when UCX has flushed the write: after the copy's
event on the writer's GPU (CUDA IPC), after the receiver's agent has copied them from host memory (TCP), or after the
receiver's network card has acknowledged them (RDMA). Kernels that are launched after that read them: the first two are
complete in the receiver's memory then; with RDMA the device's attribute GPU_DIRECT_RDMA_WRITES_ORDERING has to be
"owner" or better, as it is on data-centre GPUs of this decade. Checksums are computed on the device by such a kernel.
"""
