"""Small random models that see, written as they are published: with a tokenizer, a template and an image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.image_processing_backends import PilBackend
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.engine.models.vision.facts import ImageFacts, load_image_facts
from tests.checkpoints import write_tokenizer
from tests.engine.models.families import COMMON, SEEING, make_model

VOCAB_SIZE = 320
MAX_POSITION = 512
_QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}
_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}IMAGE{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


@dataclass(frozen=True)
class SeeingFamily:
    """`tokens`: added ones, the first of which stands for an image. `placeholder`: what a template writes for one.
    `processor`: the fields of its file; `reference`: transformers' own, made of them."""

    tokens: Sequence[str]
    placeholder: str
    processor: Mapping[str, Any]
    reference: type[PilBackend]
    names_token: str = "image_token_id"


SEEING_FAMILIES: Mapping[str, SeeingFamily] = {
    "mistral3": SeeingFamily(
        _PIXTRAL,
        "[IMG]",
        {"size": {"longest_edge": 140}, "image_processor_type": "PixtralImageProcessor", "patch_size": 14},
        PixtralImageProcessorPil,
        "image_token_index",
    ),
    **{
        name: SeeingFamily(
            _QWEN,
            "<|vision_start|><|image_pad|><|vision_end|>",
            {"size": _QWEN_SIZE, "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch},
            Qwen2VLImageProcessorPil,
        )
        for name, patch in (("qwen2-vl", 14), ("qwen2.5-vl", 14), ("qwen3-vl", 16))
    },
}


@dataclass(frozen=True)
class Seeing:
    """A checkpoint in `folder`, what it is made of, and transformers' own image processor for it."""

    folder: Path
    model: PreTrainedModel
    family: SeeingFamily
    facts: ImageFacts

    def processor(self) -> PilBackend:
        """As the processor of the whole model calls it."""
        fields = dict(self.family.processor)
        if self.family.reference is PixtralImageProcessorPil:
            fields["patch_size"] = self.facts.edge
        del fields["image_processor_type"]
        return self.family.reference(**fields)


def make_seeing(folder: Path, name: str, max_position: int = MAX_POSITION) -> Seeing:
    """A random model of that family, in float32."""
    family = SEEING_FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, VOCAB_SIZE - len(family.tokens), max_position)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(family.tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    model_type, changes = SEEING[name]
    token_id = tokenizer.token_to_id(family.tokens[0])
    common = {**COMMON, "vocab_size": VOCAB_SIZE, "max_position_embeddings": max_position}
    model = make_model(folder, (model_type, {**changes, family.names_token: token_id}), common)
    with torch.no_grad():  # no answer has the token of an image: transformers would miss the image
        model.get_output_embeddings().weight[-len(family.tokens) :] *= 0.01
    model.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TEMPLATE.replace("IMAGE", family.placeholder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    facts = load_image_facts(folder)
    assert facts is not None
    return Seeing(folder, model, family, facts)
