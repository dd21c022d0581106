"""Where tensors live and steps run: the host's cores, or a GPU."""
