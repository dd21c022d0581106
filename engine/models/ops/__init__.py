"""What a decoder computes on a device: the contract, the reference in torch, and what is faster on some devices."""
