"""Makes a checkpoint folder of a GGUF file: its config and tokenizer in the usual files, and a link to the weights.

Owns the cache of such folders. Everything else in Baton knows folders only. A folder appears complete or not at all,
and is made anew for another file, or another version of this module. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from baton.engine.models.gguf.config import config_of
from baton.engine.models.gguf.file import GgufFile, read_gguf
from baton.engine.models.gguf.tokenizer import tokenizer_files
from baton.wire.errors import ModelLoadError

GGUF_FILE = "model.gguf"
_VERSION = 1
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def checkpoint_folder(path: Path, cache_folder: Path | None = None) -> Path:
    """The folder of the GGUF file `path`, below `cache_folder` (None: the user's cache). A `tokenizer.json` beside the
    file counts instead of the file's own. Raises `ModelLoadError`."""
    path = path.resolve()
    cache = cache_folder or _default_cache_folder()
    try:
        target = cache / _digest(path)
        if not (target / "config.json").is_file():
            _make(read_gguf(path), target)
    except OSError as error:
        raise ModelLoadError(f"{path}: no checkpoint folder can be made of it: {error}") from error
    return target


def _default_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "gguf"


def _digest(path: Path) -> str:
    sources = [path, *(path.with_name(name) for name in _TOKENIZER_FILES)]
    stats = [(str(source), source.stat()) for source in sources if source.is_file()]
    facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return blake2b(json.dumps([_VERSION, facts]).encode(), digest_size=16).hexdigest()


def _make(file: GgufFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        folder = Path(work) / "folder"
        folder.mkdir()
        _write_tokenizer(file, folder)
        (folder / GGUF_FILE).symlink_to(file.path)
        (folder / "config.json").write_text(json.dumps(config_of(file), indent=2))
        try:
            folder.rename(target)
        except OSError:
            if not (target / "config.json").is_file():  # another process was as far as this one
                raise


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    beside = file.path.with_name("tokenizer.json")
    if beside.is_file():
        for name in _TOKENIZER_FILES:
            if (source := file.path.with_name(name)).is_file():
                shutil.copy(source, folder / name)
        return
    tokenizer, config = tokenizer_files(file)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
