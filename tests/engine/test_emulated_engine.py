"""A whole engine on the emulated device: asynchronous steps, staged inputs, recorded graphs over flashinfer's stand-in.

The same requests on the host, one step after another with plain torch attention, must give the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from baton.device.base import Device
from baton.device.emulated import EmulatedDevice, EmulatedGraph
from baton.engine.attention.choose import AttentionChoice, AttentionShape
from baton.engine.attention.flashinfer import FlashInferAttention
from baton.engine.attention.flashinfer_limits import float_workspace_bytes
from baton.engine.attention.paged_kv import PagedKv
from baton.engine.build import Engine, build_engine
from baton.engine.core import EngineCore
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.request import Request
from baton.engine.settings import EngineSettings
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from tests.checkpoints import make_checkpoint
from tests.engine.attention import flashinfer_stand_in as stand_in
from tests.engine.models.adapters.adapter_folders import write_adapter
from tests.engine.scheduler.proposers import Guessing, oracle
from tests.request_keys import key_of

MAX_NUM_SEQS = 6


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return make_checkpoint(folder, request.param, changes={"head_dim": 64})


def choose_stand_in(setting: str, device: Device, shape: AttentionShape, kernels: None) -> AttentionChoice:
    """As `choose_attention` does where there is flashinfer."""
    kv = shape.layout.groups[0].kv
    num_bytes = float_workspace_bytes(
        shape.num_heads, kv.num_kv_heads, kv.head_dim, stand_in.NUM_PROCESSORS, shape.max_graph_sequences
    )

    def build(paged: PagedKv) -> FlashInferAttention:
        return FlashInferAttention(
            stand_in.CALLS,
            paged,
            num_heads=shape.num_heads,
            workspace=torch.zeros(num_bytes, dtype=torch.uint8),
            max_blocks_per_sequence=shape.max_blocks,
        )

    return AttentionChoice("flashinfer", num_bytes, build)


@contextmanager
def engine(
    folder: Path,
    device: str,
    adapters: Mapping[str, Path] | None = None,
    proposer: Proposer | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    chosen = {"block_size": 16, "num_blocks": 24, "num_threads": 1, "max_model_len": 160, **settings}
    with (
        mock.patch("baton.engine.model_shard.choose_attention", choose_stand_in)
        if device == "emulated"
        else mock.MagicMock()
    ):
        built = build_engine(
            EngineSettings(model=str(folder), device=device, max_num_seqs=MAX_NUM_SEQS, **chosen),
            allocate_private,
            adapters=adapters,
            proposer=proposer,
        )
    yield built
    built.device.close()


@dataclass
class Traffic:
    """Requests that come while others run; `drive` ends some of them early. Tokens by request. `adapters`: their own
    in turn."""

    seed: int
    adapters: Sequence[bytes] = (b"",)
    tokens: dict[RequestKey, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.waiting = [self._request(number) for number in range(14)]

    def _request(self, number: int) -> tuple[RequestKey, list[int], DecodingParams]:
        beginning = [7 * (number % 3) + place % 5 for place in range(self.chance.choice([0, 16, 40]))]
        prompt = [*beginning, *(self.chance.randrange(300) for _ in range(self.chance.randrange(1, 60)))]
        options: dict[str, Any] = self.chance.choice(
            [
                {"temperature": 0.0},
                {"temperature": 0.0, "logprobs": 2},
                {"temperature": 0.8, "seed": number},
                {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": number},
                {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
                {"temperature": 0.0, "stop_token_ids": tuple(range(0, 300, 9))},
            ]
        )
        return key_of(number), prompt, DecodingParams(max_tokens=self.chance.randrange(1, 60), **options)

    def following(self, request: Request, count: int) -> Sequence[int]:
        """What comes next when it is said again."""
        first = len(request.token_ids) - request.num_prompt_tokens
        return self.tokens.get(request.key, [])[first : first + count]

    def drive(self, core: EngineCore) -> None:
        """All requests to their ends. Tokens are compared by request and not by step: scheduling decides when a request
        joins, never what it says."""
        while self.waiting or core.has_work:
            if self.waiting and len(core.request_keys()) < 9:
                key, prompt, params = self.waiting.pop()
                number = len(self.waiting)
                forks = [key_of(f"{number}.{fork}") for fork in range(0 if number % 5 else 2)]
                adapter = self.adapters[number % len(self.adapters)]
                core.add(key, Prompt.of(prompt, adapter=adapter), params, forks=forks)
            for output in core.step():
                if output.tokens:
                    self.tokens.setdefault(output.key, []).extend(output.token_ids)
            core.check()


@pytest.mark.parametrize(
    ("checkpoint", "seed", "num_blocks"), [("qwen3", 0, 12), ("llama", 1, 200)], indirect=["checkpoint"]
)
def test_asynchronous_and_recorded_steps_equal_plain_ones(checkpoint: Path, seed: int, num_blocks: int) -> None:
    plain, emulated = Traffic(seed), Traffic(seed)
    with engine(checkpoint, "cpu", num_blocks=num_blocks) as built:
        plain.drive(built.core)
    with (
        engine(checkpoint, "emulated", num_blocks=num_blocks) as built,
        mock.patch.object(EmulatedGraph, "replay", autospec=True, side_effect=EmulatedGraph.replay) as replay,
    ):
        assert isinstance(built.device, EmulatedDevice)
        assert built.device.num_graphs == 4
        emulated.drive(built.core)
        assert built.core.status().num_held_blocks == 0
        assert built.core.status().num_preemptions > 0 or num_blocks > 12
    assert replay.call_count > 10
    assert emulated.tokens == plain.tokens


@pytest.mark.parametrize(("checkpoint", "num_blocks"), [("qwen3", 12), ("llama", 200)], indirect=["checkpoint"])
def test_drafts_change_no_token_of_recorded_steps(checkpoint: Path, num_blocks: int) -> None:
    plain, emulated = Traffic(2), Traffic(2)
    with engine(checkpoint, "cpu", num_blocks=num_blocks) as built:
        plain.drive(built.core)
    proposer = Guessing(lambda request, count: plain.following(request, count), 0.8, most=3)
    with engine(checkpoint, "emulated", num_blocks=num_blocks, proposer=proposer) as built:
        emulated.drive(built.core)
        assert proposer.num_accepted > 50
    assert emulated.tokens == plain.tokens


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_a_draft_is_a_row_of_a_graph(checkpoint: Path) -> None:
    found: list[list[int]] = []
    num_replays = 0
    replays = mock.patch.object(EmulatedGraph, "replay", autospec=True, side_effect=EmulatedGraph.replay)
    for proposer in (None, oracle(lambda request, count: found[0][len(request.token_ids) - 20 :][:count], most=3)):
        with engine(checkpoint, "emulated", proposer=proposer) as built, replays as replay:
            params = DecodingParams(temperature=1.0, seed=3, max_tokens=40, repetition_penalty=1.2, ignore_eos=True)
            built.core.add(key_of("a"), Prompt.of(range(20)), params)
            steps = [outputs for _ in iter(lambda: built.core.has_work, False) if (outputs := built.core.step())]
        found.append([token_id for (output,) in steps for token_id in output.token_ids])
        num_replays = replay.call_count
        assert num_replays == len(steps) - 1  # all but that of the prompt
    assert found[0] == found[1]
    assert num_replays < 20


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_requests_of_adapters_are_preempted_forked_and_computed_ahead_like_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    folders = {name: write_adapter(tmp_path / name, checkpoint, seed=seed) for name, seed in (("one", 1), ("two", 2))}
    found = []
    for device in ("cpu", "emulated"):
        with engine(checkpoint, device, folders, num_blocks=12) as built:
            traffic = Traffic(0, [b"", *built.adapters.values()])
            traffic.drive(built.core)
            assert built.core.status().num_preemptions > 0
            found.append(traffic.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_eager_steps_are_recorded_nowhere(checkpoint: Path) -> None:
    with engine(checkpoint, "emulated", enforce_eager=True) as built:
        assert isinstance(built.device, EmulatedDevice)
        assert built.device.num_graphs == 0
        traffic = Traffic(0)
        traffic.drive(built.core)
        assert len(traffic.tokens) == 14 + 3 * 2
