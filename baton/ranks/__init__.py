"""A rank of a node that is not its driver: it computes with the engine, and moves what handoffs take from its pool."""
