"""Pages of docs/reference/ that are made from the code, and the test that they are up to date."""
