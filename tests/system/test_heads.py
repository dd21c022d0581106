"""A head in real relays: its KV comes with the prompt's, drafts are right, and no token differs, whoever dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.engine.speculation.heads.right_head import config_of, make_predictable, make_right_head
from tests.system.conftest import running
from tests.system.harness import Node, Relay, start_relay, wait_until
from tests.system.reference import Reference, make_prompt

LONG = 3000
"""Takes longer than finding out who generates."""
NUM_GREEDY = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predictable(tmp_path_factory.mktemp("model"), max_position=4096)


@pytest.fixture(scope="module")
def flags(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    head = make_right_head(tmp_path_factory.mktemp("head"), model)
    return ("--lease-s", "3", "--speculative-config", config_of(head))


@pytest.fixture(scope="module")
def relay(
    relays: list[Relay], model: Path, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Relay]:
    router = ("--local-prefill-tokens", "0", "--node-wait-s", "0")
    folder = tmp_path_factory.mktemp("relay")
    yield from running(start_relay(model, folder, prefill=(flags,), decode=(flags, flags), router=router), relays)


def accepted(node: Node) -> int:
    """Drafts of the node that were right; none were made yet where there is no such metric."""
    try:
        return node.metrics().value("spec_decode_num_accepted_tokens_total", method="eagle3")
    except KeyError:
        return 0


def test_answers_are_those_of_the_model_and_drafts_are_right(relay: Relay, model: Path) -> None:
    reference, prompts = Reference(model), [make_prompt(70 + number, 400 + number) for number in range(3)]
    for answer, prompt in zip(relay.ask_all(prompts, 3, NUM_GREEDY), prompts, strict=True):
        assert answer.token_ids == reference.greedy(prompt, NUM_GREEDY, answer.token_ids).token_ids
    delivered = [node.metrics().value("kv_receive_delivered_total") for node in relay.decodes]
    assert sum(delivered) == len(prompts)

    salts = count()

    def are_accepted() -> bool:
        # how many drafts pay is a question of time; of another tenant no text is known that would come first
        relay.ask(prompts[0], NUM_GREEDY, extra_body={"cache_salt": f"tenant-{next(salts)}"})
        return any(accepted(node) for node in relay.decodes)

    wait_until(are_accepted, "drafts are right", 60.0)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_stream_continues_exactly_when_its_decode_node_is_killed(
    relay: Relay, flags: tuple[str, ...], temperature: float
) -> None:
    prompt = make_prompt(66, 430)
    undisturbed = relay.ask(prompt, LONG, temperature=temperature, seed=7)
    with relay.open(prompt, LONG, temperature=temperature, seed=7) as stream:
        stream.read(5)
        (victim,) = [node for node in relay.decodes if node.metrics().value("num_requests_running")]
        relay.nodes.remove(victim)
        victim.kill()
        stream.read_all()
    assert stream.answer().token_ids == undisturbed.token_ids
    relay.add("decode", *flags)
    victim.require_nothing_left()


def test_a_stream_that_moves_goes_on_exactly(relay: Relay, flags: tuple[str, ...]) -> None:
    """Told to stop, a node hands its streams over with all their KV, the head's among it."""
    prompt = make_prompt(66, 440)
    undisturbed = relay.ask(prompt, LONG, temperature=0.9, seed=7)
    with relay.open(prompt, LONG, temperature=0.9, seed=7) as stream:
        stream.read(5)
        (leaving,) = [node for node in relay.decodes if node.metrics().value("num_requests_running")]
        relay.nodes.remove(leaving)
        (other,) = relay.decodes
        before = accepted(other)
        leaving.signal(signal.SIGTERM)
        stream.read_all()
    assert stream.answer().token_ids == undisturbed.token_ids
    assert leaving.wait_exit(10) == 0
    assert accepted(other) >= before
    relay.add("decode", *flags)


def test_a_prompt_whose_prefill_node_is_killed_costs_nothing(relay: Relay, model: Path, flags: tuple[str, ...]) -> None:
    node = relay.prefills[0]
    relay.nodes.remove(node)
    node.kill()
    prompt = make_prompt(90, 450)
    answer = relay.ask(prompt, NUM_GREEDY)
    assert answer.token_ids == Reference(model).greedy(prompt, NUM_GREEDY, answer.token_ids).token_ids
    relay.add("prefill", *flags)
