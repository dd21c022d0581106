"""Text to token ids and back, for one checkpoint, on the `tokenizers` library alone (no torch, no
transformers).

Owns the rules for what a checkpoint's files say about its tokenizer. The published `tokenizer.json` is the
truth for both directions; the other files add special tokens and name the ids that begin and end a text.
Immutable once loaded, and safe to use from several threads at a time.

One known difference: transformers 5 rebuilds the pre-tokenizer of the class `LlamaTokenizer` by its own rules
instead of reading `tokenizer.json`. It then merges a text's own leading space with the one it adds, and, for
checkpoints not marked `legacy`, adds none after a special token. Here the published file decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers

from baton.engine.text.checkpoint_files import SpecialTokens, read_json
from baton.engine.text.conversion_cache import find_tokenizer_file
from baton.engine.text.token_decoder import (
    ByteFallback,
    ByteLevel,
    Metaspace,
    Replace,
    Stage,
    build_stages,
    byte_level_bytes,
    fallback_byte,
)
from baton.wire.errors import InvalidRequest, ModelLoadError

_MAX_IDS_UNDER_LOCK = 2**12
_MAX_KNOWN_PIECES = 2**18
_MAX_CHARS_UNDER_LOCK = 2**12


class Tokenizer:
    """The tokenizer of one checkpoint; see `from_folder`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: frozenset[int] = frozenset(),
        bos_token_id: int | None = None,
        model_vocab_size: int = 0,
    ) -> None:
        """Wrap `backend`. `model_vocab_size`: the rows of the model's embedding, 0 if unknown. Raises `ModelLoadError`
        when the decoder cannot be streamed."""
        # a published file may carry the padding or truncation of its training, which must never touch a
        # prompt
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._piece_of_id = lru_cache(maxsize=_MAX_KNOWN_PIECES)(backend.id_to_token)
        self._decoder_spec = _decoder_spec(backend)
        added = backend.get_added_tokens_decoder()
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        named = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self._vocab_size = max(named, model_vocab_size)
        self._eos_token_ids = eos_token_ids
        self._bos_token_id = bos_token_id
        # the single-token view has no neighbours: only the stages that work on each token by itself
        stages = self.new_decoder()
        self._is_byte_level = any(isinstance(stage, ByteLevel) for stage in stages)
        self._has_byte_tokens = any(isinstance(stage, ByteFallback) for stage in stages)
        self._token_stages = [stage for stage in stages if isinstance(stage, (Replace, Metaspace))]
        for stage in self._token_stages:
            stage.push([""])  # a token looked at alone is not the beginning of a text
        self._known_tokens = lru_cache(maxsize=_MAX_KNOWN_PIECES)(self._make_token)

    @classmethod
    def from_folder(cls, path: Path, cache_folder: Path | None = None) -> Tokenizer:
        """Load the tokenizer of the checkpoint in `path`.

        A checkpoint without `tokenizer.json` is converted once; the result is kept in `cache_folder` (None:
        the user's cache). End-of-sequence ids are those of `generation_config.json` and `config.json`
        together, or the tokenizer's own eos token when both are silent.

        Raises:
            ModelLoadError: files that are missing, damaged, or of a kind that is not supported.
        """
        file = find_tokenizer_file(path, cache_folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for everything
            raise ModelLoadError(f"cannot load {file}: {error}") from error
        tokenizer_config = read_json(path / "tokenizer_config.json")
        backend.encode_special_tokens = tokenizer_config.get("split_special_tokens") is True
        _add_tokens(backend, tokenizer_config, path)
        named = SpecialTokens.from_folder(path).named
        generation = read_json(path / "generation_config.json")
        model = _text_config(read_json(path / "config.json"))
        eos_ids = _ids(generation, "eos_token_id") | _ids(model, "eos_token_id")
        bos_ids = _ids(generation, "bos_token_id") or _ids(model, "bos_token_id")
        eos_id, bos_id = (_named_id(backend, named.get(name)) for name in ("eos_token", "bos_token"))
        return cls(
            backend,
            eos_token_ids=eos_ids or frozenset([] if eos_id is None else [eos_id]),
            bos_token_id=min(bos_ids, default=None) if bos_id is None else bos_id,
            model_vocab_size=_size(model, "vocab_size"),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id. Models pad their vocabularies, and sample ids that have no text."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer; empty when the checkpoint names none."""
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, None when the checkpoint has none."""
        return self._bos_token_id

    def definition(self) -> str:
        """The tokenizer with all its added tokens, in the format of `tokenizer.json`."""
        return self._backend.to_str()

    def added_token_id(self, content: str) -> int | None:
        """The id of an added token, None when there is no such one."""
        return self._added_ids.get(content)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`; special tokens written in the text become their ids.

        `add_special_tokens` adds what the checkpoint puts around a text, usually bos; False for a rendered
        chat template.

        Raises:
            InvalidRequest: `text` holds a lone surrogate, which no encoding can represent.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text has a lone surrogate at character {error.start}") from error
        if len(text) <= _MAX_CHARS_UNDER_LOCK:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # of the library's calls only those for batches let other threads run meanwhile
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has contribute nothing. Raises `InvalidRequest` outside [0,
        2^32)."""
        try:
            if len(ids) > _MAX_IDS_UNDER_LOCK:  # a batch, even of one, lets other threads run meanwhile
                return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise InvalidRequest("a token id is negative or too large") from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for within a text; empty for an id that no token has."""
        return self._known_tokens(token_id)[0]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where the token alone is not a whole character."""
        return self._known_tokens(token_id)[1]

    def _make_token(self, token_id: int) -> tuple[bytes, str]:
        data = self._make_bytes(token_id)
        return data, data.decode(errors="replace")

    def _make_bytes(self, token_id: int) -> bytes:
        piece = self.vocabulary_piece(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(piece)
        byte = fallback_byte(piece) if self._has_byte_tokens else None
        if byte is not None:
            return byte
        pieces = [piece]
        for stage in self._token_stages:
            pieces = stage.push(pieces)
        return "".join(pieces).encode()

    def vocabulary_piece(self, token_id: int, skip_special_tokens: bool = False) -> str | None:
        """The token as the vocabulary writes it; None when it has no text: unknown, or special and to be
        skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        if not 0 <= token_id < 2**32:
            return None
        return self._piece_of_id(token_id)

    def new_decoder(self) -> list[Stage]:
        """Fresh stages that decode this vocabulary's pieces as a stream."""
        return build_stages(self._decoder_spec)


def _decoder_spec(backend: tokenizers.Tokenizer) -> Mapping[str, object] | None:
    """The decoder's settings: JSON, which only `__getstate__` gives of the decoder alone. Writing out the whole
    tokenizer would take far longer."""
    decoder = backend.decoder
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    if not isinstance(spec, dict):
        raise ModelLoadError(f"tokenizer.json has a decoder that is not supported: {spec}")
    return spec


def _add_tokens(backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, object], folder: Path) -> None:
    """Add what only the configuration names, and mark its special tokens as special, as transformers does."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = _listed_tokens(tokenizer_config, folder)
    backend.add_tokens([token for token in listed if token.content not in present])
    special = SpecialTokens.from_folder(folder)
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [content for content in (*special.named.values(), *special.extra) if content not in marked]
    backend.add_special_tokens([tokenizers.AddedToken(content, normalized=False) for content in missing])


def _listed_tokens(tokenizer_config: Mapping[str, object], folder: Path) -> list[tokenizers.AddedToken]:
    """The tokens of `added_tokens_decoder` (id -> token), by id."""
    listed = tokenizer_config.get("added_tokens_decoder", {})
    try:
        if not isinstance(listed, dict):
            raise TypeError("it is not an object")
        by_id = {int(token_id): _added_token(entry) for token_id, entry in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder}: added_tokens_decoder is damaged: {error!r}") from error
    return [by_id[token_id] for token_id in sorted(by_id)]


def _added_token(entry: Mapping[str, object]) -> tokenizers.AddedToken:
    is_special = entry.get("special") is True
    return tokenizers.AddedToken(
        str(entry["content"]),
        single_word=entry.get("single_word") is True,
        lstrip=entry.get("lstrip") is True,
        rstrip=entry.get("rstrip") is True,
        normalized=entry.get("normalized", not is_special) is True,
        special=is_special,
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """A multimodal checkpoint keeps the settings of its language model one level down."""
    nested = config.get("text_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def _ids(config: Mapping[str, object], key: str) -> frozenset[int]:
    """The id or list of ids under `key`; empty when absent or null."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise ModelLoadError(f"{key} must be a token id or a list of them, not {value!r}")
    return frozenset(ids)


def _size(config: Mapping[str, object], key: str) -> int:
    """The number under `key`; 0 for anything else, which is the model's to refuse."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _named_id(backend: tokenizers.Tokenizer, content: str | None) -> int | None:
    return None if content is None else backend.token_to_id(content)
