"""The inference engine every node runs, and `engine.llm`: the same engine in one process, offered as `baton.LLM`."""
