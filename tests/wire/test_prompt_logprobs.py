from __future__ import annotations

import struct

import pytest

from baton.wire.prompt_logprobs import num_top_of, read_rows, row_words


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_the_alternatives_of_a_row_follow_from_its_bytes(num_top: int) -> None:
    row = struct.pack(f"<fI{num_top}I{num_top}f", -0.5, 3, *range(num_top), *[-1.0] * num_top)
    assert len(row) == 4 * row_words(num_top)
    assert num_top_of(3 * row, 3) == num_top
    assert [(each.rank, each.top_ids) for each in read_rows(3 * row, 3)] == [(3, tuple(range(num_top)))] * 3


@pytest.mark.parametrize(("num_bytes", "num_rows"), [(0, 1), (4, 1), (12, 1), (16, 3), (9, 1)])
def test_bytes_that_are_no_rows_are_refused(num_bytes: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"{num_bytes} bytes are no {num_rows} rows"):
        num_top_of(bytes(num_bytes), num_rows)
