"""The ranks of a node's engine: all that computes, or moves KV, beside the driver.

`executor`: a step of the engine carried to its ranks. `machines`: ranks on other machines than the driver's.
`transfer`: KV that comes and goes where each rank has a pool of its own. Here: the programs, and where the rooms meet.
"""
