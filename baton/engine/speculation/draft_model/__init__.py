"""Drafts from a model: a second checkpoint of the same vocabulary."""
