"""The router: it owns every client's stream from the first byte to the last, and it starts without torch."""
