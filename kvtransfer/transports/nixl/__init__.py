"""NIXL: one-sided writes by UCX. `transport` is what the registry opens; the rest is the agent behind it."""
