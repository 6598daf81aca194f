"""What a module keeps outside its parameters and buffers: seeing that it has changed, and putting it back.

Whoever patches a module where it lies leaves this as it was. How it is reached is reach.py's matter, what containers
had contents.py's, and whether it was made of weights packed.py's. Arrays of objects are not looked into, and what
native code has made of weights, behind a handle, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dcr_cli.live.bits import Bits, Elements, bits_of
from dcr_cli.live.contents import Contents, own_containers
from dcr_cli.live.reach import NUMBERS, reach

_AT_ONCE = 1 << 22


class Span(NamedTuple):
    """The bytes of a storage that a tensor lies in."""

    device: str
    storage: int
    begin: int
    end: int


# The bytes that parameters and buffers have, by their storages, in order.
Known = Mapping[tuple[str, int], Sequence[Span]]


class Piece(NamedTuple):
    """Bytes of a tensor that are no parameter's, and what they were."""

    bits: Bits
    size: int
    copy: Elements

    def is_as_it_was(self) -> bool:
        return self.is_same(self.bits, self.size)

    def is_same(self, bits: Bits, size: int) -> bool:
        """Whether other bytes are what these were."""
        parts = range(0, size, _AT_ONCE)
        return size == self.size and all(
            np.array_equal(bits.read(first, min(_AT_ONCE, size - first)), self.copy[first : first + _AT_ONCE])
            for first in parts
        )


class Seen(NamedTuple):
    """A tensor outside the parameters and buffers of a module: where it is, what it looks at, and the bytes of its
    storage that are no parameter's."""

    where: str
    tensor: Any
    span: Span
    ranges: Sequence[tuple[int, int]]

    def bits(self) -> Iterator[tuple[Bits, int]]:
        storage = self.tensor.untyped_storage()
        for begin, end in self.ranges:
            yield bits_of(storage, begin, end - begin, 1), end - begin


class Kept(NamedTuple):
    """A tensor outside the parameters and buffers of a module: where it is, and what it looked at."""

    where: str
    tensor: Any
    data: Any
    span: Span
    pieces: tuple[Piece, ...]

    def is_same(self, other: Seen) -> bool:
        """Whether another one has the form and the bits that this one had."""
        tensor = other.tensor
        if (tensor.dtype, tensor.shape, len(other.ranges)) != (self.data.dtype, self.data.shape, len(self.pieces)):
            return False
        pairs = zip(self.pieces, other.bits(), strict=True)
        return all(piece.is_same(bits, size) for piece, (bits, size) in pairs)


class KeptArray(NamedTuple):
    """An array, and what it had."""

    array: Any
    copy: Any

    def is_same(self, other: Any) -> bool:
        """Whether another one has the form and the bits that this one had."""
        form, own = (other.dtype, other.shape), (self.copy.dtype, self.copy.shape)
        return form == own and np.array_equal(_bytes_of(other), _bytes_of(self.copy))


class Outside:
    """What a module reaches outside its parameters and buffers, which lie at `known`, as it is when this is made."""

    def __init__(self, module: Any, known: Known) -> None:
        self._module = module
        self._known = known
        self._containers: list[Contents] = []
        self._numbers: dict[str, Any] = {}
        self._tensors: list[Kept] = []
        self._arrays: dict[str, KeptArray] = {}
        own = own_containers(module)
        for where, what in reach(module):
            if isinstance(what, NUMBERS):
                self._numbers[where] = _told(what)
            elif isinstance(what, torch.Tensor):
                self._tensors.extend(_kept(each) for each in _seen(where, what, known))
            elif isinstance(what, np.ndarray):
                if _is_unknown(what, known):
                    self._arrays[where] = KeptArray(what, what.copy())
            else:
                self._containers.append(Contents(what, is_own=id(what) in own))

    def now(self) -> Outside:
        """The same, as it is now."""
        return Outside(self._module, self._known)

    def take_numbers(self) -> None:
        """From now on, see whether numbers are other ones than now: a flag that every load sets is made of no
        weights."""
        self._numbers = {where: _told(what) for where, what in reach(self._module) if isinstance(what, NUMBERS)}

    def changed(self, *, with_numbers: bool = True) -> set[str]:
        """Where there are other tensors, arrays or numbers now, or with other bits."""
        seen: list[Seen] = []
        arrays: dict[str, Any] = {}
        found = set()
        for where, what in reach(self._module):
            if isinstance(what, NUMBERS):
                told = _told(what)
                if with_numbers and self._numbers.get(where, told) != told:
                    found.add(where)
            elif isinstance(what, torch.Tensor):
                seen.extend(_seen(where, what, self._known))
            elif isinstance(what, np.ndarray) and _is_unknown(what, self._known):
                arrays[where] = what
        spans = {each.span: each for each in seen}
        places = {each.where: each for each in seen}
        for each in self._tensors:
            same = spans.pop(each.span, None)
            if same is None:
                same = places.get(each.where)
                if same is not None:
                    spans.pop(same.span, None)
            if same is None or not each.is_same(same):
                found.add(each.where)
        found.update(each.where for each in spans.values())
        found.update(self._arrays.keys() ^ arrays.keys())
        both = self._arrays.keys() & arrays.keys()
        found.update(where for where in both if not self._arrays[where].is_same(arrays[where]))
        return found

    def put_back(self) -> None:
        """Give all of it what it had."""
        for container in self._containers:
            container.put_back()
        for each in self._tensors:
            if not is_same_place(each.tensor, each.data):
                each.tensor.data = each.data
            for piece in each.pieces:
                if not piece.is_as_it_was():
                    for first in range(0, piece.size, _AT_ONCE):
                        piece.bits.write(first, piece.copy[first : first + _AT_ONCE])
        for array, copy in self._arrays.values():
            if not np.array_equal(_bytes_of(array), _bytes_of(copy)):
                array[...] = copy


def outside(module: Any, known: Known) -> Iterator[tuple[str, Any]]:
    """The tensors that a module reaches some bytes of which lie nowhere in `known`, by where they are."""
    for where, what in reach(module):
        if isinstance(what, torch.Tensor) and (span := span_of(what)) is not None and _unknown(span, known):
            yield where, what


def known_of(tensors: Iterable[Any]) -> Known:
    """Where tensors lie."""
    known: dict[tuple[str, int], list[Span]] = {}
    for span in sorted({span for tensor in tensors if (span := span_of(tensor)) is not None}):
        known.setdefault(span[:2], []).append(span)
    return known


def span_of(tensor: Any) -> Span | None:
    """Where a tensor lies; None if it has no elements, or is not made of plain ones in a storage."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "full_tensor"):
        return None
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    end = begin + (1 + sum((count - 1) * stride for count, stride in steps)) * size
    return Span(str(tensor.device), tensor.untyped_storage().data_ptr(), begin, end)


def is_same_place(tensor: Any, data: Any) -> bool:
    """Whether a tensor has the elements of another one."""
    return place_of(tensor) == place_of(data)


def place_of(tensor: Any) -> tuple[Any, ...]:
    """What tells where a tensor's elements lie, and how."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_meta


def _seen(where: str, tensor: Any, known: Known) -> Iterator[Seen]:
    span = span_of(tensor)
    if span is not None and (ranges := _unknown(span, known)):
        yield Seen(where, tensor, span, ranges)


def _kept(seen: Seen) -> Kept:
    pieces = tuple(Piece(bits, size, bits.read(0, size)) for bits, size in seen.bits())
    return Kept(seen.where, seen.tensor, seen.tensor.data, seen.span, pieces)


def _is_unknown(array: Any, known: Known) -> bool:
    """Whether an array has elements of its own, and not those of parameters in the host's memory."""
    if not array.nbytes or array.dtype.hasobject:
        return False
    steps = [(count - 1) * stride for count, stride in zip(array.shape, array.strides, strict=True)]
    low = array.ctypes.data + sum(step for step in steps if step < 0)
    high = array.ctypes.data + sum(step for step in steps if step > 0) + array.itemsize
    return not any(
        device == "cpu" and storage + span.begin < high and low < storage + span.end
        for (device, storage), spans in known.items()
        for span in spans
    )


def _bytes_of(array: Any) -> Elements:
    data: Elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data


def _told(number: Any) -> Any:
    """What tells a number from all others of its kind, a zero from that of the other sign, and a NaN from none."""
    if isinstance(number, np.generic):
        return number.tobytes()
    return number.hex() if isinstance(number, float) else repr(number) if isinstance(number, complex) else number


def _unknown(span: Span, known: Known) -> list[tuple[int, int]]:
    """The bytes of a span that are in none of the others."""
    found, at = [], span.begin
    for other in known.get(span[:2], ()):
        if other.begin >= span.end:
            break
        if other.end > at:
            if other.begin > at:
                found.append((at, other.begin))
            at = other.end
    return [*found, (at, span.end)] if at < span.end else found
