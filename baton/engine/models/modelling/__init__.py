"""Models that transformers' own modelling code computes, with Baton's attention plugged in."""
