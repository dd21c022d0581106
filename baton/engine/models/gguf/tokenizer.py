"""The tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`. Imports no torch.

Owns which kinds are known: byte-level BPE, with the ways of cutting a text into words that the file names. Of any other
kind the user has to put a `tokenizer.json` beside the file.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from baton.engine.models.gguf.file import GgufFile
from baton.wire.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def tokenizer_files(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """The text of `tokenizer.json`, and `tokenizer_config.json`. Raises `ModelLoadError`."""
    backend = _backend(file)
    tokens = _strings(file, "tokens")
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos_token"), ("eos", "eos_token")):
        number = file.facts.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[key] = tokens[number]
    if file.facts.get("tokenizer.ggml.add_bos_token", _cut(file) == "llama-bpe") is True and "bos_token" in config:
        bos = config["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    if isinstance(template := file.facts.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return backend.to_str(), config


def _backend(file: GgufFile) -> tokenizers.Tokenizer:
    kind = file.facts.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise _unknown(file, f"tokenizer.ggml.model {kind!r:.100}")
    tokens, merges = _strings(file, "tokens"), _strings(file, "merges")
    types = file.facts.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.token_type does not give a type for each token")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if any(len(pair) != 2 for pair in pairs) or len(vocabulary) < len(tokens):
        raise ModelLoadError(f"{file.path}: the merges or tokens of its tokenizer are damaged")
    cut = _cut(file)
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=cut == "llama-bpe")  # type: ignore[arg-type]
    except Exception as error:  # the library raises plain Exception for everything
        raise ModelLoadError(f"{file.path}: the merges of its tokenizer are damaged: {error!s:.200}") from None
    backend = tokenizers.Tokenizer(model)
    _set_cut(backend, cut, file)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == _CONTROL])
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == _USER_DEFINED])
    return backend


def _set_cut(backend: tokenizers.Tokenizer, cut: str, file: GgufFile) -> None:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if cut in ("gpt-2", "gpt2"):
        backend.pre_tokenizer = whole
    elif cut == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    elif cut in ("qwen2", "llama-bpe"):
        pattern = Regex(_QWEN2 if cut == "qwen2" else _LLAMA3)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
        if cut == "qwen2":
            backend.normalizer = normalizers.NFC()
    else:
        raise _unknown(file, f"tokenizer.ggml.pre {cut!r:.100}")


def _cut(file: GgufFile) -> str:
    return str(file.facts.get("tokenizer.ggml.pre", ""))


def _strings(file: GgufFile, name: str) -> list[str]:
    found = file.facts.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.{name} is no list of strings")
    return [str(item) for item in found]


def _unknown(file: GgufFile, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path}: {what} is not supported (byte-level BPE cut as gpt-2, smollm, qwen2, llama-bpe is): put the "
        "model's tokenizer.json and tokenizer_config.json beside the file"
    )
