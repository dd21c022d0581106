"""`python -m baton.bench.gpu_check`; `baton bench gpu-check` is the same."""

import sys

from baton.bench.gpu_check.command import main
from baton.runtime.exit_status import report_errors

if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
