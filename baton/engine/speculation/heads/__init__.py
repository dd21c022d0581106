"""Drafts from heads: EAGLE-3 checkpoints, and the layers for further tokens that models ship (MTP)."""
