"""Offline use: the engine in this process, text in and text out.

    from baton import LLM, SamplingParams
    for answer in LLM().generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=40)):
        print(answer.text)

Owns one engine and its tokenizer. Prompts of a call run together in one continuous batch; results come in the order of
the prompts. The same scheduler, cache and sampler serve the nodes, so a seeded result here equals theirs.
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from baton.engine.build import build_engine
from baton.engine.models.generation_defaults import AUTO, load_generation_defaults
from baton.engine.models.identity import find_checkpoint
from baton.engine.runner.kv_memory import allocate_private, allocate_shared
from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.step import RequestOutput
from baton.engine.settings import EngineSettings
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.choice_text import ChoiceText, TextDelta, TextOptions, join_deltas
from baton.engine.text.tokenizer import Tokenizer
from baton.ranks.executor.choose import open_executor
from baton.wire.errors import BatonError, InvalidRequest
from baton.wire.messages.output import TokenLogprobs
from baton.wire.prompt import Prompt
from baton.wire.prompt_logprobs import PromptTokenLogprobs, read_rows
from baton.wire.request_key import RequestKey
from baton.wire.sampling import MAX_PREDICTION_TOKENS, SamplingParams

_NOT_A_NUMBER = "the model computed NaN for a prompt: its weights overflow in this dtype"
_READINESS_WAIT_S = 0.001
PromptInput: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished prompt. `logprobs` has an entry per token when the parameters asked for them, `prompt_logprobs` one
    per token of the prompt, None for the first."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    num_cached_tokens: int
    prompt_logprobs: tuple[PromptTokenLogprobs | None, ...] = ()


class LLM:
    """A model in this process. Keyword arguments are those of `EngineSettings` (`dtype`, `max_model_len`, ...).

    Without a model, the built-in demo model is loaded. `adapters`: folders of LoRA adapters as PEFT publishes them, by
    names of your own. Raises `ModelLoadError` and `InvalidSetting`.
    """

    def __init__(self, model: str = "", *, adapters: Mapping[str, str | Path] | None = None, **settings: Any) -> None:
        chosen = EngineSettings(model=model, **settings)
        allocate = allocate_shared if chosen.num_ranks > 1 else allocate_private
        folders = {name: Path(path) for name, path in (adapters or {}).items()}
        engine = build_engine(chosen, allocate, open_executor=open_executor, adapters=folders)
        self._core = engine.core
        self._adapters = {"": b"", **engine.adapters}
        weakref.finalize(self, engine.executor.close)
        weakref.finalize(self, engine.core.close)
        folder = find_checkpoint(model)
        self._tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate.from_folder(folder)
        self._defaults = SamplingParams(**load_generation_defaults(AUTO, folder).values)  # type: ignore[arg-type]
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str] = "",
        show_progress: bool = False,
    ) -> list[Completion]:
        """Continue each prompt, given as text or as token ids. One `SamplingParams` for all, or one each; without any,
        the sampling that the checkpoint recommends. `adapter`: the name of the one to use, for all or one each; "": the
        model alone.

        Raises `InvalidRequest` before anything is computed when a prompt or a parameter cannot be used.
        """
        listed = _as_list(prompts)
        return self._run([self._token_ids(prompt) for prompt in listed], params, adapter, show_progress)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
        show_progress: bool = False,
    ) -> Completion:
        """Answer a conversation of {"role", "content"} messages through the model's chat template. `adapter`: see
        `generate`."""
        text = self._template.render(list(messages), add_generation_prompt=True)
        return self._run([self._tokenizer.encode(text, add_special_tokens=False)], params, adapter, show_progress)[0]

    def _token_ids(self, prompt: PromptInput) -> list[int]:
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidRequest("a prompt holds no tokens", "prompts")
        if not all(0 <= token_id < self._tokenizer.vocab_size for token_id in token_ids):
            raise InvalidRequest("a prompt holds token ids outside the vocabulary", "prompts")
        return token_ids

    def _run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str],
        show_progress: bool,
    ) -> list[Completion]:
        each = _params_for(prompts, self._defaults if params is None else params)
        digests = self._digests(prompts, adapter)
        streams: dict[RequestKey, _Stream] = {}
        try:
            for token_ids, one, digest in zip(prompts, each, digests, strict=True):
                self._num_requests += 1
                key = RequestKey.numbered(self._num_requests)
                streams[key] = self._start(key, Prompt.of(token_ids, adapter=digest), one)
            with tqdm(total=len(streams), unit="prompt", disable=not show_progress) as bar:
                while self._core.has_work:
                    outputs = self._core.step()
                    if not outputs and self._core.awaits_readiness:
                        time.sleep(_READINESS_WAIT_S)
                    bar.update(self._apply(outputs, streams))
        except BaseException:
            for key in streams:
                self._core.abort(key)
            raise
        return [stream.completion() for stream in streams.values()]

    def _digests(self, prompts: Sequence[list[int]], adapter: str | Sequence[str]) -> list[bytes]:
        """That of the adapter of each prompt."""
        names = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
        if len(names) != len(prompts):
            raise InvalidRequest(f"{len(names)} adapters for {len(prompts)} prompts", "adapter")
        for name in names:
            if name not in self._adapters:
                raise InvalidRequest(f"there is no adapter {name!r:.50}", "adapter")
        return [self._adapters[name] for name in names]

    def _start(self, key: RequestKey, prompt: Prompt, params: SamplingParams) -> _Stream:
        params.check_vocabulary(self._tokenizer.vocab_size)
        seeded = params if params.seed is not None else replace(params, seed=secrets.randbits(62))
        if params.prediction:
            ids = self._tokenizer.encode(params.prediction, add_special_tokens=False)
            seeded = replace(seeded, prediction_ids=tuple(ids[:MAX_PREDICTION_TOKENS]))
        self._core.add(key, prompt, seeded.decoding())
        return _Stream(self._tokenizer, prompt.token_ids, seeded)

    def _apply(self, outputs: Iterable[RequestOutput], streams: Mapping[RequestKey, _Stream]) -> int:
        """Hand a step's tokens to their streams; how many of them ended."""
        num_ended = 0
        for output in outputs:
            if output.has_failed:
                raise InvalidRequest(output.failure, "grammar") if output.failure else BatonError(_NOT_A_NUMBER)
            stream = streams[output.key]
            if output.read is not None:
                stream.take_prompt(output.read)
            if not output.tokens:
                continue
            stream.take(output)
            if stream.has_ended:
                num_ended += 1
                self._core.abort(output.key)
        return num_ended


class _Stream:
    """One prompt while it is generated."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt_ids = tuple(prompt_ids)
        options = TextOptions(params.stop, params.include_stop_str_in_output, min_tokens=params.min_tokens)
        self._text = ChoiceText(tokenizer, options, prompt_ids)
        self._deltas: list[TextDelta] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._wants_logprobs = params.logprobs is not None
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[PromptTokenLogprobs | None] = [] if params.prompt_logprobs is None else [None]

    @property
    def has_ended(self) -> bool:
        """Whether the text of this prompt is complete."""
        return self._text.finish_reason is not None

    def take_prompt(self, read: RowsRead) -> None:
        """Add log probabilities of the next tokens of the prompt. Raises `BatonError` when they are no numbers."""
        if not read.is_valid:
            raise BatonError(_NOT_A_NUMBER)
        self._prompt_logprobs += read_rows(read.values, read.num_rows)

    def take(self, output: RequestOutput) -> None:
        """Add the tokens of a step."""
        self._num_cached_tokens = output.num_cached_tokens
        token_ids = output.token_ids
        self._deltas.append(self._text.push(token_ids, (), output.finish_reason))
        num_taken = self._text.num_completion_tokens - len(self._token_ids)
        self._token_ids += token_ids[:num_taken]
        if self._wants_logprobs:
            self._logprobs += [token.logprobs for token in output.tokens[:num_taken] if token.logprobs is not None]

    def completion(self) -> Completion:
        """The result. Raises `BatonError` when the request never finished."""
        whole = join_deltas(self._deltas)
        if whole.finish_reason is None:
            raise BatonError("a request did not finish")
        return Completion(
            prompt_token_ids=self._prompt_ids,
            text=whole.text,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=whole.finish_reason,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One text, one list of ids, or a list of either: as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    return [item for item in items if not isinstance(item, int)]


def _params_for(
    prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequest(f"{len(params)} parameters for {len(prompts)} prompts", "params")
    return list(params)
