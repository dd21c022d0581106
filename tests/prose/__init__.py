"""The prose of README.md and docs/: whether an average engineer understands it at once, and how much of it there is."""
