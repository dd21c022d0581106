"""docs/benchmarks.md, generated from the files in bench/results."""
