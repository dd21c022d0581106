"""Drafts from text, without a model."""
