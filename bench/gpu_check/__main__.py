"""`python -m bench.gpu_check`; `baton bench gpu-check` is the same."""

import sys

from bench.gpu_check.command import main
from wire.errors import BatonError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
