"""Layers for further tokens, loaded by their published names, against transformers' own layers of the same kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.heads.making import MTP, make_draft_head
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.choose import choose_quantization
from baton.engine.models.weight_files import SINGLE_FILE
from baton.wire.errors import ModelLoadError
from tests.checkpoints import write_weights
from tests.engine.models.families import FAMILIES, VOCAB_SIZE, make_model
from tests.engine.models.heads.published import add_mtp
from tests.engine.models.heads.running import HeadRun
from tests.engine.models.quantization.answers import matrices_of, republished
from tests.engine.models.quantization.test_published import METHODS

_LIKE_LAYERS = {"deepseek-v3": 1, "glm4-moe": 1, "qwen3-next": 1}
"""Of each family a layer that attends and has experts."""
_NUM_TOKENS = 11


def loaded(folder: Path) -> tuple[Decoder, DraftHead]:
    config = load_config(folder)
    quantization = choose_quantization("auto", config, folder)
    decoder = Decoder(config, torch.float32, "cpu", TorchOps(), quantization=quantization)
    load_weights(folder, decoder)
    head = make_draft_head(MTP, folder, decoder, TorchOps(), quantization)
    load_weights(folder, head)
    return decoder, head


class Reference:
    """transformers' model with one layer more, which is the head's."""

    def __init__(self, folder: Path, added: dict[str, Tensor]) -> None:
        content = json.loads((folder / "config.json").read_text())
        self.is_qwen = content["model_type"] == "qwen3_next"
        number = content["num_hidden_layers"]
        begin = "mtp." if self.is_qwen else f"model.layers.{number}."
        self.tensors = {name.removeprefix(begin).removesuffix(".weight"): tensor for name, tensor in added.items()}
        inner = f"{begin}layers.0." if self.is_qwen else begin
        own = {f"model.layers.{number}.{name.removeprefix(inner)}": tensor for name, tensor in added.items()}
        self.model = self._with_one_more(folder, content, own)
        self.layer = self.model.model.layers[number]

    @staticmethod
    def _with_one_more(folder: Path, content: dict[str, object], own: dict[str, Tensor]) -> PreTrainedModel:
        other = folder.parent / "one-more"
        shutil.copytree(folder, other)
        content = {**content, "num_hidden_layers": int(str(content["num_hidden_layers"])) + 1}
        for name, more in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            if isinstance(content.get(name), list):
                content[name] = [*content[name], more]  # type: ignore[misc]
        (other / "config.json").write_text(json.dumps(content))
        tensors = load_file(folder / SINGLE_FILE)
        write_weights(other, {**{name: each for name, each in tensors.items() if not name.startswith("mtp.")}, **own})
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            other, dtype=torch.float32, attn_implementation="eager"
        )
        return model

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name] + 1.0 if self.is_qwen else self.tensors[name]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps) * weight

    def states(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The normed states of one sequence from its first slot."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        if not self.is_qwen:
            names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        embedded = self.norm(self.model.get_input_embeddings()(token_ids), names[0])
        x = torch.cat((embedded, self.norm(hidden, names[1])), dim=1) @ self.tensors[names[2]].T
        positions = torch.arange(len(x))[None]
        mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
        rotation = self.model.model.rotary_emb(x[None], positions)
        out = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], names[3])


@pytest.mark.parametrize("family", list(_LIKE_LAYERS))
@torch.inference_mode()
def test_states_and_logits_are_those_of_a_layer_of_transformers(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    model = make_model(folder, family)
    reference = Reference(folder, add_mtp(folder, _LIKE_LAYERS[family]))
    _, head = loaded(folder)
    ids = torch.randint(0, VOCAB_SIZE, (_NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(2))
    hidden = model(ids[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    last: list[Tensor] = []
    with model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0][0])):
        model(ids[None, :-1])
    torch.testing.assert_close(head.fused(last[0]), hidden, atol=1e-4, rtol=1e-4)
    run = HeadRun(head)
    states = torch.cat((run.store(0, head.fused(last[0][:8]), ids[1:9]), run.store(8, hidden[8:], ids[9:])))
    expected = reference.states(hidden, ids[1:])
    torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.logits(states), model.lm_head(expected), atol=2e-3, rtol=1e-3)
    ids = torch.cat((ids, head.model_ids(head.logits(states[-1:]).argmax(-1))))
    further = run.store(_NUM_TOKENS, states[-1:], ids[-1:])
    expected = reference.states(torch.cat((hidden, expected[-1:])), ids[1:])
    torch.testing.assert_close(further, expected[-1:], atol=2e-3, rtol=1e-3)
    assert head.taps == ()


@torch.inference_mode()
def test_a_layer_in_fp8_computes_with_the_numbers_in_the_files(tmp_path: Path) -> None:
    """As DeepSeek V3 is published: all of its products are in blocks, but the one that brings both inputs together."""
    model_type, changes = FAMILIES["deepseek-v3"]
    make_model(tmp_path / "plain", (model_type, {**changes, "vocab_size": 256, "moe_intermediate_size": 64}))
    added = add_mtp(tmp_path / "plain", 1)
    make, settings = METHODS["fp8-blocks"]

    def parts(name: str, matrix: Tensor) -> dict[str, Tensor]:
        is_plain = f"{name}.weight" in added and name.endswith("eh_proj")
        made = {f"{name}.{ending}": values for ending, values in make(matrix).tensors.items()}
        return {f"{name}.weight": matrix} if is_plain else made

    def meaning(name: str, matrix: Tensor) -> dict[str, Tensor]:
        return {f"{name}.weight": matrix if name.endswith("eh_proj") else make(matrix).meaning}

    folder = republished(tmp_path / "plain", tmp_path / "fp8", parts, {"quantization_config": settings})
    reference = republished(tmp_path / "plain", tmp_path / "reference", meaning)
    assert any(name.startswith("model.layers.2.") for name in matrices_of(folder))
    hidden = torch.randn(_NUM_TOKENS, 64, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(_NUM_TOKENS)
    found, expected = (HeadRun(loaded(each)[1]).store(0, hidden, ids) for each in (folder, reference))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    added = add_mtp(tmp_path, 1)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = next(name for name in added if name.endswith(("eh_proj.weight", "mtp.fc.weight")))
    write_weights(tmp_path, {**tensors, name.replace("proj", "bias").replace("fc", "bias"): torch.ones(64)})
    with pytest.raises(ModelLoadError, match=r"the layer for further tokens of .* does not use: .*bias"):
        loaded(tmp_path)
    write_weights(tmp_path, {**tensors, name: torch.ones(64, 64)})
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \[64, 64\], config\.json makes it \[64, 128\]"):
        loaded(tmp_path)
    write_weights(tmp_path, {each: tensor for each, tensor in tensors.items() if each != name})
    with pytest.raises(ModelLoadError, match=f"lacks 1 tensors: {name}"):
        loaded(tmp_path)


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "llama", "llama")
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no layers that predict further tokens; models with"):
        loaded(tmp_path / "llama")
    make_model(tmp_path / "glm", "glm4-moe")
    content = json.loads((tmp_path / "glm" / "config.json").read_text())
    (tmp_path / "glm" / "config.json").write_text(json.dumps({**content, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers is 0"):
        loaded(tmp_path / "glm")
