"""The server before the load: which tokens its model has, until when it answers, and until it is warm.

Prompts of the requests before the measured ones are random tokens of a seed of their own, as long as the measured ones
on average: another seed of a file's dataset could draw the same rows again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from baton.bench.client.driver import LoadPlan, run_load
from baton.bench.client.endpoint import CHAT_COMPLETIONS, COMPLETIONS, Endpoint, RequestOptions, probe
from baton.bench.serve.settings import CHAT, ServeBenchSettings, headers
from baton.bench.workload.dataset_settings import RANDOM, DatasetSettings, Prompt
from baton.bench.workload.passages import Vocabulary, bare_vocabulary, vocabulary_of
from baton.bench.workload.registry import make_workload
from baton.demo.location import DEMO_MODEL_NAME, checkpoint_path
from baton.engine.models.checkpoint import resolve_checkpoint
from baton.wire.errors import InvalidSetting, RequestFailed

_PROBE_TIMEOUT_S = 10.0
_PAUSE_S = 0.25
_SEED_STEP = 1_000_003


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


async def find_server(settings: ServeBenchSettings, url: str, ready_at_s: float) -> Endpoint:
    """What `url` serves, asked for until `ready_at_s` (`time.monotonic()`), once at least. Raises `RequestFailed`."""
    name = settings.served_model_name or settings.model
    path = settings.endpoint or (CHAT_COMPLETIONS if settings.backend == CHAT else COMPLETIONS)
    while True:
        try:
            return await probe(url, path, name, _PROBE_TIMEOUT_S, headers(settings))
        except RequestFailed:
            if time.monotonic() + _PAUSE_S > ready_at_s:
                raise
            await asyncio.sleep(_PAUSE_S)


async def get_ready(
    settings: ServeBenchSettings,
    endpoints: Sequence[Endpoint],
    prompts: Sequence[Prompt],
    options: RequestOptions,
    ready_at_s: float,
    say: Callable[[str], None],
) -> None:
    """Send what comes before the measured requests: the first of `prompts` as a check, the others to warm up.

    Servers list their model before they can compute, so the check is repeated until it is answered. Raises
    `RequestFailed` when that is not in time, and when every warm-up failed.
    """

    def plan(prompts: Sequence[Prompt], max_concurrency: int | None) -> LoadPlan:
        return LoadPlan(tuple(prompts), (0.0,) * len(prompts), max_concurrency, settings.timeout_s)

    check, *warmups = prompts
    for endpoint in endpoints if settings.ready_check_timeout_sec else ():
        while failed := await _failures([endpoint], plan([check], 1), options):
            if time.monotonic() + _PAUSE_S > ready_at_s:
                raise RequestFailed(f"{endpoint.url} does not get ready: {failed[0]}")
            await asyncio.sleep(_PAUSE_S)
    if warmups:
        say(f"warming up with {len(warmups)} requests")
        failed = await _failures(endpoints, plan(warmups, settings.max_concurrency), options)
        if len(failed) == len(warmups):
            raise RequestFailed(f"every warm-up request failed, the first one: {failed[0]}")
        if failed:
            say(f"{len(failed)} of them failed")


def other_prompts(
    num: int, dataset: DatasetSettings, measured: Sequence[Prompt], vocabulary: Vocabulary
) -> tuple[Prompt, ...]:
    """`num` prompts that are not among `measured`, which `dataset` made."""
    alike = DatasetSettings(
        dataset_name=RANDOM,
        num_prompts=num,
        seed=dataset.seed + _SEED_STEP,
        random_input_len=max(1, round(fmean(len(prompt.token_ids) for prompt in measured))),
        random_output_len=max(1, round(fmean(prompt.num_output_tokens for prompt in measured))),
    )
    return make_workload(alike, vocabulary).prompts


async def _failures(endpoints: Sequence[Endpoint], plan: LoadPlan, options: RequestOptions) -> list[str]:
    outcomes = (await run_load(endpoints, plan, options, lambda _: None)).outcomes
    return [f"{outcome.failure}: {outcome.message}" for outcome in outcomes if outcome.failure is not None]
