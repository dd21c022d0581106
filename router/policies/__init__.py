"""Which node takes a leg. One file per policy, chosen by name."""
