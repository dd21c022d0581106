"""Random weights for measurements: finite, never zero, the same on every node of a kind of device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.identity import dummy_fingerprint
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_set_and_none_is_zero(folder: Path, dtype: torch.dtype) -> None:
    found = []
    for _ in range(2):
        decoder = Decoder(load_config(folder), dtype, "cpu")
        parameters = {parameter.name: parameter.tensor for parameter in decoder.parameters()}
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        fill_with_noise(decoder)
        found.append(parameters)
    for name, parameter in found[0].items():
        assert parameter.isfinite().all(), name
        assert parameter.float().abs().mean() > 0.001, name
        assert torch.equal(parameter, found[1][name]), name
    assert abs(float(found[0]["norm"].float().mean()) - 1.0) < 0.05


def test_the_fingerprint_tells_kinds_of_devices_apart(folder: Path) -> None:
    config = load_config(folder)
    assert dummy_fingerprint(config, "cpu") == dummy_fingerprint(config, "cpu")
    assert dummy_fingerprint(config, "cpu") != dummy_fingerprint(config, "cuda")
