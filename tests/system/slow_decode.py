"""A decode node that pushes what it lends slowly, or not to the end: `slow_decode.py 9999 NUM_PUSHES PUSH_S MODEL
FLAG...`. See `slow_prefill.py`, which reads the numbers."""

from __future__ import annotations

import sys
from unittest import mock

from baton.decode_node.__main__ import main
from tests.system.slow_prefill import FullSenderFactory

if __name__ == "__main__":
    with mock.patch("baton.ranks.handoff_ends.SenderFactory", FullSenderFactory):
        sys.exit(main(sys.argv[4:]))
