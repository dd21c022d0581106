"""The verdict about the blocks of a revoked grant, for every combination of what can be known."""

from __future__ import annotations

import itertools

import pytest

from baton.kvtransfer.write_proof import Known, PeerWord, Verdict, WriteProof, Writer, judge, writer_of_all

_OWN, _WRITER, _ENDPOINT, _BOTH = WriteProof
_SILENT, _DONE, _MAY_LAND = PeerWord
_RUNS, _GONE, _ELSEWHERE = Writer
_RELEASE, _WAIT, _FENCE = Verdict
_ANY = None

# proof, the peer's word, own endpoint ended, writer, overdue -> verdict
TABLE: list[tuple[object, object, object, tuple[Writer, ...], object, Verdict]] = [
    (_OWN, _ANY, _ANY, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_WRITER, _DONE, _ANY, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_ENDPOINT, _DONE, _ANY, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_BOTH, _DONE, _ANY, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    # shared memory: only the end of the writer is a proof
    (_WRITER, _SILENT, _ANY, (_GONE,), _ANY, _RELEASE),
    (_WRITER, _MAY_LAND, _ANY, (_GONE,), _ANY, _RELEASE),
    (_WRITER, _SILENT, _ANY, (_RUNS, _ELSEWHERE), _ANY, _WAIT),
    (_WRITER, _MAY_LAND, _ANY, (_RUNS, _ELSEWHERE), _ANY, _WAIT),
    # a network: the end of the own endpoint is a proof, whatever the writer does
    (_ENDPOINT, _SILENT, True, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_ENDPOINT, _MAY_LAND, True, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_ENDPOINT, _SILENT, False, (_RUNS, _GONE, _ELSEWHERE), False, _WAIT),
    (_ENDPOINT, _SILENT, False, (_RUNS, _GONE, _ELSEWHERE), True, _FENCE),
    (_ENDPOINT, _MAY_LAND, False, (_RUNS, _GONE, _ELSEWHERE), _ANY, _FENCE),
    # a network or a mapping: the own endpoint must have ended, and no writer may have a mapping
    (_BOTH, _SILENT, True, (_RUNS,), _ANY, _WAIT),
    (_BOTH, _SILENT, True, (_GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_BOTH, _MAY_LAND, True, (_RUNS, _GONE, _ELSEWHERE), _ANY, _RELEASE),
    (_BOTH, _SILENT, False, (_RUNS, _GONE, _ELSEWHERE), False, _WAIT),
    (_BOTH, _SILENT, False, (_RUNS, _GONE, _ELSEWHERE), True, _FENCE),
    (_BOTH, _MAY_LAND, False, (_RUNS, _GONE, _ELSEWHERE), _ANY, _FENCE),
]


@pytest.mark.parametrize("proof", WriteProof)
def test_blocks_are_released_on_proof_only(proof: WriteProof) -> None:
    for word, has_ended, writer, is_overdue in itertools.product(PeerWord, (False, True), Writer, (False, True)):
        (expected,) = [
            verdict
            for of, said, ended, writers, overdue, verdict in TABLE
            if of is proof
            and said in (_ANY, word)
            and ended in (_ANY, has_ended)
            and writer in writers
            and overdue in (_ANY, is_overdue)
        ]
        known = Known(word, has_ended, writer, is_overdue)
        assert judge(proof, known) is expected, known


@pytest.mark.parametrize(
    ("writers", "together"),
    [
        ((), _RUNS),
        ((_GONE, _RUNS, _ELSEWHERE), _RUNS),
        ((_GONE, _GONE), _GONE),
        ((_ELSEWHERE, _ELSEWHERE), _ELSEWHERE),
        ((_ELSEWHERE, _GONE), _ELSEWHERE),
    ],
)
def test_several_writers_are_what_the_least_known_of_them_is(writers: tuple[Writer, ...], together: Writer) -> None:
    assert writer_of_all(writers) is together
