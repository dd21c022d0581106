"""Which code computes a model, and the facts of it that every implementation has.

Owns the setting `--model-impl`: an architecture of the table (`baton.engine.models.registry`) is computed by Baton's
own decoder; another one by transformers' modelling code. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from baton.engine.models.config import ModelConfig, parse_config, read_config_files
from baton.engine.models.modelling.config import ModellingConfig, parse_modelling_config
from baton.engine.models.registry import ARCHITECTURES
from baton.engine.models.text_part import TEXT_PARTS

AUTO, BATON, TRANSFORMERS = MODEL_IMPLS = ("auto", "baton", "transformers")


class ModelFacts(Protocol):
    """Facts about a model before it is loaded. Sizes are element counts, lengths are tokens."""

    @property
    def architecture(self) -> str:
        """The name of the architecture in `config.json`."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of rows of the output layer."""
        ...

    @property
    def max_context_len(self) -> int:
        """The longest sequence that its positions are made for."""
        ...

    @property
    def dtype(self) -> str | None:
        """The checkpoint's own dtype as the file names it, None when it does not say."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of tokens that end a generation, sorted."""
        ...


def load_facts(folder: Path, model_impl: str = AUTO, *, remote_code: bool = False) -> ModelConfig | ModellingConfig:
    """Read `config.json` and `generation_config.json` of a checkpoint folder. The type of the result tells which code
    computes the model. Raises `ModelLoadError`."""
    content, generation = read_config_files(folder)
    if model_impl == BATON or (model_impl == AUTO and _is_known(content.get("architectures"))):
        return parse_config(content, generation)
    return parse_modelling_config(content, generation, remote_code=remote_code)


def _is_known(architectures: object) -> bool:
    """Whether the table has it. What is no list with one name is for the table to refuse."""
    is_name = isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)
    return not is_name or architectures[0] in {*ARCHITECTURES, *TEXT_PARTS}  # type: ignore[index]
