"""Every family through the whole engine, compared with transformers: greedy tokens and their log probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.build import Engine, build_engine
from baton.engine.models.weight_files import SINGLE_FILE
from baton.engine.runner.kv_memory import allocate_private
from baton.engine.scheduler.step import SampledToken
from baton.engine.settings import EngineSettings
from baton.ranks.executor.choose import open_executor
from baton.wire.errors import InvalidSetting, ModelLoadError
from baton.wire.prompt import Prompt
from baton.wire.sampling import DecodingParams
from tests.checkpoints import write_weights
from tests.engine.models.families import FAMILIES, VOCAB_SIZE, make_model
from tests.engine.models.rounded_kv import rounding
from tests.request_keys import key_of

NUM_PROMPT, NUM_SHARED, NUM_OUTPUT = 29, 21, 6


@dataclass
class Answer:
    """What an engine gave for a prompt."""

    prompt: Sequence[int]
    tokens: list[SampledToken] = field(default_factory=list)
    num_cached: int = 0


def prompts() -> list[list[int]]:
    """Two prompts that begin alike."""
    ids = torch.randint(0, VOCAB_SIZE, (2, NUM_PROMPT), generator=torch.Generator().manual_seed(7))
    ids[1, :NUM_SHARED] = ids[0, :NUM_SHARED]
    return ids.tolist()


def built(folder: Path, **settings: object) -> Engine:
    """Chunks of 8 tokens, blocks of 4."""
    values = {"num_threads": 1, "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 8, **settings}
    chosen = EngineSettings(model=str(folder), **values)  # type: ignore[arg-type]
    return build_engine(chosen, allocate_private, open_executor=open_executor)


def answers(engine: Engine, *prompts: list[int]) -> list[Answer]:
    """What greedy sampling gives for the prompts together."""
    found = {key_of(number): Answer(prompt) for number, prompt in enumerate(prompts)}
    for key, answer in found.items():
        engine.core.add(
            key, Prompt.of(answer.prompt), DecodingParams(temperature=0.0, max_tokens=NUM_OUTPUT, logprobs=3)
        )
    while engine.core.has_work:
        for output in engine.core.step():
            assert not output.has_failed, output.failure
            answer = found[output.key]
            answer.tokens += output.tokens
            answer.num_cached = max(answer.num_cached, output.num_cached_tokens)
    return list(found.values())


@torch.inference_mode()
def assert_same(model: PreTrainedModel, answer: Answer) -> None:
    """Each token is the likeliest for transformers, with the same log probability, and so are those beside it."""
    ids = [token.token_id for token in answer.tokens]
    assert len(ids) == NUM_OUTPUT
    logits = model(torch.tensor([[*answer.prompt, *ids[:-1]]])).logits[0, -NUM_OUTPUT:].float()
    assert ids == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, dim=-1)
    for row, token in zip(expected, answer.tokens, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        top = row[list(token.logprobs.top_ids)]
        torch.testing.assert_close(torch.tensor(token.logprobs.top_logprobs), top, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    model, engine = make_model(tmp_path, family), built(tmp_path)
    one, other = prompts()
    (first,), (second,) = answers(engine, one), answers(engine, other)
    assert (first.num_cached, second.num_cached) == (0, NUM_SHARED // 4 * 4)
    # with another sequence in each step, and behind all of the prompt but its last block
    together = answers(engine, one, other)
    for answer in (first, second, *together):
        assert_same(model, answer)


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt-oss"])
def test_tokens_over_kv_in_8_bits_equal_those_of_transformers_over_the_rounded_kv(
    tmp_path: Path, family: str, cpu_kernels: str
) -> None:
    model = make_model(tmp_path, family)
    engine = built(tmp_path, kv_cache_dtype="fp8", cpu_kernels=cpu_kernels)
    with rounding(model):
        for answer in answers(engine, *prompts()):
            assert_same(model, answer)
    assert engine.fingerprint == f"{built(tmp_path).fingerprint}+kv-fp8_e4m3"


@pytest.mark.parametrize(("family", "stored"), [("deepseek-v3", "latent"), ("lfm2", "state")])
def test_kv_in_8_bits_is_refused_before_weights_are_read(tmp_path: Path, family: str, stored: str) -> None:
    make_model(tmp_path, family)
    (tmp_path / SINGLE_FILE).write_bytes(b"")
    with pytest.raises(InvalidSetting, match=f"KV in fp8_e4m3 is for keys and values: this model stores a {stored}"):
        built(tmp_path, kv_cache_dtype="fp8")


def test_short_sequences_of_a_longrope_model_have_the_short_factors(tmp_path: Path) -> None:
    model, engine = make_model(tmp_path, "phi3-longrope"), built(tmp_path, max_model_len=16)
    (answer,) = answers(engine, prompts()[0][:9])
    assert_same(model, answer)
    assert engine.memory.layout.layers[0].kind != built(tmp_path).memory.layout.layers[0].kind


def test_layers_that_draft_further_tokens_are_left_out(tmp_path: Path) -> None:
    make_model(tmp_path, "deepseek-v3")
    path = tmp_path / SINGLE_FILE
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["num_nextn_predict_layers"] == 1
    for layer, is_left_out in ((2, True), (3, False)):
        write_weights(tmp_path, {**load_file(path), f"model.layers.{layer}.eh_proj.weight": torch.zeros(4)})
        if is_left_out:
            built(tmp_path)
        else:
            with pytest.raises(ModelLoadError, match=r"does not use: model\.layers\.3\.eh_proj\.weight"):
                built(tmp_path)


def test_experts_in_mxfp4_are_those_that_transformers_makes_of_them(tmp_path: Path) -> None:
    model = make_model(tmp_path, "gpt-oss")
    tensors = load_file(tmp_path / SINGLE_FILE)
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        count, num_in, num_out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, num_out, num_in // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(123, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    write_weights(tmp_path, tensors)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "mxfp4"}}))
    (answer,) = answers(built(tmp_path), prompts()[0])
    assert_same(model, answer)
    assert built(tmp_path, load_format="dummy").fingerprint
    # what is plain beside them may be quantized
    rounded = built(tmp_path, quantization="int8")
    assert rounded.fingerprint != built(tmp_path).fingerprint
    assert answers(rounded, prompts()[0])
