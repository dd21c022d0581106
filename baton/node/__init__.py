"""A node: one engine, the links to its routers, the ends of its handoffs, and the leg or both legs that it hosts."""
