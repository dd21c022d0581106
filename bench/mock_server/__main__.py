"""Starts the mock server from its command line."""

import sys

from bench.mock_server.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
