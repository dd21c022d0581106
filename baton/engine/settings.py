"""Settings of an engine: which model, how much memory, how large a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from baton.runtime.plugins import ATTENTION_BACKENDS, KV_STORES
from baton.runtime.ranges import BYTES_OR_NONE, COUNT_OR_NONE, MILLISECONDS, SHARE, THREADS, Range
from baton.runtime.settings import setting
from baton.wire.kv_shard import MAX_RANKS

AUTO, SHARED, OWN, HOST, VALKEY, DUMMY = "auto", "shared", "own", "host", "valkey", "dummy"
RANKS, RANKS_OR_SAME = Range(1, MAX_RANKS), Range(0, MAX_RANKS)
BLOCK_SIZE, SEQUENCES, BATCHED_TOKENS = Range(1, 4096), Range(1, 65536), Range(0, 2**20)
_model = partial(setting, group="model")
_cache = partial(setting, group="cache")
_steps = partial(setting, group="steps")
_goals = partial(setting, group="goals")
_kernels = partial(setting, group="kernels")
_ranks = partial(setting, group="ranks")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine. Zero means "choose for me" where the documentation of a field says so."""

    model: str = setting("", "checkpoint folder or hub id; empty: the built-in demo model", positional=True)
    device: str = setting(
        "auto", "where the model runs; auto: a GPU where torch sees one", metavar="{auto,cpu,cuda,cuda:N}"
    )
    model_impl: str = _model(
        "auto",
        "code that computes the model; auto: Baton's own where it has the architecture, else transformers', slower",
        choices=("auto", "baton", "transformers"),
    )
    trust_remote_code: bool = _model(
        False, "run code that comes with the checkpoint, where transformers computes the model"
    )
    dtype: str = _model(
        "auto", "type of weights, of what is computed, and of KV", choices=("auto", "bfloat16", "float16", "float32")
    )
    quantization: str = _model(
        "auto",
        "weights of products; auto: as the checkpoint has them; int8, int4: plain ones are quantized while loading",
        choices=("auto", "int8", "int4"),
    )
    activation_dtype: str = _model(
        "auto",
        "inputs of products with quantized weights on a CPU; auto: as they are; int8: rounded to 8 "
        "bits, which is faster for batches and prompts",
        choices=("auto", "int8"),
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "type of stored KV; auto: the model's dtype; fp8, fp8_e4m3: floats of 8 bits with a scale for each token and "
        "head, in half the memory of bfloat16",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    block_size: int = _cache(16, "tokens per KV block", allowed=BLOCK_SIZE)
    max_model_len: int = setting(
        0, "longest prompt plus output in tokens; 0: the model's own limit", allowed=COUNT_OR_NONE
    )
    kv_cache_memory_bytes: int = _cache(
        0,
        "bytes of the KV pool; 0: on a GPU what is free; on a CPU what max-num-seqs can use, at most 1 GiB or one "
        "longest request, and what cpu-memory-utilization allows",
        allowed=BYTES_OR_NONE,
    )
    cpu_memory_utilization: float = _cache(
        0.6,
        "share of the machine's memory that this process may take on a CPU, weights included; `baton serve` divides it "
        "among its nodes",
        allowed=SHARE,
    )
    gpu_memory_utilization: float = _cache(
        0.9,
        "share of a GPU's memory that this process may take; `baton serve` divides it among the nodes of a GPU",
        allowed=SHARE,
    )
    kv_offloading_size: float = _cache(
        0.0,
        "GiB of host memory, of all ranks together, for KV that no longer fits the KV pool; it comes back from there, "
        "and is not computed again; 0: none",
        allowed=Range(0, 2**20),
    )
    kv_disk: str = _cache(
        "",
        "folder for KV that no longer fits the KV pool and kv-offloading-size; it is there again after a restart, and "
        "nodes of a machine may share it; empty: none",
        metavar="PATH",
    )
    kv_disk_size: float = _cache(0.0, "GiB that all files of kv-disk may take; 0: 16", allowed=Range(0, 2**20))
    kv_store: str = _cache(
        HOST,
        "place of KV that no longer fits the KV pool; host: memory of kv-offloading-size; valkey: below that, a Valkey "
        "or Redis server that nodes share, see kv-store-url; NAME: the store of an installed package, to which "
        "kv-offloading-size is a limit",
        choices=(HOST, VALKEY),
        plugins=KV_STORES,
    )
    kv_store_url: str = _cache(
        "",
        "address of the server of kv-store valkey, redis://USER:PASSWORD@HOST:PORT/0, or rediss:// for TLS; better "
        "given in the environment, which no process list shows",
        metavar="URL",
        secret=True,
    )
    num_blocks: int = _cache(
        0, "blocks of the KV pool; overrides kv-cache-memory-bytes when above 0", allowed=COUNT_OR_NONE
    )
    max_num_seqs: int = setting(64, "requests computed together in a step", allowed=SEQUENCES)
    max_num_batched_tokens: int = _steps(
        0,
        "tokens of prompts in a step, beside requests that decode: the largest chunk; 0: 2048 on a GPU, else 512",
        allowed=BATCHED_TOKENS,
    )
    goal_ttft_ms: float = _goals(
        0.0,
        "milliseconds to the first token: what computes a prompt, and how much of it a step takes; 0: no goal",
        allowed=MILLISECONDS,
    )
    goal_tpot_ms: float = _goals(
        0.0,
        "milliseconds between two tokens: chunks of prompts beside running requests keep to it; 0: no goal",
        allowed=MILLISECONDS,
    )
    enable_prefix_caching: bool = _cache(True, "reuse the KV of prompt beginnings seen before")
    attention_backend: str = _kernels(
        "auto",
        "attention kernels; auto: flashinfer on a GPU where it fits, Baton's own on a CPU; NAME: those of an installed "
        "package",
        choices=("auto", "flashinfer", "native", "torch"),
        plugins=ATTENTION_BACKENDS,
    )
    cpu_kernels: str = _kernels(
        "auto",
        "kernels on a CPU; auto: Baton's own where they were compiled, for the best this processor can; torch; or "
        "avx512_bf16, avx512_vnni, avx512, avx2_vnni, avx2, dotprod, baseline",
        metavar="{auto,torch,LEVEL}",
    )
    tensor_parallel_size: int = setting(
        1,
        "ranks that divide the model among them: its heads, the rows of its MLPs, its vocabulary",
        short="-tp",
        allowed=RANKS,
    )
    pipeline_parallel_size: int = _ranks(
        1,
        "stages that divide the layers of the model among them, each of tensor-parallel-size ranks",
        short="-pp",
        allowed=RANKS,
    )
    distributed_executor_backend: str = _ranks(
        "auto",
        "where the ranks run; auto: this process for one, and processes for more of them (mp), here or on other "
        "machines (see --rank-machines)",
        choices=("auto", "uni", "mp"),
    )
    rank_machines: int = _ranks(
        1,
        "machines that the ranks of a node are spread over, as many on each; all but this one run `baton rank`",
        allowed=RANKS,
    )
    rank_pools: str = _ranks(
        AUTO,
        "KV of a node of several ranks; shared: one pool for all ranks; own: a pool for each rank; auto: own where the "
        "ranks are on several machines, or on GPUs",
        choices=(AUTO, SHARED, OWN),
    )
    batch_invariant: bool = _steps(
        False, "do not start unless tokens cannot depend on what else is in a batch: Baton's own kernels on a CPU"
    )
    speculative_config: str = _steps(
        AUTO,
        "how tokens are guessed, several of which a step verifies: none, or vLLM's JSON, as "
        '{"method": "suffix"}. Methods: suffix, ngram (from text), draft_model, eagle3 (from another checkpoint, its '
        "model), mtp (from layers that the model ships); auto: suffix on a CPU",
        metavar="JSON",
    )
    limit_mm_per_prompt: str = _model(
        "image=4", "images that a request may have, where the model sees; image=0: none, and no tower is loaded"
    )
    enforce_eager: bool = _steps(False, "run decode steps without recorded CUDA graphs")
    load_format: str = _model(
        "auto", "auto: the checkpoint's weights; dummy: random ones, for measurements", choices=("auto", "dummy")
    )
    num_threads: int = _kernels(0, "compute threads; 0: one per core this process may use", allowed=THREADS)
    core_loans: str = _kernels("", "how nodes of this machine lend each other cores, as `baton serve` says; empty: not")

    @property
    def has_kv_store(self) -> bool:
        """Whether KV that the pool forgets goes anywhere."""
        return self.kv_store != HOST or self.kv_offloading_size > 0 or bool(self.kv_disk)

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def divides_pool(self) -> bool:
        """Whether there are several ranks, each with a KV pool of its own."""
        return self.num_ranks > 1 and self.expects_rank_pools

    @property
    def expects_rank_pools(self) -> bool:
        """Whether nodes of this one's deployment may have divided their pool."""
        return self.rank_pools == OWN or self.rank_machines > 1

    @property
    def num_ranks_here(self) -> int:
        """Those of this machine, which has as many as each of the others."""
        return max(1, self.num_ranks // max(1, self.rank_machines))
