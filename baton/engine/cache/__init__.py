"""The accounting of blocks in pure Python: which are owned, which are free, and which hold a cached prefix."""
