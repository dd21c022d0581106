"""`baton bench compare`: the same workload on several targets in turns, and what may be concluded."""
