"""A trial of `baton cluster` on Ray: `python -m tests.cluster.ray_trial`, with an interpreter that has Ray.

On a Ray cluster of three simulated machines it runs the conformance suite of backends. It ends by itself, and leaves
nothing.
"""

from __future__ import annotations

import argparse
import sys

from tests.cluster import ray_conformance
from tests.cluster.machines import machines


def main() -> int:
    """Run what was asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.ray_trial", description=__doc__)
    parser.add_argument("--only", choices=("conformance",), help="one part of it")
    parser.parse_args()
    with machines() as running:
        sys.stdout.write("conformance of the backend:\n")
        ray_conformance.run(running)
    return 0


if __name__ == "__main__":
    sys.exit(main())
