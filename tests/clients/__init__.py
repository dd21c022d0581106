"""Clients of the OpenAI interface as their users have them, run by commands of their own: see `__main__`."""
