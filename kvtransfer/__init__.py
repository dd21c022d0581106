"""Moves KV blocks from a prefill node to a decode node: messages, states, leases across nodes, transports."""
