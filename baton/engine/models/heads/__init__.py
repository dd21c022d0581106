"""Heads: one decoder layer that reads a model's hidden states and predicts the tokens behind its next one."""
