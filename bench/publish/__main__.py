"""`python -m bench.publish`."""

from __future__ import annotations

import sys

from bench.publish.command import main
from wire.errors import BatonError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as error:
        sys.exit(f"error: {error}")
