"""The arguments of the kernels, as `src/kernels.h` declares them: field by field the same (a test compares them).

Pointers are addresses (`Tensor.data_ptr`). Who fills in an address keeps its tensor alive until the call has returned.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

from baton.engine.native.expert_arguments import BatonExperts, BatonRouting

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""`BatonDtype`."""
SCALE_DTYPES = {torch.float32: 0, torch.float16: 2, torch.float8_e8m0fnu: 3}
"""Of scales: `BatonDtype` and `BATON_E8M0`."""


class BatonPack(Structure):
    """`BatonPack` of kernels.h: pack a plain weight [num_out, num_in]."""

    _fields_ = [
        ("packed", c_void_p),
        ("weight", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("weight_stride", c_int64),
        ("dtype", c_int32),
    ]


class BatonLinear(Structure):
    """`BatonLinear` of kernels.h: multiply by a packed weight."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_tokens", c_int64),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("out_stride", c_int64),
        ("x_stride", c_int64),
        ("dtype", c_int32),
        ("out_is_float32", c_int32),
    ]


class BatonQuantizedPack(Structure):
    """`BatonQuantizedPack` of kernels.h: pack codes with their scales and offsets."""

    _fields_ = [
        ("packed", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("group_size", c_int64),
        ("codes_stride", c_int64),
        ("dtype", c_int32),
        ("codes_kind", c_int32),
        ("scale_dtype", c_int32),
    ]


class BatonQuantizedLinear(Structure):
    """`BatonQuantizedLinear` of kernels.h: multiply by a packed quantized weight."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("num_tokens", c_int64),
        ("num_out", c_int64),
        ("num_in", c_int64),
        ("out_stride", c_int64),
        ("x_stride", c_int64),
        ("group_size", c_int64),
        ("dtype", c_int32),
        ("out_is_float32", c_int32),
        ("codes_kind", c_int32),
        ("scale_dtype", c_int32),
        ("has_offsets", c_int32),
    ]


class BatonQuantize(Structure):
    """`BatonQuantize` of kernels.h: make codes, scales and offsets of a plain weight."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("weight", c_void_p),
        ("num_groups", c_int64),
        ("group_size", c_int64),
        ("dtype", c_int32),
        ("codes_kind", c_int32),
    ]


class BatonRoundRows(Structure):
    """`BatonRoundRows` of kernels.h: round rows of x to 8 bits."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("size", c_int64),
        ("out_stride", c_int64),
        ("x_stride", c_int64),
        ("dtype", c_int32),
    ]


class BatonRoundedLinear(BatonQuantizedLinear):
    """`BatonRoundedLinear` of kernels.h: multiply rounded rows by a quantized weight that is packed for them."""


class BatonPagedKv(Structure):
    """`BatonPagedKv` of kernels.h: where a layer's keys and values lie, and in which format."""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("block_stride", c_int64),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("has_codes", c_int32),
    ]


class BatonGuest(Structure):
    """`BatonGuest` of kernels.h: a thread on a core that another node may lend. `loan` and `own` are the nodes' lines
    of shared memory."""

    _fields_ = [("loan", c_void_p), ("own", c_void_p), ("core", c_int32)]


class BatonStore(Structure):
    """`BatonStore` of kernels.h: write a step's keys and values to their slots."""

    _fields_ = [
        ("kv", BatonPagedKv),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("slots", c_void_p),
        ("num_tokens", c_int64),
    ]


class BatonAttention(Structure):
    """`BatonAttention` of kernels.h: causal attention of all sequences of a step."""

    _fields_ = [
        ("kv", BatonPagedKv),
        ("out", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("first_token", c_void_p),
        ("start", c_void_p),
        ("num_tokens", c_void_p),
        ("table_begin", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int64),
        ("scratch", c_void_p),
        ("scale", c_float),
        ("num_heads", c_int32),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("cap", c_float),
    ]


class BatonSequence(Structure):
    """`BatonSequence` of kernels.h: a sequence's tokens in a step, and its blocks."""

    _fields_ = [("start", c_int64), ("num_tokens", c_int64), ("blocks", c_void_p), ("num_blocks", c_int64)]


class BatonPlan(Structure):
    """`BatonPlan` of kernels.h: make a step's index arrays; the last fields are written."""

    _fields_ = [
        ("sequences", c_void_p),
        ("num_sequences", c_int64),
        ("block_size", c_int64),
        ("max_tokens", c_int64),
        ("max_sequences", c_int64),
        ("max_blocks", c_int64),
        ("slots", c_void_p),
        ("first_token", c_void_p),
        ("start", c_void_p),
        ("counts", c_void_p),
        ("table_begin", c_void_p),
        ("block_tables", c_void_p),
        ("num_tokens", c_int64),
        ("num_blocks", c_int64),
        ("num_positions", c_int64),
    ]


class BatonDeltaPiece(Structure):
    """`BatonDeltaPiece` of kernels.h: neighbouring tokens, and the blocks with the matrices before and behind them."""

    _fields_ = [("first", c_int64), ("last", c_int64), ("before", c_int64), ("block", c_int64)]


class BatonDeltaRule(Structure):
    """`BatonDeltaRule` of kernels.h: the recurrence of a gated delta net."""

    _fields_ = [
        ("out", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("beta", c_void_p),
        ("keep", c_void_p),
        ("matrices", c_void_p),
        ("pieces", c_void_p),
        ("sequence_begin", c_void_p),
        ("num_sequences", c_int64),
        ("stride", c_int64),
        ("num_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
    ]


class BatonAddNorm(Structure):
    """`BatonAddNorm` of kernels.h: add to the residual stream and norm it."""

    _fields_ = [
        ("out", c_void_p),
        ("residual", c_void_p),
        ("delta", c_void_p),
        ("weight", c_void_p),
        ("num_rows", c_int64),
        ("size", c_int64),
        ("out_stride", c_int64),
        ("residual_stride", c_int64),
        ("delta_stride", c_int64),
        ("eps", c_float),
        ("dtype", c_int32),
    ]


class BatonNormRotate(Structure):
    """`BatonNormRotate` of kernels.h: norm and rotate heads."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("cos", c_void_p),
        ("signed_sin", c_void_p),
        ("num_tokens", c_int64),
        ("x_stride", c_int64),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("eps", c_float),
        ("dtype", c_int32),
    ]


class BatonGate(Structure):
    """`BatonGate` of kernels.h: silu(gate) * up."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("dtype", c_int32),
    ]


class BatonGather(Structure):
    """`BatonGather` of kernels.h: copy the rows of a table that a step names."""

    _fields_ = [
        ("out", c_void_p),
        ("table", c_void_p),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("row_bytes", c_int64),
        ("num_table_rows", c_int64),
        ("index", c_int32),
        ("packed_as", c_int32),
    ]


class BatonArgmax(Structure):
    """`BatonArgmax` of kernels.h: the largest logit of each row, under masks."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("largest", c_void_p),
        ("is_valid", c_void_p),
        ("logits", c_void_p),
        ("wide", c_void_p),
        ("is_wide", c_void_p),
        ("bits", c_void_p),
        ("masks", c_void_p),
        ("num_rows", c_int64),
        ("size", c_int64),
        ("stride", c_int64),
        ("mask_bytes", c_int64),
        ("dtype", c_int32),
    ]


class BatonSample(Structure):
    """`BatonSample` of kernels.h: sample a token for some of the rows."""

    _fields_ = [
        ("found", BatonArgmax),
        ("rows", c_void_p),
        ("parameters", c_void_p),
        ("num_sampled", c_int64),
        ("parameter_stride", c_int64),
    ]


class BatonStep(Structure):
    """`BatonStep` of kernels.h: what differs between two replays of the same calls."""

    _fields_ = [
        ("slots", c_void_p),
        ("first_token", c_void_p),
        ("start", c_void_p),
        ("num_tokens", c_void_p),
        ("table_begin", c_void_p),
        ("block_tables", c_void_p),
        ("num_sequences", c_int64),
        ("scratch", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("due", c_void_p),
    ]


class BatonCall(Structure):
    """`BatonCall` of kernels.h: one call of a replay, by kind and arguments."""

    _fields_ = [("arguments", c_void_p), ("kind", c_int32)]


KINDS: dict[type[Structure], int] = {
    BatonLinear: 0,
    BatonStore: 1,
    BatonAttention: 2,
    BatonAddNorm: 3,
    BatonNormRotate: 4,
    BatonGate: 5,
    BatonGather: 6,
    BatonQuantizedLinear: 7,
    BatonRouting: 8,
    BatonExperts: 9,
    BatonRoundRows: 10,
    BatonRoundedLinear: 11,
}
"""`BatonKind`, by the arguments of its function."""
TOKEN_IDS, POSITIONS, DUE = 0, 1, 2
"""`BatonIndex`."""
NOT_PACKED = -1
"""Of `BatonGather`, see kernels.h."""
PLANNED, PLAN_TOO_LARGE = 0, 1
"""`BatonPlanned`."""
