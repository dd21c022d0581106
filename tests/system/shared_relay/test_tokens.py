"""Token ids and log probabilities through the whole relay, HTTP in and server-sent events out, equal transformers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.engine.build import build_engine
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.request_keys import key_of
from tests.system.conftest import Checkpoints, running
from tests.system.harness import BLOCK_SIZE, MODEL_NAME, Answer, Relay, start_relay
from tests.system.reference import LOGPROB_TOLERANCE, Reference, make_prompt

References = Callable[[str], Reference]
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 5 * BLOCK_SIZE + 7, 150)
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 1234, "top_p": 0.95}


def require_greedy(
    answers: Sequence[Answer], prompts: Sequence[tuple[int, ...]], reference: Reference, num_tokens: int = 24
) -> None:
    """Same tokens exactly, log probabilities within the tolerance."""
    for answer, prompt in zip(answers, prompts, strict=True):
        wanted = reference.greedy(prompt, num_tokens, answer.token_ids)
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_TOLERANCE)
        assert answer.finish_reason == "length"


def received(relay: Relay) -> list[int]:
    """Handoffs delivered so far, by decode node."""
    return [node.metrics().value("kv_receive_delivered_total") for node in relay.decodes]


@pytest.mark.parametrize("num_in_flight", [1, 4, 16])
def test_llama_equals_transformers_on_every_kind_of_node(
    llama_relay: Relay, references: References, num_in_flight: int
) -> None:
    prompts = [make_prompt(length, 100 * num_in_flight + index) for index, length in enumerate(LENGTHS * 4)]
    require_greedy(llama_relay.ask_all(prompts, num_in_flight, logprobs=0), prompts, references("llama"))


def test_log_probabilities_of_prompts_equal_transformers(llama_relay: Relay, references: References) -> None:
    reference = references("llama")
    prompts = [make_prompt(length, 300) for length in LENGTHS for _ in range(2)]

    def ask(prompt: tuple[int, ...]) -> Any:
        options: dict[str, Any] = {"ignore_eos": True, "prompt_logprobs": 0}
        return llama_relay.client.completions.create(
            model=MODEL_NAME, prompt=[*prompt], echo=True, logprobs=1, max_tokens=4, temperature=0,
            extra_body=options,
        )  # fmt: skip

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        output, (choice,) = reference.greedy(prompt, 4), answer.choices
        first, *found = choice.logprobs.token_logprobs
        assert first is None
        expected = [*reference.prompt_logprobs(prompt), *output.logprobs]
        assert found == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
        own = [entry[str(token_id)] for token_id, entry in zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)]
        assert [entry["logprob"] for entry in own] == found[: len(own)]
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for prompt in prompts[-4:]:
        alone = llama_relay.client.completions.create(
            model=MODEL_NAME, prompt=[*prompt], echo=True, logprobs=0, max_tokens=0
        ).choices[0]
        assert alone.logprobs is not None
        assert alone.logprobs.token_logprobs is not None
        assert alone.logprobs.token_logprobs[1:] == pytest.approx(
            reference.prompt_logprobs(prompt), abs=LOGPROB_TOLERANCE
        )


def test_preempted_requests_equal_transformers(llama_relay: Relay, references: References) -> None:
    small = llama_relay.decodes[2]
    before = small.metrics().value("num_preemptions_total")
    for first_seed in range(7000, 7500, 100):  # whether they meet at the small node depends on the machine
        prompts = [make_prompt(40 + 3 * number, first_seed + number) for number in range(12)]
        answers = llama_relay.ask_all(prompts, len(prompts), max_tokens=200, logprobs=0)
        require_greedy(answers, prompts, references("llama"), 200)
        if small.metrics().value("num_preemptions_total") > before:
            return
    pytest.fail("nothing was preempted")


def test_prompts_wait_for_room_in_a_small_prefill_pool(llama_relay: Relay, references: References) -> None:
    prompts = [make_prompt(300 + seed, 8000 + seed) for seed in range(12)]
    require_greedy(llama_relay.ask_all(prompts, len(prompts), logprobs=0), prompts, references("llama"))


def test_seeded_sampling_is_the_same_split_colocated_and_offline(
    llama_relay: Relay, checkpoints: Checkpoints, relays: list[Relay], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts = [make_prompt(length, 9000 + length) for length in LENGTHS]
    split = llama_relay.ask_all(prompts, 4, logprobs=0, **SEEDED)
    colocated_relay = start_relay(checkpoints("llama"), tmp_path_factory.mktemp("colocated"), prefill=())
    for relay in running(colocated_relay, relays):
        colocated = relay.ask_all(prompts, 4, logprobs=0, **SEEDED)
        assert [answer.token_ids for answer in split] == [answer.token_ids for answer in colocated]
        assert received(relay) == [0]
    offline = _generate_offline(str(checkpoints("llama")), prompts)
    assert [answer.token_ids for answer in split] == offline
    greedy = llama_relay.ask_all(prompts, 4)
    assert [answer.token_ids for answer in greedy] != offline, "the temperature changed nothing"


def _generate_offline(model: str, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    core = build_engine(EngineSettings(model=model, num_threads=1, num_blocks=256), allocate_private).core
    params = DecodingParams(max_tokens=24, ignore_eos=True, logprobs=0, **SEEDED)
    outputs: dict[RequestKey, list[int]] = {key_of(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        core.add(key_of(index), Prompt.of(prompt), params)
    while core.has_work:
        for output in core.step():
            if output.tokens:
                outputs[output.key].extend(output.token_ids)
        core.check()
    return [tuple(token_ids) for token_ids in outputs.values()]
