"""What every measurement is given: what it was told, models, engines, times on a device, and what the device can do:
copies, reads and matrix products.

Owns published sizes, and how a time is taken: warm-up first, events around many calls (where no GPU is, the host's
clock), the median of several rounds, random operands that rotate through more memory than the caches hold.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.bench.limits.engine_process import EngineSteps
from baton.bench.limits.model_shapes import ModelShapes, Product, shapes_of
from baton.bench.numbers import median
from baton.device.choose import open_device
from baton.engine.models.config import parse_config
from baton.engine.settings import EngineSettings

BLOCK_SIZE = 16
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 40960,
    "bos_token_id": None,
    "dtype": "bfloat16",
}
_NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
_SIZES = {
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "tiny": (128, 256, 2, 4, 2, 64, 512, False),
}
"""Qwen3-8B, Qwen3-0.6B, and what stands for both where there is no GPU."""
_Event: Any = torch.cuda.Event
_CACHE_TIMES = 8
_WARM_UP_CALLS = 3
_NUM_ROUNDS, _QUICK_ROUNDS = 7, 3
_ROUND_MS = 25.0
_MAX_CALLS = 400
_MAX_ROTATED = 512


def config_of(name: str) -> dict[str, Any]:
    """The `config.json` of "8B", "0.6B" or "tiny". Raises `KeyError`."""
    sizes = dict(zip([*_NAMES.split(), "tie_word_embeddings"], _SIZES[name], strict=True))
    return {**_QWEN3, **sizes, "eos_token_id": sizes["vocab_size"] - 1}


def write_model(folder: Path, name: str) -> Path:
    """What a server needs of a model beside its weights: `config.json`, and a tokenizer with one word for each id."""
    config = config_of(name)
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def model_shapes(name: str) -> ModelShapes:
    """The sizes of one of these models in bfloat16."""
    return shapes_of(parse_config(config_of(name)), element_bytes=2)


def block_bytes(name: str) -> int:
    """Bytes of one KV block over all layers in bfloat16."""
    return model_shapes(name).kv_bytes_per_token * BLOCK_SIZE


def gb_per_s(num_bytes: int, taken_ms: float) -> float:
    return num_bytes / taken_ms / 1e6


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long a device was busy: the union of (begin, end) in microseconds, whatever overlaps."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


@dataclass(frozen=True)
class Setup:
    """`device` is "cuda" or "cpu". Makes engines, and times calls on the device."""

    device: str
    is_quick: bool

    @property
    def is_gpu(self) -> bool:
        """Whether speeds mean something."""
        return self.device == "cuda"

    def model(self, name: str) -> str:
        """The sizes to measure: those of `name`, tiny ones where no GPU is."""
        return name if self.is_gpu else "tiny"

    def label(self, name: str) -> str:
        """How a row names the model of `model(name)`."""
        return name if self.is_gpu else f"tiny for {name}"

    @cached_property
    def torch_device(self) -> torch.device:
        """Raises `InvalidSetting`."""
        return open_device(self.device).torch_device

    def steps(self, name: str, num_tokens: int, num_requests: int, **settings: Any) -> EngineSteps:
        """An engine of the sizes of `name` with random weights and room for so many requests of so many tokens."""
        with tempfile.TemporaryDirectory(prefix="baton-gpu-check-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(self.model(name))))
            chosen = EngineSettings(
                model=folder,
                device="cuda" if self.is_gpu else "emulated",
                num_threads=0 if self.is_gpu else 1,
                load_format="dummy",
                block_size=BLOCK_SIZE,
                max_model_len=num_tokens,
                num_blocks=2 + num_requests * -(-num_tokens // BLOCK_SIZE),
                max_num_seqs=num_requests,
                **settings,
            )
            return EngineSteps(chosen)

    def median_ms(self, call: Callable[[], object]) -> float:
        """One call, the median over rounds of as many calls as fill a few milliseconds."""
        for _ in range(_WARM_UP_CALLS):
            call()
        round_ms, num_rounds = _ROUND_MS if self.is_gpu else 1.0, _QUICK_ROUNDS if self.is_quick else _NUM_ROUNDS
        num_calls = max(1, min(_MAX_CALLS, int(round_ms / max(self._round(call, 1), 1e-4))))
        return median([self._round(call, num_calls) / num_calls for _ in range(num_rounds)])

    @property
    def stream_bytes(self) -> int:
        return 2**31 if self.is_gpu else 2**22

    def copy_gb_per_s(self) -> float:
        """A large copy within the device's memory: bytes read and bytes written."""
        source, target = self.normal(2, self.stream_bytes // 2)
        return gb_per_s(2 * source.nbytes, self.median_ms(lambda: target.copy_(source)))

    def read_gb_per_s(self) -> float:
        """A large matrix times a vector, which reads everything and writes next to nothing: like decoding."""
        width = 2**13
        rows, vector = self.normal(self.stream_bytes // 2 // width, width), self.normal(width)
        return gb_per_s(rows.nbytes, self.median_ms(lambda: torch.mv(rows, vector)))

    def gemm_tflop_per_s(self, products: Sequence[Product]) -> float:
        """The rate of plain bfloat16 products at the shapes of a model, weighted as the model uses them."""
        total_ms = sum(product.count * self._product_ms(product) for product in products)
        return sum(product.flop for product in products) / total_ms / 1e9

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.torch_device, dtype=torch.bfloat16)

    def rotated(self, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Tensors in turn, together several times as large as the caches."""
        cache = torch.cuda.get_device_properties(self.torch_device).L2_cache_size if self.is_gpu else 2**20
        first = make()
        count = max(2, min(_MAX_ROTATED, -(-_CACHE_TIMES * cache // max(first.nbytes, 1))))
        turns = cycle([first, *(make() for _ in range(count - 1))])
        return lambda: next(turns)

    def busy_ms(self, run: Callable[[], object]) -> float | None:
        """How long the GPU was busy while `run` ran, whatever ran beside each other. None when nothing was seen."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        seen = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        total = busy_us((event.time_range.start, event.time_range.end) for event in seen)
        return total / 1e3 if seen else None

    def _round(self, call: Callable[[], object], num_calls: int) -> float:
        if not self.is_gpu:
            begin_s = time.perf_counter()
            for _ in range(num_calls):
                call()
            return (time.perf_counter() - begin_s) * 1e3
        begin, end = _Event(enable_timing=True), _Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(num_calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _product_ms(self, product: Product) -> float:
        rows = self.normal(product.num_rows, product.num_in)
        weights = self.rotated(lambda: self.normal(product.num_out, product.num_in).mul_(product.num_in**-0.5))
        return self.median_ms(lambda: torch.nn.functional.linear(rows, weights()))
