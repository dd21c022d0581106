"""Which tokens the server's model has: where its tokenizer lies, as far as this machine knows."""

from __future__ import annotations

from pathlib import Path

from bench.serve.settings import CHAT, ServeBenchSettings
from bench.workload.vocabulary import Vocabulary, bare_vocabulary, vocabulary_of
from demo.location import DEMO_MODEL_NAME, checkpoint_path
from engine.models.checkpoint import resolve_checkpoint
from wire.errors import InvalidSetting


def tokenizer_folder(settings: ServeBenchSettings, served: str) -> Path | None:
    """The folder of the tokenizer of the model that the server calls `served`; None when nothing says where it is.

    That is `--tokenizer`, else `--model` or the served name where it is a folder, else that of the demo model. Raises
    `ModelLoadError` for a `--tokenizer` that cannot be had.
    """
    if settings.tokenizer:
        return resolve_checkpoint(settings.tokenizer, weights=False)
    for name in (settings.model, served):
        if name and Path(name).expanduser().is_dir():
            return Path(name).expanduser()
    return checkpoint_path() if served == DEMO_MODEL_NAME else None


def vocabulary_for(settings: ServeBenchSettings, served: str) -> Vocabulary:
    """What prompts of the model can be made of. Raises `InvalidSetting`, `ModelLoadError`."""
    if settings.vocab_size is not None and not settings.tokenizer:
        if settings.backend == CHAT or settings.prompt_form == "text":
            raise InvalidSetting("--vocab-size makes prompts of token ids: text needs --tokenizer")
        return bare_vocabulary(settings.vocab_size)
    folder = tokenizer_folder(settings, served)
    if folder is None:
        raise InvalidSetting(
            f"nothing says where the tokenizer of {served!r:.100} is: name it with --tokenizer, or use --vocab-size"
        )
    return vocabulary_of(folder)
