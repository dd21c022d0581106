"""What is measured: endpoints that run already, and servers that a benchmark starts and ends."""
