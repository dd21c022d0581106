"""One seed for a whole run, and an independent stream of random numbers for each use of it.

Invariant: two uses never share a stream, or prompt lengths would go with the gaps between arrivals.
"""

from __future__ import annotations

import numpy as np

from wire.errors import InvalidSetting


def generator(seed: int, use: str) -> np.random.Generator:
    """The stream of `seed` for `use`. Raises `InvalidSetting` for a negative seed."""
    if seed < 0:
        raise InvalidSetting(f"--seed {seed} is not at least 0")
    return np.random.default_rng([seed, *use.encode()])
