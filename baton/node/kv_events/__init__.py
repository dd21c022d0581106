"""KV events: what a node's prefix cache holds, told to routers and indexers that speak the protocol of vLLM."""
