"""The operations of a decoder: the contract, the reference in torch, and faster versions for some devices."""
