"""The decode leg: takes KV from prefill nodes, or computes it, and generates every further token."""
