from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from baton.engine.models.checkpoint import resolve_checkpoint
from baton.engine.models.gguf.blocks import BLOCK_KINDS, numbers_of
from baton.engine.models.gguf.file import read_gguf, read_tensors
from baton.engine.models.gguf.folder import checkpoint_folder
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidSetting, ModelLoadError
from tests.checkpoints import make_checkpoint, write_weights
from tests.engine.models.gguf_writer import fact, write_gguf
from tests.engine.models.quantization.answers import assert_same_answer

KINDS = {"attn_v": "Q4_1", "ffn_down": "F16", "token_embd": "Q8_0", "attn_output": "BF16"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(tmp_path: Path, family: str = "llama", **settings: object) -> tuple[Path, Path]:
    """A GGUF file, and a plain checkpoint of the numbers in it."""
    folder = make_checkpoint(tmp_path / "plain", family, changes={"hidden_size": 96}, **settings)  # type: ignore[arg-type]
    file = tmp_path / "small.gguf"
    write_weights(folder, write_gguf(folder, file, family, KINDS))
    return file, folder


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(("family", "tie"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_a_file_answers_as_the_numbers_in_it(tmp_path: Path, family: str, tie: bool, kernels: str) -> None:
    file, reference = small(tmp_path, family, tie=tie)
    assert_same_answer(file, reference, 2e-4, cpu_kernels=kernels)


def test_a_file_brings_its_tokenizer(tmp_path: Path) -> None:
    file, folder = small(tmp_path)
    ours, theirs = (Tokenizer.from_folder(where) for where in (checkpoint_folder(file), folder))
    text = "The river said: 1 + 1 = 2<|im_end|>\n naïve?"
    assert ours.encode(text) == theirs.encode(text)


def test_quantized_codes_of_every_kind_are_read_as_the_format_says() -> None:
    generator = np.random.default_rng(0)
    sizes = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144, "Q6_K": 210}
    for name, kind in BLOCK_KINDS.items():
        blocks = generator.integers(0, 256, (2, 3, sizes[name]), dtype=np.uint8)
        for first in {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
            blocks[:, :, first : first + 2] = generator.standard_normal((2, 3, 1)).astype(np.float16).view(np.uint8)
        expected = [[number for block in row for number in spelled_out(name, block.tobytes())] for row in blocks]
        found = numbers_of(kind.decode(blocks), kind.group_size)
        np.testing.assert_allclose(found, np.array(expected), rtol=1e-5, atol=1e-5)


def spelled_out(name: str, block: bytes) -> list[float]:
    """The numbers of a block, one by one."""

    def half(first: int) -> float:
        value: float = struct.unpack("<e", block[first : first + 2])[0]
        return value

    if name == "Q8_0":
        return [half(0) * code for code in struct.unpack("<32b", block[2:])]
    if name in ("Q4_0", "Q4_1"):
        packed = block[2:] if name == "Q4_0" else block[4:]
        codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        return [half(0) * (code - 8) if name == "Q4_0" else half(0) * code + half(2) for code in codes]
    if name == "Q4_K":
        found = []
        scales, packed = block[4:16], block[16:]
        for group in range(8):
            if group < 4:
                scale, low = scales[group] & 63, scales[group + 4] & 63
            else:
                scale = scales[group + 4] & 15 | scales[group - 4] >> 6 << 4
                low = scales[group + 4] >> 4 | scales[group] >> 6 << 4
            for place in range(32):
                byte = packed[group // 2 * 32 + place]
                found.append(half(0) * scale * (byte >> 4 if group % 2 else byte & 15) - half(2) * low)
        return found
    found = [0.0] * 256
    for place in range(256):
        part, within = divmod(place, 128)
        quarter, column = divmod(within, 32)
        byte = block[part * 64 + column + 32 * (quarter % 2)]
        upper = block[128 + part * 32 + column] >> (2 * quarter) & 3
        code = (byte >> 4 if quarter >= 2 else byte & 15) | upper << 4
        (scale,) = struct.unpack("b", block[192 + place // 16 : 193 + place // 16])
        found[place] = half(208) * scale * (code - 32)
    return found


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    file, _ = small(tmp_path)
    content, chance = file.read_bytes(), random.Random(1)
    damaged = tmp_path / "damaged.gguf"
    header = read_gguf(file).header_bytes
    messages = []
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(chance.choice((1, 4))):
            changed[chance.randrange(header)] = chance.choice((0, 255, chance.randrange(256)))
        damaged.write_bytes(bytes(changed[: chance.choice((len(content), chance.randrange(len(content))))]))
        try:
            read_gguf(damaged)
        except ModelLoadError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all("damaged.gguf: " in message for message in messages)


def test_counts_that_the_file_has_no_room_for_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "absurd.gguf"
    begin = b"GGUF" + struct.pack("<I", 3)
    endless_list = fact("a", "b")[:9] + struct.pack("<IIQ", 9, 4, 1 << 62)
    for content, reason in (
        (begin + struct.pack("<QQ", 1 << 60, 0), "tensors"),
        (begin + struct.pack("<QQ", 0, 1 << 60), "facts"),
        (begin + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 50), "facts"),
        (begin + struct.pack("<QQ", 0, 1) + endless_list, "numbers in a list"),
        (begin[:4] + struct.pack("<I", 9) + bytes(16), "its version is 9"),
        (b"GGML" + bytes(40), "not GGUF"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=reason):
            read_gguf(file)


def test_what_is_not_supported_is_said_by_name(tmp_path: Path) -> None:
    file, _ = small(tmp_path)
    content = file.read_bytes()
    for old, new, reason in (
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "general.architecture 'mamba' is not supported"),
        (b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-9", "tokenizer.json and tokenizer_config.json beside"),
    ):
        file.write_bytes(content.replace(old, new))
        with pytest.raises(ModelLoadError, match=reason):
            resolve_checkpoint(str(file))


def test_a_quantized_file_is_not_quantized_again(tmp_path: Path) -> None:
    file, reference = small(tmp_path)
    with pytest.raises(InvalidSetting, match=r"--quantization int8: the checkpoint is quantized already \(gguf\)"):
        assert_same_answer(file, reference, quantization="int8")


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file, _ = small(tmp_path)
    before = read_tensors(file)
    assert read_tensors(file) is before
    assert before.tensors == read_gguf(file).tensors
    assert not before.facts
    file.write_bytes(b"GGML")
    with pytest.raises(ModelLoadError, match="not GGUF"):
        read_tensors(file)
