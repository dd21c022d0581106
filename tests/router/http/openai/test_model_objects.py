"""The answers of /v1/models, as OpenAI's client reads them, and what is told beside that."""

from __future__ import annotations

from openai.types import Model

from baton.router.http.openai.model_objects import model_list, model_object


def test_models() -> None:
    model = Model.model_validate(model_object("qwen", 1, 4096), strict=False)
    assert (model.id, model.object, model.owned_by) == ("qwen", "model", "baton")
    assert model_object("qwen", 1, 4096)["max_model_len"] == 4096
    assert model_object("qwen", 1)["root"] == "qwen"
    assert "max_model_len" not in model_object("qwen", 1)
    assert model_list([model_object("qwen", 1)])["data"][0]["id"] == "qwen"


def test_a_model_tells_what_it_takes_and_to_which_switches_of_thinking_it_listens() -> None:
    plain = model_object("qwen", 1)
    assert (plain["input_modalities"], plain["thinking_switches"]) == (["text"], [])
    seeing = model_object("qwen", 1, None, ("text", "image"), ("enable_thinking",))
    assert (seeing["input_modalities"], seeing["thinking_switches"]) == (["text", "image"], ["enable_thinking"])
