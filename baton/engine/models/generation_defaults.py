"""The sampling that a checkpoint recommends in its `generation_config.json`, for requests that do not say otherwise.

Owns which of its fields count, as other servers have it: temperature, top_p, top_k, min_p, repetition_penalty, and
`max_new_tokens` as the most that any request gets. `do_sample` does not count: a request that wants the likeliest
tokens says temperature 0. Imports no torch: the router asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.text.checkpoint_files import read_json
from baton.wire.errors import InvalidRequest, InvalidSetting, ModelLoadError
from baton.wire.sampling import DecodingParams

AUTO = "auto"
NO_DEFAULTS = ("none", "vllm")
"""Values of `--generation-config` that leave every default as it is; the second is vLLM's name for it."""
_FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`values`: by the names of request fields. `max_tokens`: of any request, None for no limit."""

    values: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def __str__(self) -> str:
        shown = {**self.values, **({} if self.max_tokens is None else {"at most max_tokens": self.max_tokens})}
        return ", ".join(f"{name} {value:g}" for name, value in shown.items())

    def missing_in(self, given: set[str]) -> dict[str, float]:
        """The values of the fields that a request did not give."""
        return {name: value for name, value in self.values.items() if name not in given}

    def limited(self, params: DecodingParams) -> DecodingParams:
        """`params` with no more tokens than any request gets. Raises `InvalidRequest` when that is below min_tokens."""
        if self.max_tokens is None:
            return params
        return params.with_at_most(min(params.max_tokens or self.max_tokens, self.max_tokens))


def load_generation_defaults(setting: str, folder: Path) -> GenerationDefaults:
    """The defaults of the checkpoint in `folder`, or as `setting` says: "auto", one of `NO_DEFAULTS`, or another folder
    with a `generation_config.json`. Raises `InvalidSetting`, and `ModelLoadError` for values that cannot be."""
    if setting in NO_DEFAULTS:
        return GenerationDefaults()
    source = folder if setting == AUTO else Path(setting).expanduser()
    if setting != AUTO and not (source / _FILE).is_file():
        raise InvalidSetting(
            f"--generation-config {setting!r:.200} is neither {AUTO}, nor {NO_DEFAULTS[0]}, nor a folder with {_FILE}"
        )
    content = read_json(source / _FILE)
    values = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    try:
        found = DecodingParams(**values, max_tokens=content.get(_LIMIT))  # type: ignore[arg-type]  # it checks them
    except InvalidRequest as error:
        raise ModelLoadError(
            f"{source / _FILE}: {error.message}; --generation-config {NO_DEFAULTS[0]} leaves it out"
        ) from None
    return GenerationDefaults({name: getattr(found, name) for name in values}, found.max_tokens)
