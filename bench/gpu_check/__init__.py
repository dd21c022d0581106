"""`python -m baton.bench.gpu_check`: everything of the GPU path that one GPU can check and measure, one table a
group."""
