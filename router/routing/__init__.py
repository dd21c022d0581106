"""Choosing nodes: which take a request, by their load, what they have cached, goals for latency, and what failed."""
