"""The digest of a checkpoint's tokenizer: two programs with the same one give every token the same text."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from baton.engine.text.checkpoint_files import TOKENIZER_CONFIG, read_json
from baton.engine.text.conversion_cache import source_files

_SETTINGS = ("added_tokens_decoder", "split_special_tokens")


def tokenizer_digest(folder: Path) -> str:
    """128 bits in hex over the vocabulary files of the checkpoint in `folder` and the tokens that its settings add. ""
    when it has no tokenizer. The chat template does not count. Raises `ModelLoadError` for damaged settings."""
    own = folder / "tokenizer.json"
    files = [own] if own.is_file() else source_files(folder)
    if not files:
        return ""
    config = read_json(folder / TOKENIZER_CONFIG)
    settings = {name: config.get(name) for name in _SETTINGS}
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for file in files:
        content = file.read_bytes()
        digest.update(f"\n{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
