"""A decode node that pushes what it lends slowly, or not to the end, and says of each block when it is there:
`slow_decode.py 9999 NUM_PUSHES PUSH_S MODEL FLAG...`. See `slow_prefill.py`, which reads the numbers."""

from __future__ import annotations

import sys
from unittest import mock

from baton.decode_node.__main__ import main
from tests.system.slow_prefill import FullSenderFactory

if __name__ == "__main__":
    each_block = mock.patch("baton.kvtransfer.outgoing._MIN_JOB_BYTES", 1)
    with mock.patch("baton.ranks.handoff_ends.SenderFactory", FullSenderFactory), each_block:
        sys.exit(main(sys.argv[4:]))
