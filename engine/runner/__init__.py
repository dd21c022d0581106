"""From a `Step` to sampled tokens: KV tensors, input preparation, the forward pass, the sampler."""
