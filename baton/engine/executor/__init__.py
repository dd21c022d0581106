"""The ranks of an engine as the engine sees them: the contract, and the case of one."""
