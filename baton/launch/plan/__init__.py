"""`baton plan`: what of a model fits where, computed from its `config.json`."""
