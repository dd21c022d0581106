"""Ranks on other machines than the driver's: the link between them, and its two ends."""
