"""The prefill leg: computes prompts, samples token 1, pushes KV to decode nodes."""
