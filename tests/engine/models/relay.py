"""Every architecture through a whole relay, compared with transformers, and the table of docs/models.md made of it.

    python -m tests.engine.models.relay                            # all of them, about five minutes
    python -m tests.engine.models.relay --only gemma lfm2          # those whose names contain one of these
    python -m tests.engine.models.relay --page docs/models.md      # all, and the page's table is written
    python -m tests.engine.models.relay --only qwen3 --kv-cache-dtype fp8    # compared with keys and values rounded so
    python -m tests.engine.models.relay --only lfm2 --prefill-ranks 2 --decode-ranks 1x2   # 2 stages of 1 rank

For each a random model in float32, a router, a prefill node and two decode nodes, one of which gets KV over shm and one
over zmq. Prompts come in chunks of 16 tokens, in blocks of 8; each goes to both decode nodes; then longer ones that
begin alike, which both sides find in their prefix caches; then several at once. Windows are shorter than the prompts.
Each token has to be the likeliest for transformers, and its log probability within 1e-4 of the one there. What Baton
refuses is asked of it as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from baton.wire.errors import BatonError
from tests.checkpoints import write_tokenizer
from tests.engine.models.families import COMMON, FAMILIES, SEEING, Family, make_model
from tests.engine.models.modelling.architectures import ALSO_COMPUTED, COMPUTED, REFUSED
from tests.engine.models.rounded_kv import rounding
from tests.engine.models.test_families import built
from tests.system.harness import Answer, Relay, start_relay
from tests.system.parallel_grid import ranks_of
from tests.system.reference import LOGPROB_TOLERANCE, make_prompt

BEGIN, END = "<!-- relay: begin -->\n", "<!-- relay: end -->\n"
VOCAB_SIZE = 320
_LENGTHS = (19, 33, 47)
_NUM_TOKENS = 8
_ROUTER = ("--prefill-policy", "round_robin", "--decode-policy", "round_robin", "--local-prefill-tokens", "0")
_NODE = ("--block-size", "8", "--num-blocks", "64", "--max-num-batched-tokens", "16")
_DECODE = (("--kv-transport", "shm"), ("--kv-transport", "zmq"))
AUTO = "auto"
_BATON, _TRANSFORMERS = "Baton", "transformers"


@dataclass
class Found:
    """What one relay has shown. `handoffs`: delivered over shm and over zmq; `num_cached`: prompt tokens that the
    prefill node, and the decode nodes, had in their prefix caches."""

    architecture: str
    num_tokens: int = 0
    difference: float = 0.0
    handoffs: tuple[int, ...] = ()
    num_cached: tuple[int, ...] = ()
    wrong: list[str] = field(default_factory=list)


def families() -> Mapping[str, tuple[Family, str]]:
    """Every architecture, and whose code computes it."""
    others = {name: family for name, family in {**COMPUTED, **ALSO_COMPUTED}.items() if name not in FAMILIES}
    own = {**FAMILIES, **SEEING}
    return {
        **{name: (family, _BATON) for name, family in own.items()},
        **{name: (family, _TRANSFORMERS) for name, family in others.items()},
    }


@torch.inference_mode()
def compare(model: PreTrainedModel, prompt: Sequence[int], answer: Answer, found: Found) -> None:
    """Note in `found` what differs between `answer` and transformers."""
    ids = list(answer.token_ids)
    logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, -len(ids) :].float()
    likeliest, logprobs = logits.argmax(-1).tolist(), torch.log_softmax(logits, dim=-1)
    if len(ids) != _NUM_TOKENS or ids != likeliest:
        found.wrong.append(f"{len(prompt)} tokens of prompt: {ids} instead of {likeliest}")
    for row, token_id, logprob in zip(logprobs, ids, answer.logprobs, strict=True):
        found.difference = max(found.difference, abs(row[token_id].item() - logprob))
    found.num_tokens += len(ids)


def ask(relay: Relay, model: PreTrainedModel, found: Found) -> None:
    """All prompts, and what the nodes say of them."""
    prompts = [make_prompt(length, 1) for length in _LENGTHS]
    longer = [prompt + make_prompt(7, 2) for prompt in prompts]
    one_by_one = [prompt for prompt in (*prompts, *longer) for _ in _DECODE]
    together = [make_prompt(length + 5, seed) for length in _LENGTHS for seed in (3, 4)]
    answers = relay.ask_all(one_by_one, 1, _NUM_TOKENS, logprobs=0)
    answers += relay.ask_all(together, len(together), _NUM_TOKENS, logprobs=0)
    for prompt, answer in zip((*one_by_one, *together), answers, strict=True):
        compare(model, prompt, answer, found)
    relay.settle()
    received = [node.metrics() for node in relay.decodes]
    found.handoffs = tuple(metrics.value("kv_receive_delivered_total") for metrics in received)
    counts = [
        node.metrics().value("prompt_tokens_by_source_total", source="local_cache_hit")
        for node in (*relay.prefills, *relay.decodes)
    ]
    found.num_cached = (counts[0], sum(counts[1:]))
    if found.difference > LOGPROB_TOLERANCE:
        found.wrong.append(f"log probabilities differ by {found.difference:.1e}")
    if not all(found.handoffs):
        found.wrong.append(f"{found.handoffs} handoffs over shm and zmq")
    if not all(found.num_cached):
        found.wrong.append(f"{found.num_cached} tokens in the prefix caches of P and D")


def run(family: Family, folder: Path, ranks: Sequence[str], kv_cache_dtype: str) -> Found:
    """One relay from its start to its end. `ranks`: of prefill nodes and of decode nodes."""
    prefill, decode = ((*_NODE, "--kv-cache-dtype", kv_cache_dtype, *ranks_of(each)) for each in ranks)
    common: Mapping[str, Any] = {**COMMON, "vocab_size": VOCAB_SIZE}
    model = make_model(folder / "model", family, common)
    write_tokenizer(folder / "model", VOCAB_SIZE, COMMON["max_position_embeddings"])
    found = Found(type(model).__name__)
    relay = start_relay(
        folder / "model",
        folder / "relay",
        prefill=[prefill],
        decode=[(*decode, *flags) for flags in _DECODE],
        router=_ROUTER,
    )
    try:
        with nullcontext() if kv_cache_dtype == AUTO else rounding(model):
            ask(relay, model, found)
        relay.stop()
    finally:
        relay.close()
    return found


def refusal(family: Family, folder: Path) -> str:
    """What a node says of a model that it does not serve; "" for one that it does."""
    make_model(folder, family)
    try:
        built(folder, model_impl="transformers", max_model_len=32)
    except BatonError as error:
        return str(error).partition(" (docs/")[0]
    return ""


def table(rows: Mapping[str, tuple[str, Found]], refused: Mapping[str, str]) -> str:
    """The part of the page between the marks, of what was right."""
    all_found = [found for _, found in rows.values()]
    at_prefill, at_decode = zip(*(found.num_cached for found in all_found), strict=True)
    lines = [
        f"{len(rows)} models, of each {_range(found.num_tokens for found in all_found)} tokens compared, "
        f"{_range(count for found in all_found for count in found.handoffs)} handoffs over each transport, and "
        f"{_range(at_prefill)} tokens of prompts found in the prefix cache of P and {_range(at_decode)} in those of D:",
        "",
        "| model | architecture | computed by | largest difference |",
        "|---|---|---|---|",
    ]
    for name, (whose, found) in rows.items():
        lines.append(f"| {name} | `{found.architecture}` | {whose} | {found.difference:.0e} |")
    lines += ["", "Refused:", ""]
    lines += [f"- {words}" for words in refused.values()]
    return "\n".join(lines) + "\n"


def _range(counts: Iterable[int]) -> str:
    found = sorted(set(counts))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def with_table(page: str, text: str) -> str:
    """`page` with `text` between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}{END}{after}"


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def attempt(family: Family, ranks: Sequence[str], kv_cache_dtype: str) -> Found:
    """`run` in a folder of its own; whatever goes wrong is noted."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(family, Path(folder), ranks, kv_cache_dtype)
        except Exception as error:
            return Found("?", wrong=[f"{type(error).__name__}: {str(error)[-600:]}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 0 when every one was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.models.relay", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts of names")
    parser.add_argument("--page", type=Path, help="the page whose table is written; only with all of them")
    parser.add_argument("--kv-cache-dtype", choices=(AUTO, "fp8"), default=AUTO, help="of all nodes")
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}-ranks", default="1", metavar="NxS", help="of its nodes, in so many stages")
    asked = parser.parse_args(arguments)
    if asked.page and (asked.only or asked.kv_cache_dtype != AUTO):
        parser.error("--page: a table has all of them, as they are")
    torch.set_num_threads(1)
    rows: dict[str, tuple[str, Found]] = {}
    for name, (family, whose) in families().items():
        if asked.only and not any(part in name for part in asked.only):
            continue
        begin_s = time.monotonic()
        found = attempt(family, (asked.prefill_ranks, asked.decode_ranks), asked.kv_cache_dtype)
        rows[name] = (whose, found)
        said = f"WRONG: {'; '.join(found.wrong)}" if found.wrong else f"equal, {found.difference:.0e}"
        say(f"{name} ({found.architecture}, {whose}): {said} ({time.monotonic() - begin_s:.0f} s)")
    refused: dict[str, str] = {}
    for name, (family, _) in REFUSED.items() if not asked.only else ():
        with tempfile.TemporaryDirectory() as folder:
            refused[name] = refusal(family, Path(folder)) or f"{name}: SERVED"
        say(f"refused: {refused[name]}")
    wrong = [name for name, (_, found) in rows.items() if found.wrong]
    wrong += [name for name, words in refused.items() if words.endswith("SERVED")]
    if asked.page and not wrong:
        asked.page.write_text(with_table(asked.page.read_text(), table(rows, refused)))
    say(f"{len(rows)} compared" + (f", wrong: {', '.join(wrong)}" if wrong else ", all equal"))
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
