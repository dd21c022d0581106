"""`python -m bench.gpu_check`; `baton bench gpu-check` is the same."""

from __future__ import annotations

import sys

from bench.gpu_check.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
