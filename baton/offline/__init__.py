"""Offline use: `baton.LLM`, an engine in the process of a script."""
