"""Finds the `tokenizer.json` of a checkpoint, converting older formats once and caching the result.

The cache is keyed by a digest of everything a conversion reads, so a changed checkpoint or a new
transformers is converted anew and a stale result is never used. A file appears in the cache complete or not
at all.
"""

from __future__ import annotations

import os
import tempfile
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

from baton.runtime.child import Child, describe_end
from baton.wire.errors import ModelLoadError

CONVERSION_TIMEOUT_S = 300
CONVERTER = "baton.engine.text.convert"
_SOURCE_PATTERNS = ("*.model", "*.tiktoken", "vocab.*", "merges.txt", "tekken.json")
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")


def default_cache_folder() -> Path:
    """`$XDG_CACHE_HOME/baton/tokenizers`, by default below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "tokenizers"


def find_tokenizer_file(folder: Path, cache_folder: Path | None = None) -> Path:
    """The checkpoint's own `tokenizer.json`, or the one converted from its older tokenizer files.

    Raises:
        ModelLoadError: no tokenizer files at all, or a conversion that fails (the message holds its reason).
    """
    own = folder / "tokenizer.json"
    if own.is_file():
        return own
    sources = source_files(folder)
    if not sources:
        raise ModelLoadError(f"{folder} has no tokenizer: neither tokenizer.json nor a vocabulary to convert")
    settings = [folder / name for name in _SETTINGS_FILES if (folder / name).is_file()]
    try:
        cached = (cache_folder or default_cache_folder()) / f"{_digest(sources + settings)}.json"
        if not cached.is_file():
            _convert(folder, cached)
    except OSError as error:
        raise ModelLoadError(f"cannot convert the tokenizer of {folder}: {error}") from error
    return cached


def source_files(folder: Path) -> list[Path]:
    """The tokenizer files of an older format in `folder`."""
    return sorted({path for pattern in _SOURCE_PATTERNS for path in folder.glob(pattern)})


def _digest(files: list[Path]) -> str:
    """128 bits over the names and contents of `files` and the version of the converter."""
    digest = blake2b(_transformers_version().encode(), digest_size=16)
    for file in files:
        content = file.read_bytes()
        digest.update(f"\n{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _transformers_version() -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise ModelLoadError("this checkpoint has no tokenizer.json; converting it needs transformers") from error


def _convert(folder: Path, target: Path) -> None:
    """Run the conversion in a child process and move its result to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        out_file, log_file = Path(work) / "tokenizer.json", Path(work) / "log"
        with log_file.open("wb") as log, Child(CONVERTER, str(folder), str(out_file), stderr=log.fileno()) as child:
            status = child.wait(CONVERSION_TIMEOUT_S)
        if status is None:
            raise ModelLoadError(f"converting the tokenizer of {folder} took over {CONVERSION_TIMEOUT_S} s")
        if status != 0 or not out_file.is_file():
            said = log_file.read_text(errors="replace").strip().splitlines()
            raise ModelLoadError(
                f"cannot convert the tokenizer of {folder}: {said[-1] if said else describe_end(status)}"
            )
        out_file.replace(target)
