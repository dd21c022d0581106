"""Two-rank groups of torch.distributed, one per pair of nodes: NCCL between GPUs, gloo in host memory."""
