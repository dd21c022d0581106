"""The calls of a forward pass, noted once and made again for steps of any size: no Python runs between them, but where
ranks add up their shares.

Owns the list of calls, and the memory of what they hand on to each other. A pass over a few rows is computed while its
calls are noted. Each tensor that one of them returned is needed from the first call that names it to the last one;
those that are not needed at the same time share memory, so that it stays in the caches.

Knows the calls' arguments, but not what they compute. What is neither a call of `Kernels` nor said to it
(`Kernels.do_between`) is not noted: the caller compares a replay with the pass itself.

Invariant: nothing in the arguments of a call depends on the number of rows or on the step, but what `baton_replay`
writes into them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from ctypes import Structure, addressof, c_void_p
from dataclasses import dataclass

from torch import Tensor

from baton.engine.native.arguments import KINDS, BatonCall, BatonStep, BatonStore
from baton.engine.native.library import CallNotes, Kernels, huge_pages


@dataclass(slots=True)
class _Buffer:
    """A tensor of the noted pass: needed by the calls `first` to `last`, and then in the memory `place`."""

    address: int
    row_bytes: int
    first: int
    last: int
    place: int = -1


@dataclass(slots=True)
class _Place:
    """Memory for one buffer at a time. `free_after`: the last call that needs what is in it."""

    row_bytes: int
    free_after: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place behind the first `num_before` calls where Python runs: `act` on `tensor`, or what is told of layers."""

    num_before: int
    act: Callable[[Tensor], object] | None = None
    tensor: Tensor | None = None


class Recording:
    """Calls for steps of at most `max_rows` rows. One replay at a time."""

    def __init__(self, kernels: Kernels, notes: CallNotes, output: Tensor, max_rows: int) -> None:
        """`notes` of a pass over as many rows as its result `output` has. Raises `LookupError` when that is not the
        result of a call."""
        num_rows = output.shape[0]
        self._kernels = kernels
        self._arguments = notes.calls
        self._calls = (BatonCall * len(notes.calls))(
            *(BatonCall(addressof(call), KINDS[type(call)]) for call in notes.calls)
        )
        buffers = _needed_buffers(notes, output, num_rows)
        places = _share_places(buffers)
        self._memory = [huge_pages(max_rows * place.row_bytes) for place in places]
        self.num_bytes = sum(map(len, self._memory))
        self._move(buffers)
        self.output = self._moved(buffers, output, num_rows, max_rows)
        """What the pass has returned: of a replay, its first rows."""
        self._cuts = [_Cut(number + 1) for number, call in enumerate(notes.calls) if isinstance(call, BatonStore)]
        for num_before, tensor, act in notes.between:
            self._cuts.append(_Cut(num_before, act, self._moved(buffers, tensor, num_rows, max_rows)))
        self._cuts.sort(key=lambda cut: cut.num_before)
        self._has_acts = bool(notes.between)

    def replay(self, step: BatonStep, num_rows: int, layer_stored: Callable[[], None] | None = None) -> None:
        """Make all calls for the first `num_rows` rows. `layer_stored` is called after each one that stores KV."""
        if layer_stored is None and not self._has_acts:
            self._kernels.replay(self._calls, range(len(self._calls)), step, num_rows)
            return
        num_made = 0
        for cut in self._cuts:
            if cut.tensor is None and layer_stored is None:
                continue
            self._kernels.replay(self._calls, range(num_made, cut.num_before), step, num_rows)
            num_made = cut.num_before
            if cut.tensor is not None and cut.act is not None:
                cut.act(cut.tensor[:num_rows])
            elif layer_stored is not None:
                layer_stored()
        self._kernels.replay(self._calls, range(num_made, len(self._calls)), step, num_rows)

    def _moved(self, buffers: list[_Buffer], tensor: Tensor, num_rows: int, max_rows: int) -> Tensor:
        """A tensor of the noted pass as it lies in the memory of this recording. Raises `LookupError`."""
        held = self._memory[_buffer_of(buffers, tensor).place]
        return held[: tensor.nbytes // num_rows * max_rows].view(tensor.dtype).view(max_rows, *tensor.shape[1:])

    def _move(self, buffers: list[_Buffer]) -> None:
        """Let the calls compute in the memory of this recording."""
        for call in self._arguments:
            for name, address in _addresses(call):
                buffer = _buffer_at(buffers, address)
                if buffer is not None:
                    setattr(call, name, self._memory[buffer.place].data_ptr() + address - buffer.address)


def _needed_buffers(notes: CallNotes, output: Tensor, num_rows: int) -> list[_Buffer]:
    """The buffers that calls name, by their addresses."""
    buffers = [_Buffer(each.data_ptr(), each.nbytes // num_rows, len(notes.calls), -1) for each in notes.buffers]
    buffers.sort(key=lambda buffer: buffer.address)
    for number, call in enumerate(notes.calls):
        for _, address in _addresses(call):
            buffer = _buffer_at(buffers, address)
            if buffer is not None:
                buffer.first, buffer.last = min(buffer.first, number), number
    _buffer_of(buffers, output).last = len(notes.calls)
    return [buffer for buffer in buffers if buffer.last >= 0]


def _share_places(buffers: list[_Buffer]) -> list[_Place]:
    """Give each buffer a place that nobody else needs as long as it does: the one whose size is nearest."""
    places: list[_Place] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        free = [number for number, place in enumerate(places) if place.free_after < buffer.first]
        if free:
            buffer.place = min(free, key=lambda number: abs(places[number].row_bytes - buffer.row_bytes))
        else:
            buffer.place = len(places)
            places.append(_Place(0, 0))
        place = places[buffer.place]
        place.row_bytes, place.free_after = max(place.row_bytes, buffer.row_bytes), buffer.last
    return places


def _addresses(call: Structure) -> Iterator[tuple[str, int]]:
    """The fields of a call that are addresses."""
    for name, kind, *_ in call._fields_:
        if kind is c_void_p and (address := getattr(call, name)) is not None:
            yield name, address


def _buffer_of(buffers: list[_Buffer], output: Tensor) -> _Buffer:
    buffer = _buffer_at(buffers, output.data_ptr())
    if buffer is None:
        raise LookupError("its result does not come from a call of the kernels")
    return buffer


def _buffer_at(buffers: list[_Buffer], address: int) -> _Buffer | None:
    """The buffer whose first row holds `address`."""
    place = bisect_right(buffers, address, key=lambda buffer: buffer.address) - 1
    if place >= 0 and address < buffers[place].address + buffers[place].row_bytes:
        return buffers[place]
    return None
