from __future__ import annotations

import random
from array import array
from hashlib import blake2b
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.cache.hashing import HASH_BYTES, extend_hashes, prompt_digest, root_hash
from baton.wire.images import PromptImage
from baton.wire.media import Medium
from baton.wire.prompt import Prompt
from tests.wire.tone import Tone

_PLAIN, _SALTED = Prompt((1, 2, 3, 4)), Prompt((1, 2, 3, 4), b"tenant")
_ADAPTED = [
    Prompt.of(_PLAIN.token_ids, salt, adapter=digest * 16) for salt in (b"", b"tenant") for digest in (b"a", b"b")
]


def hashes_of(token_ids: list[int], block_size: int = 4, root: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, root, ())
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([1] * count)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_names_the_whole_prefix_before_it() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8]), hashes_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[1] != second[1]
    assert hashes_of([1, 2, 3, 4, 0, 0, 0, 0])[0] == first[0]


def test_equal_blocks_at_different_places_differ() -> None:
    hashes = hashes_of([5] * 40)
    assert len(set(hashes)) == len(hashes) == 10


def test_salt_model_and_adapter_separate_equal_tokens() -> None:
    roots = [root_hash(name, _PLAIN) for name in ("a" * 32, "b" * 32, "")]
    roots += [root_hash("a" * 32, prompt) for prompt in (_SALTED, *_ADAPTED)]
    assert len({hashes_of([1, 2, 3, 4], root=root)[0] for root in roots}) == len(roots)


def test_of_a_long_name_of_a_model_the_first_64_bytes_count() -> None:
    assert root_hash("a" * 64 + "b", _PLAIN) == root_hash("a" * 64, _PLAIN) != root_hash("a" * 63, _PLAIN)


def test_hashes_are_128_bit_and_the_same_in_every_process() -> None:
    assert HASH_BYTES == 16
    assert root_hash("f", Prompt((1,), b"s")).hex() == "45ab183631d9c9771f05a3e527ec094d"
    digest = prompt_digest(Prompt((1, 2, 3)))
    assert hashes_of([1, 2, 3], 3)[0].hex() == digest.hex() == "b30a3c159d7e8193559a42a84f1fcae1"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_hashing_in_pieces_gives_the_same_chain(token_ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(token_ids)))
    hashes = hashes_of(token_ids[:cut])
    extend_hashes(hashes, token_ids, 4, b"", ())
    assert hashes == hashes_of(token_ids)


def test_different_prompts_have_different_digests() -> None:
    draw = random.Random(0)
    prompts = sorted({tuple(draw.randrange(3) for _ in range(draw.randrange(8))) for _ in range(2000)})
    digests = sorted(prompt_digest(Prompt(prompt)) for prompt in prompts)
    assert all(one != other for one, other in pairwise(digests))


def test_a_handoff_says_which_adapter_computed_its_kv() -> None:
    assert len({prompt_digest(prompt, (5,)) for prompt in (_PLAIN, _ADAPTED[0], _ADAPTED[1])}) == 3


def _image(start: int, num_tokens: int, digest: bytes = b"a") -> PromptImage:
    return PromptImage(start, num_tokens, digest * 16, b"", 8, 8)


@pytest.mark.parametrize(("num_tokens", "marked"), [(1, [1]), (2, [1]), (3, [1, 2]), (6, [1, 2]), (7, [1, 2, 3])])
def test_the_mark_of_an_image_enters_with_each_block_from_its_first_token_to_its_last(
    num_tokens: int, marked: list[int]
) -> None:
    ids, image = list(range(20)), _image(6, num_tokens)
    found: list[bytes] = []
    extend_hashes(found, ids, 4, b"root", [image])
    expected, parent = [], b"root"
    for block in range(5):
        content = array("I", ids[4 * block : 4 * block + 4]).tobytes() + (image.mark if block in marked else b"")
        parent = blake2b(parent + content, digest_size=HASH_BYTES).digest()
        expected.append(parent)
    assert found == expected


def test_an_image_is_part_of_every_block_that_it_stands_in_and_of_those_behind() -> None:
    ids = [7] * 20

    def hashes(*media: Medium) -> list[bytes]:
        found: list[bytes] = []
        extend_hashes(found, ids, 4, b"", media)
        return found

    plain, one, other, moved = hashes(), hashes(_image(6, 5)), hashes(_image(6, 5, b"b")), hashes(_image(7, 5))
    heard = Tone(6, 5, b"a" * 16, b"", 8000)  # of another kind, with an equal digest
    for first, second in ((plain, one), (one, other), (one, moved), (one, hashes(heard))):
        assert first[:1] == second[:1]
        assert not set(first[1:]) & set(second[1:])
    behind = hashes(_image(6, 5), _image(12, 4))
    assert behind[:3] == one[:3]
    assert behind[3:] != one[3:]
    pieces: list[bytes] = []
    for stop in (5, 9, 20):
        extend_hashes(pieces, ids[:stop], 4, b"", [_image(6, 5)])
    assert pieces == one
    known = ((), [_image(6, 5)], [_image(6, 5, b"b")], [_image(7, 5)], [heard])
    digests = {prompt_digest(Prompt.of(ids, media=media)) for media in known}
    assert len(digests) == 5
