"""Structured output: which tokens a grammar allows next. Imports no torch, and llguidance when it is first needed."""
