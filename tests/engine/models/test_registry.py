from __future__ import annotations

import pytest

from baton.engine.models.registry import ARCHITECTURES, family_of
from baton.wire.errors import ModelLoadError


def test_every_architecture_is_found_by_its_name() -> None:
    assert {family_of([name]).architecture for name in ARCHITECTURES} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "value", [["BloomForCausalLM"], [7], [], ["LlamaForCausalLM", "Qwen3ForCausalLM"], None, "LlamaForCausalLM"]
)
def test_anything_else_is_refused_with_the_supported_names(value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        family_of(value)
