"""KV that comes and goes where each rank has a pool of its own: the driver decides, and ranks move bytes."""
