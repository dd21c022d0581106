"""EAGLE-3 heads, loaded by their published names, against what the published description says, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.heads.base import DraftHead
from baton.engine.models.heads.config import read_eagle3
from baton.engine.models.heads.eagle3 import Eagle3Head
from baton.engine.models.heads.making import EAGLE3, make_draft_head
from baton.engine.models.loading import load_weights
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.base import UNQUANTIZED
from baton.engine.models.taps import KeptStreams
from baton.wire.errors import ModelLoadError
from tests.checkpoints import make_checkpoint, write_weights
from tests.engine.models.dense_attention import DenseAttention
from tests.engine.models.heads.described import Described
from tests.engine.models.heads.published import make_eagle3
from tests.engine.models.heads.running import HeadRun

_NUM_TOKENS = 19


def loaded(model: Path, folder: Path) -> tuple[Decoder, DraftHead]:
    decoder = Decoder(load_config(model), torch.float32, "cpu", TorchOps())
    load_weights(model, decoder)
    head = make_draft_head(EAGLE3, folder, decoder, TorchOps(), UNQUANTIZED)
    load_weights(folder, head)
    return decoder, head


def token_ids() -> Tensor:
    return torch.randint(0, 300, (_NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def assert_as_described(decoder: Decoder, head: DraftHead, model: Path, described: Described, taps: list[int]) -> None:
    """In two chunks, and then two slots further from the head's own states."""
    ids = token_ids()
    kept = decoder.taps = KeptStreams(head.taps)
    decoder.forward(ids[:-1], torch.arange(_NUM_TOKENS), DenseAttention([_NUM_TOKENS], decoder.config.windows))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    streams = reference(ids[None, :-1], output_hidden_states=True).hidden_states
    fused = torch.cat([streams[tap][0] for tap in taps], dim=1) @ described.matrix("fc")
    hidden = head.fused(torch.cat(kept.streams, dim=1))
    torch.testing.assert_close(hidden, fused, atol=2e-4, rtol=1e-4)
    run = HeadRun(head)
    states = torch.cat((run.store(0, hidden[:8], ids[1:9]), run.store(8, hidden[8:], ids[9:])))
    expected = described.states(fused, ids[1:])
    torch.testing.assert_close(states, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.logits(states), described.logits(expected), atol=2e-3, rtol=1e-3)
    last = states[-1:]
    for number in range(2):
        ids = torch.cat((ids, head.model_ids(head.logits(last).argmax(-1))))
        last = run.store(_NUM_TOKENS + number, last, ids[-1:])
        fused = torch.cat((fused, expected[-1:]))
        expected = described.states(fused, ids[1:])
        torch.testing.assert_close(last, expected[-1:], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_states_and_logits_are_those_of_the_description(tmp_path: Path, layer: str) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4})
    tensors = make_eagle3(tmp_path / "head", model, num_rows=90, layer=layer)
    decoder, head = loaded(model, tmp_path / "head")
    embedding = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight.detach()
    assert head.taps == (1, 2, 2)
    assert_as_described(decoder, head, model, Described(tensors, embedding, layer), [1, 2, 2])
    places = torch.tensor([0, 17, 89])
    known = tensors["t2d"].nonzero()[:, 0]
    assert head.model_ids(places).tolist() == known[places].tolist()


def test_a_head_may_have_an_embedding_and_all_tokens_of_its_own(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4})
    tensors = make_eagle3(
        tmp_path / "head", model, has_embedding=True, changes={"norm_before_residual": True, "rope_theta": 10000.0}
    )
    decoder, head = loaded(model, tmp_path / "head")
    described = Described(tensors, tensors["embed_tokens.weight"])
    described.adds_to_normed = True
    assert_as_described(decoder, head, model, described, [1, 2, 2])
    assert head.model_ids(torch.tensor([0, 17, 319])).tolist() == [0, 17, 319]


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}, (0, 3, 8)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}},
            (2, 4, 7),
        ),
    ],
    ids=["named", "usual", "behind"],
)
def test_a_file_may_say_which_layers_are_read(
    tmp_path: Path, changes: dict[str, object], taps: tuple[int, ...]
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 8})
    make_eagle3(tmp_path / "head", model, changes=changes)
    assert read_eagle3(tmp_path / "head", load_config(model)).taps == taps


def test_the_layer_may_be_described_apart(tmp_path: Path) -> None:
    model, folder = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4}), tmp_path / "head"
    make_eagle3(folder, model, num_rows=90, layer="layers.0")
    expected = read_eagle3(folder, load_config(model))
    content = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    layer = {name: content.pop(name) for name in (*names, "rms_norm_eps", "vocab_size", "max_position_embeddings")}
    content |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(content))
    assert read_eagle3(folder, load_config(model)) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": 32},
            r"hidden_size must be that of the model \(64\), whose embed_tokens\.weight it takes, got 32",
        ),
        ({"vocab_size": 300}, r"vocab_size must be that of the model \(320\), got 300"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"must name 3 layers of the model's 4, got \[1, 2, 9\]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "must name 3 layers"),
        ({"eagle_config": [1, 2, 3]}, r"eagle_config must be an object, got \[1, 2, 3\]"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object, got 3"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must name 3 layers of the model's 4, got 'all'"),
        ({"draft_vocab_size": 400}, "draft_vocab_size must be at most 320, got 400"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "heads read three layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a head that is quantized is not supported"),
        (
            {"num_attention_heads": 2},
            r"midlayer\.self_attn\.q_proj\.weight has shape \[64, 128\], config\.json makes it",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model, folder = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4}), tmp_path / "head"
    make_eagle3(folder, model)
    content = json.loads((folder / "config.json").read_text())
    if "num_attention_heads" in changes:
        changes = {**changes, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(ModelLoadError, match=message):
        loaded(model, folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("midlayer.self_attn.q_norm.weight", torch.ones(16), r"does not use: midlayer\.self_attn\.q_norm\.weight"),
        ("fc.weight", None, r"lacks 1 tensors: fc\.weight"),
        ("fc.weight", torch.ones(64, 64), r"fc\.weight has shape \[64, 64\], config\.json makes it \[64, 192\]"),
        ("d2t", torch.full((90,), 300), "d2t names tokens outside of the model's 320"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    model, folder = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4}), tmp_path / "head"
    tensors = make_eagle3(folder, model, num_rows=90)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    write_weights(folder, tensors)
    with pytest.raises(ModelLoadError, match=message):
        loaded(model, folder)


def test_a_head_without_safetensors_is_refused(tmp_path: Path) -> None:
    model, folder = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4}), tmp_path / "head"
    make_eagle3(folder, model)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelLoadError, match=r"no weights: .*; pytorch_model\.bin is not read: convert it to safetensors"
    ):
        loaded(model, folder)


def test_a_head_is_made_of_its_parts_alone(tmp_path: Path) -> None:
    """The model's embedding is not stored a second time."""
    model = make_checkpoint(tmp_path / "model", "llama", changes={"num_hidden_layers": 4})
    make_eagle3(tmp_path / "head", model, num_rows=90)
    _, head = loaded(model, tmp_path / "head")
    assert isinstance(head, Eagle3Head)
    assert len(list(head.parts())) == 9
