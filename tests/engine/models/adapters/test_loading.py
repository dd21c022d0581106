"""What is refused of a published adapter, by name, and what names one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.models.adapters.loading import load_adapter
from baton.engine.models.adapters.low_rank import Adapters
from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.quantization.base import UNQUANTIZED
from baton.wire.errors import ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.engine.models.adapters.adapter_folders import CONFIG, LAYERS, write_adapter
from tests.engine.models.families import make_model

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture
def adapters(checkpoint: Path) -> Adapters:
    return Decoder(load_config(checkpoint), torch.float32, "meta", TorchOps()).adapters


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    return write_adapter(tmp_path / "adapter", checkpoint)


def load(folder: Path, adapters: Adapters) -> bytes:
    return load_adapter(folder, adapters, torch.float32, torch.device("cpu"))


def test_every_matrix_of_a_layer_may_be_changed(adapters: Adapters) -> None:
    assert set(adapters.matrices) == set(LAYERS)


def test_experts_take_no_adapters_where_each_is_a_product_of_its_own(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3-moe")
    config = load_config(tmp_path)
    quantized = mock.Mock(wraps=UNQUANTIZED, is_published=True)
    decoder = Decoder(config, torch.float32, "meta", TorchOps(), quantization=quantized)
    assert any("experts.0.down" in parameter.name for parameter in decoder.parameters())
    assert [name for name in decoder.adapters.matrices if "experts" in name] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layer_replication", [[0, 1]]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"n": 1}),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("r", 257),
        ("r", 0),
        ("r", "4"),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", float("inf")),
    ],
)
def test_what_cannot_be_applied_is_refused_by_the_name_of_its_field(
    folder: Path, adapters: Adapters, field: str, value: object
) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(
        ModelLoadError, match=rf"adapter_config.json: {field} is '?{str(value)[:5].strip('[{(')}|{field}"
    ):
        load(folder, adapters)


@pytest.mark.parametrize("begun", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_how_an_adapter_began_is_its_own_matter_where_the_base_did_not_change(
    folder: Path, adapters: Adapters, begun: object
) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "init_lora_weights": begun}))
    load(folder, adapters)


def _renamed(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors.pop(f"{FIRST}.lora_A.weight")})


def _as(half: str, values: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({f"{FIRST}.{half}.weight": values})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _renamed("base_model.model.lm_head.lora_magnitude_vector"),
            "no part of a LoRA adapter: .*lora_magnitude_vector",
        ),
        (_renamed("model.layers.0.self_attn.q_proj.lora_A.weight"), "no part of a LoRA adapter: model.layers.0"),
        (lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight"), f"lacks {FIRST}.lora_B.weight"),
        (lambda tensors: tensors.pop(f"{FIRST}.lora_A.weight"), f"lacks {FIRST}.lora_A.weight"),
        (_as("lora_A", torch.zeros(4, 63)), r"q_proj.lora_A.weight has shape \[4, 63\], and \[4, 64\] fits here"),
        (_as("lora_A", torch.zeros(5, 64)), r"q_proj.lora_A.weight has shape \[5, 64\], and \[4, 64\] fits here"),
        (_as("lora_B", torch.zeros(32, 4)), r"q_proj.lora_B.weight has shape \[32, 4\], and \[64, 4\] fits here"),
        (_as("lora_B", torch.zeros(64, 4, dtype=torch.int8)), "q_proj.lora_B.weight has dtype int8"),
        (_as("lora_B", torch.full((64, 4), torch.nan)), "NaN or infinite numbers in .*q_proj.lora_B.weight"),
        (lambda tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_tensors_that_cannot_be_applied_are_refused_by_their_names(
    folder: Path, adapters: Adapters, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match=message):
        load(folder, adapters)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_a_module_that_takes_no_adapters_is_refused_by_its_name(
    tmp_path: Path, checkpoint: Path, adapters: Adapters, module: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"this model takes no adapters in {module}$"):
        load(write_adapter(tmp_path, checkpoint, [module, LAYERS[0]]), adapters)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "an adapter's config cannot be read: No such file"),
        ("adapter_config.json", b"{", "not valid JSON"),
        ("adapter_config.json", b"[]", "not a JSON object"),
        ("adapter_model.safetensors", None, "is not there: adapters are loaded from safetensors only"),
        ("adapter_model.safetensors", b"\x80\x04", "adapter_model.safetensors: cannot be read"),
    ],
)
def test_files_that_are_no_adapter_are_refused(
    folder: Path, adapters: Adapters, name: str, content: bytes | None, message: str
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load(folder, adapters)


def test_a_file_that_was_cut_is_refused(folder: Path, adapters: Adapters) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(folder, adapters)


def test_the_digest_is_of_what_an_adapter_changes_and_of_nothing_else(
    tmp_path: Path, checkpoint: Path, adapters: Adapters
) -> None:
    def digest(name: str, **config: object) -> bytes:
        return load(write_adapter(tmp_path / name, checkpoint, **config), adapters)  # type: ignore[arg-type]

    one = digest("one")
    assert digest("moved", base_model_name_or_path="/elsewhere", lora_dropout=0.0) == one
    others = [digest("seed", seed=2), digest("alpha", lora_alpha=11), digest("scaled", use_rslora=True)]
    assert len({one, *others}) == 4
    assert len(one) == 16
