"""A step of the engine carried to its ranks: how they start, find each other, compute together, and end."""
