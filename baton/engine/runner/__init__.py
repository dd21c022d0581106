"""The computation of a `Step`: KV tensors, input preparation, the forward pass, the sampler."""
