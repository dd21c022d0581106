"""`baton bench kv`: what the handoff of KV blocks costs, transport by transport."""
