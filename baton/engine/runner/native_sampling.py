"""Sampling by the CPU kernels: the most likely token of each row, and tokens drawn at a temperature. Logits are read in
the model's own dtype, and masks of grammars are applied while they are read.

Knows no requests. Has no state between steps. The most likely token is that of torch's `max` over masked logits; one
that is drawn is torch's too, unless its noise lies within the rounding of a float64 sum of the border between tokens.

Letters: N rows, V vocabulary, R rows of a group.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.native.arguments import DTYPES, BatonArgmax, BatonSample
from baton.engine.native.library import Kernels
from baton.engine.runner.grammar_masks import Masks, RowMasks
from baton.engine.runner.sampled_rows import SampledRow
from baton.engine.runner.sampling_plan import SampleGroup


class Largest(NamedTuple):
    """The largest logit of each row [N] float32, its place [N] int64, the first of equal ones, and whether it is a
    number above -inf [N] bool. Where a row holds NaN, so does the result.

    `call`: the arguments by which they were found; they point to logits, masks and `kept`.
    """

    values: Tensor
    token_ids: Tensor
    is_valid: Tensor
    call: BatonArgmax
    kept: tuple[array[int], ...]


def argmax(kernels: Kernels, logits: Tensor, masks: Masks | None, wide: Tensor, wide_rows: Sequence[int]) -> Largest:
    """logits: [N, V]. `wide_rows` are read from `wide` [N, V] float32 instead, and have what masks rule out as -inf
    there afterwards."""
    num_rows, size = logits.shape
    largest, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    is_valid = torch.empty(num_rows, dtype=torch.bool)
    call = BatonArgmax(
        token_ids=token_ids.data_ptr(),
        largest=largest.data_ptr(),
        is_valid=is_valid.data_ptr(),
        logits=logits.data_ptr(),
        num_rows=num_rows,
        size=size,
        stride=logits.stride(0),
        dtype=DTYPES[logits.dtype],
    )
    of_row, is_wide = array("q"), array("B")
    if masks is not None:
        of_row = _mask_of_row(masks, num_rows)
        call.bits, call.masks, call.mask_bytes = masks.bits.data_ptr(), of_row.buffer_info()[0], -(-size // 8)
    if wide_rows:
        is_wide = array("B", bytes(num_rows))
        for row in wide_rows:
            is_wide[row] = 1
        call.wide, call.is_wide = wide.data_ptr(), is_wide.buffer_info()[0]
    kernels.argmax(call)
    return Largest(largest, token_ids, is_valid, call, (of_row, is_wide))


def draw(kernels: Kernels, largest: Largest, group: SampleGroup) -> None:
    """Draw a token for each row of `group`, whose width is 0, into the token ids of `largest`. The logits and masks by
    which that was found are still there."""
    parameters = group.parameters
    call = BatonSample(
        largest.call, group.rows.data_ptr(), parameters.data_ptr(), parameters.shape[1], parameters.stride(0)
    )
    kernels.sample(call)


class LargestTokens:
    """Finds the most likely token of each row of logits [N, V], again and again, in memory that stays where it is."""

    def __init__(self, kernels: Kernels, token_ids: Sequence[int]) -> None:
        """`token_ids`: what stands there before the first are found."""
        num_rows = len(token_ids)
        self._kernels = kernels
        self._token_ids = array("q", token_ids)
        self._largest, self._is_valid = array("f", bytes(4 * num_rows)), array("B", bytes(num_rows))
        self._call = BatonArgmax(
            self._token_ids.buffer_info()[0], self._largest.buffer_info()[0], self._is_valid.buffer_info()[0]
        )
        self.logits = torch.empty(0)
        """[N, V], those that are read."""
        self.token_ids = torch.frombuffer(self._token_ids, dtype=torch.int64)
        """[N], those that were found last."""

    def read(self, logits: Tensor) -> None:
        """Find those of `logits` from now on."""
        call, self.logits = self._call, logits
        call.logits, call.stride, call.dtype = logits.data_ptr(), logits.stride(0), DTYPES[logits.dtype]
        call.num_rows, call.size = logits.shape

    def find(self) -> tuple[list[int], list[int]]:
        """Token ids, and whether each row has a number."""
        self._kernels.argmax(self._call)
        return self._token_ids.tolist(), self._is_valid.tolist()

    def replace(self, row: int, token_id: int) -> None:
        """The token of this row is another one."""
        self._token_ids[row] = token_id


class PlainSampling:
    """As `argmax`, and `draw` for those rows that are not greedy, again and again in memory that stays where it is. No
    operation of torch is needed for them: its code is not in the caches after a step."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._reserve(8)

    def __call__(
        self, logits: Tensor, drawn: Sequence[SampledRow], masks: RowMasks | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids [N], and whether each is valid [N], of `logits` [N, V]; `drawn`: the rows that are not greedy."""
        num_rows, size = logits.shape
        if num_rows > len(self._token_ids):
            self._reserve(2 * num_rows)
        found = self._found
        found.logits, found.stride, found.dtype = logits.data_ptr(), logits.stride(0), DTYPES[logits.dtype]
        found.num_rows, found.size, found.bits = num_rows, size, None
        if masks is not None:
            of_row = self._mask_of_row
            of_row[:num_rows] = array("q", [-1]) * num_rows
            for number, row in enumerate(masks.rows):
                of_row[row] = number
            found.bits, found.mask_bytes = masks.bits.buffer_info()[0], -(-size // 8)
        found.masks = None if masks is None else self._mask_of_row.buffer_info()[0]
        self._kernels.argmax(found)
        if drawn:
            self._draw(drawn)
        return self._token_ids[:num_rows].tolist(), self._is_valid[:num_rows].tolist()

    def _draw(self, drawn: Sequence[SampledRow]) -> None:
        rows, parameters, most = self._rows, self._parameters, len(self._rows)
        for number, (row, _, _, temperature, noise, _, min_p) in enumerate(drawn):
            rows[number], parameters[number], parameters[most + number] = row, temperature, noise
            parameters[3 * most + number] = min_p
        self._call.num_sampled = len(drawn)
        self._kernels.sample(self._call)

    def _reserve(self, most: int) -> None:
        """Memory for `most` rows."""
        self._token_ids, self._largest = array("q", bytes(8 * most)), array("f", bytes(4 * most))
        self._is_valid, self._mask_of_row = array("B", bytes(most)), array("q", bytes(8 * most))
        self._rows, self._parameters = array("q", bytes(8 * most)), array("d", bytes(32 * most))
        self._call = BatonSample(rows=self._rows.buffer_info()[0], parameters=self._parameters.buffer_info()[0])
        self._call.parameter_stride = most
        self._found = self._call.found  # its own memory: what is set here is set there
        self._found.token_ids, self._found.largest = self._token_ids.buffer_info()[0], self._largest.buffer_info()[0]
        self._found.is_valid = self._is_valid.buffer_info()[0]


def _mask_of_row(masks: Masks, num_rows: int) -> array[int]:
    """The number of each row's mask, -1 for none."""
    of_row = array("q", [-1]) * num_rows
    for number, row in enumerate(range(masks.num_rows) if masks.rows is None else masks.rows.tolist()):
        of_row[row] = number
    return of_row
