"""A key that `config.json` leaves out means what transformers takes for it, for every family that is served."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from baton.engine.models.config import parse_config
from baton.engine.models.registry import ARCHITECTURES
from baton.engine.models.vision.facts import NoImages, load_image_facts
from baton.wire.errors import ModelLoadError
from tests.engine.models.families import COMMON, FAMILIES, SEEING
from tests.engine.models.seeing import SEEING_FAMILIES, make_seeing

_COMMON = {**COMMON, "vocab_size": 300_000}  # no default of a token id lies outside of it
_NAMES = ("architectures", "model_type")
_MEANT_OTHERWISE = (("mistral3", "tie_word_embeddings"),)
"""Keys of which transformers' default is not taken: older files leave this one out, and have a head of their own, which
transformers does not tie either."""
KeyPath: TypeAlias = tuple[str, ...]


def _written(name: str) -> dict[str, Any]:
    """`config.json` of a family with every key that its class knows."""
    model_type, changes = {**FAMILIES, **SEEING}[name]
    fields, names = {**_COMMON, **changes}, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if "vision_config" in changes:
        fields = {**changes, "text_config": {**_COMMON, **changes["text_config"]}}
        names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {**_completed(model_type, fields), "architectures": [names[model_type]]}


def _completed(model_type: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` and all that transformers takes for those that are left out. Raises what its classes raise."""
    known = {name: copy.deepcopy(value) for name, value in fields.items() if name != "model_type"}
    found: dict[str, Any] = json.loads(json.dumps(AutoConfig.for_model(model_type, **known).to_dict()))
    return found


def _paths(content: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in content.items():
        if name not in _NAMES:
            yield (*above, name)
        if isinstance(value, dict):
            yield from _paths(value, (*above, name))


def _without(content: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    found = copy.deepcopy(dict(content))
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return found


def _differences(name: str, written: Mapping[str, Any], read: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """The keys that mean something else when they are left out than transformers' default written out. A refusal that
    names the key, what stands in it or what it stands in is none: nothing is answered wrongly."""
    for path in _paths(written):
        if (name, path[-1]) in _MEANT_OTHERWISE:
            continue
        lacking = _without(written, path)
        try:
            found = read(lacking)
        except (ModelLoadError, NoImages) as error:
            inner = written[path[0]] if len(path) == 1 else None
            named = {*path, *(inner if isinstance(inner, dict) else ())}
            if not any(each in str(error) for each in named):
                yield f"{'.'.join(path)}: {error}"
            continue
        try:
            default = _completed(written["model_type"], lacking)
        except Exception:  # transformers' classes raise of several kinds where they have no default
            continue
        if found != read({**default, "architectures": written["architectures"]}):
            yield f"{'.'.join(path)}: {found}"


def test_every_architecture_is_among_those_whose_keys_are_left_out() -> None:
    found = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] for model_type, _ in FAMILIES.values()}
    assert set(ARCHITECTURES) <= found


@pytest.mark.parametrize("name", [*FAMILIES, *SEEING])
def test_a_key_that_is_left_out_means_transformers_default(name: str) -> None:
    written = _written(name)
    parse_config(written)
    assert list(_differences(name, written, parse_config)) == []


@pytest.mark.parametrize("border", [0, 2, 3, 9])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "smollm3"])
def test_the_layers_with_windows_are_transformers_where_no_file_names_them(model_type: str, border: int) -> None:
    fields = {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": border}
    written = _completed(model_type, {**_COMMON, **fields})
    written["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config = parse_config(written)
    assert parse_config(_without(written, ("layer_types",))) == config
    assert 12 in config.windows or border in (0, 9)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_latents_are_scaled_by_yarn_alone(place: str) -> None:
    """transformers takes a rope without its type for one that stretches nothing, whatever else it says."""
    written = _written("deepseek-v2-groups")
    plain = {**written, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    rope = written.pop("rope_parameters")
    assert parse_config({**written, place: {**rope, "rope_type": "default"}}) == parse_config(plain)
    del rope["rope_type"]
    assert parse_config({**written, place: rope}) == parse_config(plain)
    assert parse_config({**written, place: {**rope, "type": "yarn"}}) != parse_config(plain)


@pytest.mark.parametrize("name", SEEING_FAMILIES)
def test_a_key_that_is_left_out_means_transformers_default_for_images_too(name: str, tmp_path: Path) -> None:
    seeing = make_seeing(tmp_path, name)
    model_type = SEEING[name][0]
    content = json.loads((tmp_path / "config.json").read_text())
    written = {**_completed(model_type, content), "architectures": content["architectures"]}

    def read(fields: dict[str, Any]) -> object:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_image_facts(tmp_path)

    assert read(written) == seeing.facts
    without_tower = f"vision_config: {None}"  # then it is a model of text alone
    assert list(_differences(name, written, read)) == [without_tower]


@pytest.mark.parametrize("name", SEEING_FAMILIES)
def test_what_the_file_of_the_image_processor_leaves_out_is_its_default(name: str, tmp_path: Path) -> None:
    seeing = make_seeing(tmp_path, name)
    for left_out in SEEING_FAMILIES[name].processor:
        fields = {each: value for each, value in SEEING_FAMILIES[name].processor.items() if each != left_out}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
        found = load_image_facts(tmp_path)
        reference = SEEING_FAMILIES[name].reference(**{"size": fields.get("size")} if "size" in fields else {})
        size = {edge: length for edge, length in dict(reference.size).items() if length is not None}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fields, "size": size}))
        assert found == load_image_facts(tmp_path)
    assert seeing.facts is not None


@pytest.mark.parametrize("flag", [{}, {"mrope_interleaved": False}, {"mrope_interleaved": True}])
def test_whether_sections_are_interleaved_is_a_matter_of_the_family(flag: dict[str, bool], tmp_path: Path) -> None:
    """transformers' Qwen3-VL always interleaves, its Qwen2-VL never does, and neither reads the key."""
    for name, dimensions in (("qwen3-vl", (0, 1, 2, 0, 1, 2, 0, 0)), ("qwen2-vl", (0, 0, 0, 0, 1, 1, 2, 2))):
        make_seeing(tmp_path / name, name)
        file = tmp_path / name / "config.json"
        content = json.loads(file.read_text())
        content["text_config"]["rope_parameters"].pop("mrope_interleaved", None)
        content["text_config"]["rope_parameters"] |= flag
        file.write_text(json.dumps(content))
        facts = load_image_facts(tmp_path / name)
        assert facts is not None
        assert facts.sections == dimensions
