"""The inference engine every node runs, and `baton.engine.llm`: the same engine in one process, offered as
`baton.LLM`."""
