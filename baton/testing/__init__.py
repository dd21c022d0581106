"""What a transport, an attention backend or a KV store has to do, as suites of tests: for Baton's own and for others.

A test of a plugin derives from a suite and says how its own is opened (docs/extending.md). Needs pytest, which nothing
else of the installed package does.
"""

import pytest

pytest.register_assert_rewrite("baton.testing.attention", "baton.testing.kv_stores", "baton.testing.transports")
