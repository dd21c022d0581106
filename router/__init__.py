"""The referee: owns every client's stream from the first byte to the last. Starts without torch."""
