"""Paged attention backends, chosen by name. `torch_backend` is complete, runs everywhere and is the specification."""
