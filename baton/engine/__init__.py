"""The inference engine every node runs, and `baton.offline.llm`: the same engine in one process, offered as
`baton.LLM`."""
