"""Baton's own kernels for CPUs: C++ in `src`, compiled when the package is installed."""
