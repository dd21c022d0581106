"""The first leg: computes prompts, draws token 1, pushes KV to decode nodes."""
