"""Quantized weights: the methods in which checkpoints are published, and those in which plain ones are quantized."""
