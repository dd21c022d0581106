"""Chooses the tokens of the next step: admission, token budget, chunked prefill, preemption. Imports no torch."""
