"""Small checkpoints in published format, one per kind of tokenizer, trained here on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The prompt runs a relay: one node computes the cache, the other writes the answer.",
    "Hello world, hello again! It's 2024 and 3.14 is not pi.",
    "Größe, naïve café, Übermut und Straße.",
    "你好。世界。今天天气很好。",
    "def add(a, b):\n    return a + b\n",
    "emoji 😀 and flags 🇨🇭 and 👩‍👩‍👧",
]
CHAT_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SENTENCEPIECE_MARKS = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CHAT_MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<tool_call>", "<größe é>", "é"])  # added tokens that are not special
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    """BPE over characters with the vocabulary of sentencepiece: marks, 256 bytes, then pieces."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SENTENCEPIECE_MARKS + BYTE_TOKENS,
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator([f"▁{sentence}" for sentence in SENTENCES], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(SENTENCEPIECE_MARKS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama() -> Tokenizer:
    tokenizer = with_byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = with_byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    return tokenizer


def save_checkpoint(folder: Path, tokenizer: Tokenizer, tokenizer_config: Mapping[str, object]) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders by kind of tokenizer."""
    base = tmp_path_factory.mktemp("checkpoints")
    chat_marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    sentencepiece_marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "byte_level": save_checkpoint(base / "byte_level", byte_level(False), chat_marks),
        "byte_level_prefix": save_checkpoint(base / "byte_level_prefix", byte_level(True), chat_marks),
        "llama": save_checkpoint(base / "llama", llama(), sentencepiece_marks),
        "metaspace": save_checkpoint(base / "metaspace", metaspace(), sentencepiece_marks),
    }
