"""Identity of a block's content: 128-bit BLAKE2b hashes, chained so that a hash names the whole prefix before it.

The root covers the model fingerprint, and the salt and the adapter of the prompt, so equal tokens of different models,
tenants or adapters never share a hash. Token ids enter as fixed-width 32-bit integers: no two token lists have the same
bytes. The tokens of a medium say nothing of what it is, so its mark (kind, digest and place) enters with every block
that it stands in.

This is the only place that knows what of a `Prompt` the names of its blocks depend on: `root_hash` for what all blocks
do, `extend_hashes` for what stands at a place. Router and nodes both call it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from baton.wire.media import Medium
from baton.wire.prompt import Prompt

HASH_BYTES = 16


def root_hash(fingerprint: str, prompt: Prompt) -> bytes:
    """The parent of the first block of `prompt` on this model: all that KV at any place depends on."""
    key = fingerprint.encode()[:64]
    return blake2b(prompt.cache_salt, digest_size=HASH_BYTES, key=key, person=prompt.adapter).digest()


def block_hashes(fingerprint: str, prompt: Prompt, output_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks of a prompt and what follows it."""
    hashes: list[bytes] = []
    root = root_hash(fingerprint, prompt)
    extend_hashes(hashes, prompt.followed_by(output_ids), block_size, root, prompt.media)
    return hashes


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes, media: Sequence[Medium]
) -> None:
    """Append to `hashes` (one per full block so far) the hashes of the blocks that `token_ids` has filled since.
    `root` and `media`: those of the prompt that the tokens begin with."""
    first, end = len(hashes), len(token_ids) // block_size
    if first == end:
        return
    parent = hashes[-1] if hashes else root
    # converted all at once: of a long prompt block by block, it would take as long as the hashing
    content = array("I", token_ids[first * block_size : end * block_size]).tobytes()
    num_bytes = len(content) // (end - first)
    marks = _marks(media, block_size, first) if media else {}
    for start in range(0, len(content), num_bytes):
        mark = marks.get(len(hashes), b"") if marks else b""
        parent = blake2b(parent + content[start : start + num_bytes] + mark, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def _marks(media: Sequence[Medium], block_size: int, first: int) -> dict[int, bytes]:
    """By the number of a block, from `first` on, the marks of the media that stand in it."""
    marks: dict[int, bytes] = {}
    for medium in media:
        for block in range(max(first, medium.start // block_size), (medium.stop - 1) // block_size + 1):
            marks[block] = marks.get(block, b"") + medium.mark
    return marks


def prompt_digest(prompt: Prompt, output_ids: Sequence[int] = ()) -> bytes:
    """128-bit digest of all tokens whose KV is moved, and of their adapter: what a Commit and its Grant must agree
    on."""
    digest = blake2b(array("I", prompt.token_ids).tobytes(), digest_size=HASH_BYTES, person=prompt.adapter)
    digest.update(array("I", output_ids).tobytes())
    for medium in prompt.media:
        digest.update(medium.mark)
    return digest.digest()
