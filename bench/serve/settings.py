"""Settings of `baton bench serve`, named as those of `vllm bench serve`, and what their texts mean.

What is asked of the server is in `baton.bench.workload.dataset_settings`. Every text is parsed by `check`, before
anything is sent, so a run never ends in a setting that could not be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.bench.arguments import parse_json
from baton.bench.client.endpoint import checked_base_url
from baton.runtime.ranges import COUNT, COUNT_OR_NONE, PORT, POSITIVE, SECONDS, SECONDS_OR_NONE, Range
from baton.runtime.settings import setting
from baton.wire.errors import InvalidSetting

CHAT = "openai-chat"
SLO_METRICS = ("ttft", "tpot", "itl", "e2el")
POISSON, CONSTANT, TRACE = "poisson", "constant", "trace"

_SERVER, _TRAFFIC = "server", "traffic"
_SAMPLING, _RESULT = "sampling", "result"
_API_KEY_VARIABLE = "OPENAI_API_KEY"
_LoadT = TypeVar("_LoadT", bound="LoadSettings")


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What every load has, whichever command sends it: all but the dataset, and what `compare` and `sweep` decide."""

    backend: str = setting(
        "openai", "the API to use: completions or chat; vllm is openai", choices=("openai", CHAT, "vllm"), group=_SERVER
    )
    endpoint: str = setting(
        "",
        "path to ask; empty: /v1/completions, or /v1/chat/completions for openai-chat",
        group=_SERVER,
        metavar="PATH",
    )
    model: str = setting("", "name of the model; empty: the first that the server lists")
    served_model_name: str = setting("", "name of the model in requests, if --model is its folder", group=_SERVER)
    tokenizer: str = setting("", "checkpoint folder or hub id of the tokenizer; empty: --model's", group=_SERVER)
    vocab_size: int | None = setting(
        None,
        "draw token ids below this instead of using a tokenizer; prompts are token ids then",
        group=_SERVER,
        allowed=COUNT,
    )
    header: tuple[str, ...] = setting((), "headers of every request", group=_SERVER, metavar="KEY=VALUE")
    timeout_s: float = setting(
        600.0, "seconds after which an unanswered request has failed", group=_SERVER, allowed=SECONDS
    )
    burstiness: float = setting(
        1.0,
        "shape of the gamma distributed gaps: 1 is Poisson, less is burstier, more is steadier",
        group=_TRAFFIC,
        allowed=POSITIVE,
    )
    arrival: str | None = setting(
        None,
        "when requests are sent: at random, evenly, or as the trace says; none: trace for a trace without"
        " --request-rate, else poisson",
        choices=(POISSON, CONSTANT, TRACE),
        group=_TRAFFIC,
    )
    max_concurrency: int | None = setting(
        None, "requests in flight at most; the others wait, which is the schedule delay", allowed=COUNT
    )
    num_warmups: int = setting(
        0, "requests before the measured ones, with other prompts", group=_TRAFFIC, allowed=COUNT_OR_NONE
    )
    prompt_form: str = setting(
        "ids", "send prompts of completions as token ids or as text", choices=("ids", "text"), group=_SAMPLING
    )
    ignore_eos: bool = setting(False, "ask for answers of full length", group=_SAMPLING)
    temperature: float | None = setting(
        None, "of the sampling; none: the server's default", group=_SAMPLING, allowed=Range(0, 2)
    )
    extra_body: str = setting("", "JSON object that is added to every request", group=_SAMPLING, metavar="JSON")
    goodput: tuple[str, ...] = setting(
        (),
        f"goals of a good request in ms, of {', '.join(SLO_METRICS)}; itl is the request's largest gap",
        metavar="KEY:VALUE",
    )
    disable_tqdm: bool = setting(False, "show no progress bar", group=_RESULT)


@dataclass(frozen=True, slots=True)
class ServeBenchSettings(LoadSettings):
    """Settings of `baton bench serve` other than the dataset's."""

    base_url: tuple[str, ...] = setting((), "server instead of host and port; several are asked in turn", metavar="URL")
    host: str = setting("127.0.0.1", "host of the server", group=_SERVER)
    port: int = setting(8000, "port of the server", group=_SERVER, allowed=PORT)
    ready_check_timeout_sec: float = setting(
        0.0, "seconds to try a request until the server answers it; 0: no try", group=_SERVER, allowed=SECONDS_OR_NONE
    )
    request_rate: float = setting(
        math.inf,
        "requests per second; inf: all at once, or --max-concurrency at a time",
        allowed=Range(0, math.inf, excludes_least=True),
    )
    ramp_up_strategy: str | None = setting(
        None, "raise the rate over the run", choices=("linear", "exponential"), group=_TRAFFIC
    )
    ramp_up_start_rps: float | None = setting(
        None, "rate at the first request of a ramp", group=_TRAFFIC, allowed=Range(0, 10**6)
    )
    ramp_up_end_rps: float | None = setting(
        None, "rate at the last request of a ramp", group=_TRAFFIC, allowed=Range(0, 10**6)
    )
    save_result: bool = setting(False, "write the result as a JSON file", group=_RESULT)
    save_detailed: bool = setting(False, "with every request in the file", group=_RESULT)
    result_dir: str = setting("", "folder of the file; made if it is missing", group=_RESULT, metavar="FOLDER")
    result_filename: str = setting(
        "", "name of the file; empty: LABEL-RATEqps[-concurrencyN]-MODEL-TIME.json", group=_RESULT, metavar="FILE"
    )
    label: str = setting("", "name of the run; empty: the backend", group=_RESULT)


def check(settings: ServeBenchSettings) -> None:
    """Raise `InvalidSetting` for what cannot be used, whatever the dataset."""
    _check_ramp(settings)
    for parse in (urls, headers, extra_body):
        parse(settings)
    parse_slo(settings.goodput)


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """{metric: ms} of words like `ttft:200`, or several of them with commas between. Raises `InvalidSetting`."""
    found: dict[str, float] = {}
    for pair in (pair.strip() for word in words for pair in word.split(",")):
        name, _, text = pair.partition(":")
        if name not in SLO_METRICS:
            raise InvalidSetting(f"--goodput {pair!r:.40}: expected METRIC:MS, METRIC one of {', '.join(SLO_METRICS)}")
        if name in found:
            raise InvalidSetting(f"--goodput {pair!r:.40}: {name} is there twice")
        with contextlib.suppress(ValueError):
            found[name] = float(text)
        if not 0 <= found.get(name, math.nan) < math.inf:
            raise InvalidSetting(f"--goodput {pair!r:.40}: the limit is not a number of milliseconds")
    return found


def urls(settings: ServeBenchSettings) -> tuple[str, ...]:
    """The servers, without a slash at the end. Raises `InvalidSetting`."""
    try:
        return tuple(map(checked_base_url, settings.base_url or (f"http://{settings.host}:{settings.port}",)))
    except InvalidSetting as error:
        raise InvalidSetting(f"--base-url: {error}") from None


def headers(settings: ServeBenchSettings, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers of every request; the API key of `environment` (None: the process's) is one, as other clients do it.

    Raises `InvalidSetting`.
    """
    key = (os.environ if environment is None else environment).get(_API_KEY_VARIABLE)
    found = {"Authorization": f"Bearer {key}"} if key else {}
    for word in settings.header:
        name, separator, value = word.partition("=")
        if not separator or not name.strip():
            raise InvalidSetting(f"--header {word!r:.100} is not KEY=VALUE")
        found[name.strip()] = value.strip()
    return found


def without_secrets(settings: _LoadT) -> _LoadT:
    """Without the values of its headers: for the command that stands beside a result."""
    hidden = tuple(f"{header.partition('=')[0]}=..." for header in settings.header)
    return dataclasses.replace(settings, header=hidden)


def extra_body(settings: ServeBenchSettings) -> dict[str, Any]:
    """Members of every request. Raises `InvalidSetting`."""
    where = f"--extra-body {settings.extra_body!r:.100}"
    found = parse_json(settings.extra_body or "{}", where)
    if not isinstance(found, dict):
        raise InvalidSetting(f"{where} is not a JSON object")
    return found


def _check_ramp(settings: ServeBenchSettings) -> None:
    start, end = settings.ramp_up_start_rps, settings.ramp_up_end_rps
    if settings.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise InvalidSetting("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return
    if start is None or end is None or not 0 < start < end:
        raise InvalidSetting("--ramp-up-strategy needs --ramp-up-start-rps above 0 and below --ramp-up-end-rps")
    if math.isfinite(settings.request_rate) or settings.arrival not in (None, POISSON):
        raise InvalidSetting("--ramp-up-strategy decides the rate: leave --request-rate and --arrival out")
