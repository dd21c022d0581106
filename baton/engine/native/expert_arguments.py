"""The arguments of the kernels for experts, as `src/kernels.h` declares them. See `baton.engine.native.arguments`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

PLAIN_CODES = -1
"""`BATON_PLAIN`."""
SILU_GATE, CLAMPED_GATE = 0, 1
"""`BatonGateKind`."""


class BatonRouting(Structure):
    """`BatonRouting` of kernels.h: choose the experts of each token."""

    _fields_ = [
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("logits", c_void_p),
        ("correction", c_void_p),
        ("num_tokens", c_int64),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("logit_stride", c_int64),
        ("num_groups", c_int64),
        ("num_chosen_groups", c_int64),
        ("num_best_of_group", c_int64),
        ("scaling", c_float),
        ("dtype", c_int32),
        ("logits_are_float32", c_int32),
        ("scoring", c_int32),
        ("normalizes", c_int32),
    ]


class BatonExpertWeight(Structure):
    """`BatonExpertWeight` of kernels.h: a packed weight of one expert."""

    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("group_size", c_int64),
        ("codes_kind", c_int32),
        ("scale_dtype", c_int32),
        ("has_offsets", c_int32),
        ("is_rounded", c_int32),
    ]


class BatonExperts(Structure):
    """`BatonExperts` of kernels.h: the experts of all tokens, and their sums."""

    _fields_ = [
        ("out", c_void_p),
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("scratch", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("num_tokens", c_int64),
        ("size", c_int64),
        ("inner", c_int64),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("x_stride", c_int64),
        ("gate_limit", c_float),
        ("gate_slope", c_float),
        ("dtype", c_int32),
        ("gate", c_int32),
    ]
