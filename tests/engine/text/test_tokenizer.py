"""The tokenizer gives the same ids and texts as transformers, without importing it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest, ModelLoadError

KINDS = ["byte_level", "byte_level_prefix", "llama", "metaspace"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces, then a tab\tand\r\nlines\n\n",
    "<s>[INST] hi [/INST]</s><|im_start|>user\nhi<|im_end|> <tool_call> x<größe é>",
    "Größe, 你好, Ω≈ç√",
    "😀 👩‍👩‍👧 🇨🇭",
    "a\x00b\x07c\x7f\u200b\ufeff\ufffd",
    "▁already▁meta <0xE2>",
]


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, checkpoints: Mapping[str, Path]) -> Path:
    return checkpoints[request.param]


def test_encodes_and_decodes_like_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    long_text = "  two spaces, <s>Größe, 你好\tand\r\nlines 😀 " * 150
    for text, flag in itertools.product((*TEXTS, long_text), (True, False)):
        ids = ours.encode(text, add_special_tokens=flag)
        assert ids == theirs.encode(text, add_special_tokens=flag)
        assert ours.decode(ids, skip_special_tokens=flag) == theirs.decode(ids, skip_special_tokens=flag)


def test_other_threads_run_while_a_long_text_is_encoded(checkpoints: Mapping[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(checkpoints["byte_level"])
    is_done = threading.Event()

    def encode() -> None:
        tokenizer.encode("a word and another " * 20_000)
        is_done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    num_turns = 0
    while not is_done.wait(0.001):
        num_turns += 1
    worker.join()
    assert num_turns > 3


def test_special_tokens_named_only_by_the_config_are_special(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["byte_level"], tmp_path / "copy")
    config = {
        "eos_token": "<tool_call>",
        "additional_special_tokens": ["<new>"],
        "tokenizer_class": "TokenizersBackend",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("a<tool_call>b<new>c")
    assert ids == theirs.encode("a<tool_call>b<new>c")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "abc"


def test_marks_in_text_stay_text_when_the_checkpoint_says_so(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["byte_level"], tmp_path / "copy")
    config = {"split_special_tokens": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = Tokenizer.from_folder(folder).encode("<|im_end|>")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("<|im_end|>")
    assert len(ids) > 1


def test_training_time_truncation_and_padding_do_not_touch_prompts(
    checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    import tokenizers

    folder = shutil.copytree(checkpoints["byte_level"], tmp_path / "copy")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    expected = Tokenizer.from_folder(checkpoints["byte_level"]).encode("Hello world, hello again!")
    assert Tokenizer.from_folder(folder).encode("Hello world, hello again!") == expected


def test_vocab_size_counts_every_id(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).vocab_size == len(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}),
        ({}, {"eos_token_id": 9}, {9}),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [5]}}, {5}),
        ({}, {}, {2}),
    ],
)
def test_eos_ids_are_those_of_both_configs_or_the_tokenizers_own(
    checkpoints: Mapping[str, Path], tmp_path: Path, generation: object, model: object, expected: set[int]
) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(model))
    assert Tokenizer.from_folder(folder).eos_token_ids == expected


def test_bos_id_is_the_tokenizers_own_before_the_configs(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    for kind, expected in (("llama", 1), ("byte_level", 33)):
        folder = shutil.copytree(checkpoints[kind], tmp_path / kind)
        (folder / "config.json").write_text('{"bos_token_id": 33}')
        assert Tokenizer.from_folder(folder).bos_token_id == expected
    assert Tokenizer.from_folder(checkpoints["byte_level"]).bos_token_id is None


def test_special_tokens_map_names_tokens_of_older_checkpoints(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "copy")
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, frozenset({2}))


@pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
def test_token_bytes_join_to_the_text(checkpoints: Mapping[str, Path], text: str) -> None:
    tokenizer = Tokenizer.from_folder(checkpoints["byte_level"])
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_token_bytes_of_sentencepiece_pieces(checkpoints: Mapping[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(checkpoints["llama"])
    ids = tokenizer.encode("Hello € x", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == " Hello € x".encode()
    assert b"\xe2" in [tokenizer.token_bytes(token_id) for token_id in ids]
    assert tokenizer.token_text(ids[-1]).endswith("x")
    assert tokenizer.token_text(1) == "<s>"


def test_metaspace_token_text_begins_with_a_space(checkpoints: Mapping[str, Path]) -> None:
    tokenizer = Tokenizer.from_folder(checkpoints["metaspace"])
    assert tokenizer.token_text(tokenizer.encode("the", add_special_tokens=False)[0]).startswith(" ")


def test_ids_without_a_token_have_no_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == tokenizer.token_bytes(2**40) == b""
    assert tokenizer.decode([10**6]) == ""
    with pytest.raises(InvalidRequest):
        tokenizer.decode([-1])


def test_a_lone_surrogate_is_the_clients_error(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 1"):
        Tokenizer.from_folder(folder).encode("a\ud800b")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {}}}'),
        ("config.json", '{"eos_token_id": "</s>"}'),
    ],
)
def test_damaged_files_are_named(checkpoints: Mapping[str, Path], tmp_path: Path, file: str, content: str) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "copy")
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "bc"}, "content": "x"}],
        },
        {
            "type": "Sequence",
            "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
        },
    ],
    ids=["wordpiece", "replace across tokens", "strip the end"],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(
    checkpoints: Mapping[str, Path], tmp_path: Path, decoder: object
) -> None:
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "copy")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = decoder
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="decoder that is not supported"):
        Tokenizer.from_folder(folder)


def test_loading_imports_neither_torch_nor_transformers(checkpoints: Mapping[str, Path]) -> None:
    program = (
        "import sys; from pathlib import Path; from baton.engine.text.chat_template import ChatTemplate;"
        "from baton.engine.text.detokenizer import IncrementalDetokenizer as _;"
        "from baton.engine.text.tokenizer import Tokenizer;"
        "Tokenizer.from_folder(Path(sys.argv[1])); print({'torch', 'transformers'} & set(sys.modules))"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", program, str(checkpoints["llama"])]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "set()"


def test_a_padded_vocabulary_has_the_ids_of_the_model(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["byte_level"], tmp_path / "padded")
    named = Tokenizer.from_folder(folder).vocab_size
    (folder / "config.json").write_text(json.dumps({"vocab_size": named + 64}))
    padded = Tokenizer.from_folder(folder)
    assert padded.vocab_size == named + 64
    assert padded.decode([named + 63], skip_special_tokens=False) == ""
