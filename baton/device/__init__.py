"""Devices, which hold tensors and run steps: the host's cores, or a GPU."""
