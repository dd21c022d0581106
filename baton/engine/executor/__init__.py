"""Where the ranks of an engine run, and how they compute a step together."""
