"""Benchmarks: `baton bench NAME`. Nothing of the product imports from here."""
