"""The memory of a node's KV pool as transfers see it: in host memory, or on a device."""
