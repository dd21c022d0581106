"""Where a process keeps its resident memory."""

from baton.bench.limits.start import Resident, resident

POOL = 2**20
SMAPS = """\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1000 kB
Pss:                1000 kB
7f0000200000-7f0000210000 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                  60 kB
7f0000300000-7f0000310000 rw-s 00000000 00:01 7     /dev/shm/baton-1 (deleted)
Size:                 64 kB
Rss:                   8 kB
55d000000000-55d000010000 rw-p 00000000 00:00 0     [heap]
Size:                 64 kB
Rss:                  20 kB
7f0000400000-7f0000800000 r-xp 00000000 08:01 9     /usr/lib/a library.so
Size:               4096 kB
Rss:                 400 kB
"""


def test_resident_memory_is_divided_into_pools_files_and_all_else() -> None:
    found = resident("decode_node", SMAPS.splitlines(), POOL)

    assert found == Resident("decode_node", pools=1008 * 1024, files=400 * 1024, own=80 * 1024)


def test_weights_are_taken_off_what_a_node_holds_and_a_router_has_none() -> None:
    assert Resident("prefill_node", pools=9, files=20, own=30).beside(weights=15) == 35
    assert Resident("router", pools=0, files=20, own=30).beside(weights=15) == 50
