"""The load generator: sends a workload to OpenAI-compatible endpoints and notes when what came."""
