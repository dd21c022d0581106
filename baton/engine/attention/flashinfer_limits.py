"""Arithmetic of shapes: what flashinfer can compute, with which kernels, and how much memory it needs.

Owns the limits of the oldest version supported (0.6.5), which hold for the newer ones. Imports no flashinfer.

Letters: N sequences of a step, Hq query heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

import torch

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
GRAPH_INT_WORKSPACE_BYTES = 2**20
"""A plan takes four int32 for each of at most max(N, thread blocks on the GPU) pieces of work: a tenth of this."""
_OLDEST_CAPABILITY = (8, 0)
_TENSOR_CORE_GROUP = 4
_MAX_THREADS_PER_BLOCK = 1024
_MAX_BLOCKS_PER_PROCESSOR = 32
_STORE_BYTES_PER_THREAD, _WARP = 16, 32
_MIN_FLOAT_WORKSPACE_BYTES = 128 * 2**20
"""The size that flashinfer recommends."""
_EAGER_INT_WORKSPACE_BYTES = 8 * 2**20
"""The size that a wrapper allocates for itself."""


def unsupported_reason(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, compute_capability: tuple[int, int]
) -> str | None:
    """Why flashinfer cannot serve a model on a GPU of that capability; None if it can."""
    if compute_capability < _OLDEST_CAPABILITY:
        return f"a GPU of compute capability {compute_capability[0]}.{compute_capability[1]} is older than 8.0"
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of size {head_dim}, only for {', '.join(map(str, HEAD_DIMS))}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly"
    # storing a token takes one thread block, with this number of threads for each head
    threads_per_head = head_dim // max(_STORE_BYTES_PER_THREAD // dtype.itemsize, head_dim // _WARP)
    if num_kv_heads * threads_per_head > _MAX_THREADS_PER_BLOCK:
        return f"it cannot store {num_kv_heads} key heads of size {head_dim} at once"
    return None


def uses_tensor_cores(group_size: int) -> bool:
    """Whether one-token shares of models with `group_size` query heads for each key head go to the tensor cores.

    From 4 on, the other kernel is bound by arithmetic and not by memory any more. It also exists for some group sizes
    only (1, 2, 3, 4 and 8 in every version), while the tensor cores take any.
    """
    return group_size >= _TENSOR_CORE_GROUP


def float_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, num_processors: int, max_graph_sequences: int
) -> int:
    """Bytes of float workspace that no plan exceeds on a GPU with `num_processors` multiprocessors.

    Kernels that split a context keep a float32 partial result of [Hq, tile, D + 1] there for each piece of work. There
    are up to two pieces for each multiprocessor, shared among Hkv; recorded steps keep one for each tile of queries,
    used or not.
    """
    group_size = num_heads // num_kv_heads
    pieces = max(1, 2 * num_processors // num_kv_heads)
    longest_tile = 128 if head_dim < 256 else 64
    partial_bytes = 4 * num_heads * (head_dim + 1)
    needs = [pieces * longest_tile * partial_bytes]
    if uses_tensor_cores(group_size):
        tile = 16 if group_size <= 16 else 64 if group_size <= 64 else longest_tile
        tiles = -(-max_graph_sequences * group_size // tile) + max_graph_sequences - 1
        needs.append(max(pieces, tiles) * tile * partial_bytes)
    else:
        # each piece is one query token, and there is one for each thread block that fits on the GPU
        needs.append(max(1, _MAX_BLOCKS_PER_PROCESSOR * num_processors // num_kv_heads) * partial_bytes)
    return max(_MIN_FLOAT_WORKSPACE_BYTES, max(needs) + 2**20)


def int_workspace_bytes(num_groups: int) -> int:
    """Device memory of the int workspaces of one `FlashInferAttention` and its graphs, in bytes."""
    return num_groups * (2 * _EAGER_INT_WORKSPACE_BYTES + GRAPH_INT_WORKSPACE_BYTES)
