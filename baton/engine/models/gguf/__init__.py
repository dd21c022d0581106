"""GGUF files: one file with the weights, the facts of the architecture, and the tokenizer of a model."""
