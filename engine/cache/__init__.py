"""Block accounting in pure Python: who owns which block, which are free, which hold a findable prefix."""
