"""Both legs over one engine, for nodes whose role is a preference."""
