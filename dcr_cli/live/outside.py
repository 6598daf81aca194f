"""What a module keeps outside its parameters and buffers: seeing that it has changed, and putting it back; and seeing
that it was made of them.

Whoever patches a module where it lies leaves this as it was. How it is reached is reach.py's matter. What native code
has made of weights, behind a handle, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch

from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.encoding import uint_dtype
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.addresses import mixed
from dcr_cli.live.bits import Bits, Elements, bits_of
from dcr_cli.live.reach import Container, reach

# Fewer elements, or fewer different ones among the first of them, may be the same in two tensors for no reason.
_FEW_ELEMENTS, _FEW_VALUES, _FIRST = 64, 16, 4096
# What is packed may be padded up to so many times its size.
_MOST_PADDED = 2
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
        return np.array_equal(self.bits.read(0, self.size), self.copy)


class Kept(NamedTuple):
    """A tensor outside the parameters and buffers of a module: where it is, and what it looked at."""

    where: str
    tensor: Any
    data: Any
    span: Span
    pieces: tuple[Piece, ...]


class Outside:
    """What a module reaches outside its parameters and buffers, which lie at `known`, as it is when this is made."""

    def __init__(self, module: Any, known: Known) -> None:
        self._module = module
        self._known = known
        self._containers: list[tuple[Container, Any]] = []
        self._numbers: dict[str, float] = {}
        self._tensors: list[Kept] = []
        for where, what in reach(module):
            if isinstance(what, float):
                self._numbers[where] = what
            elif isinstance(what, torch.Tensor):
                self._tensors.extend(_kept(where, what, known))
            else:
                self._containers.append((what, _copy(what)))

    def now(self) -> Outside:
        """The same, as it is now."""
        return Outside(self._module, self._known)

    def changed(self) -> set[str]:
        """Where there are other tensors or floating numbers now, or with other bits."""
        now = self.now()
        spans = {each.span: each for each in now._tensors}
        places = {each.where: each for each in now._tensors}
        found = set()
        for each in self._tensors:
            same = spans.pop(each.span, None)
            if same is None:
                same = places.get(each.where)
                if same is not None:
                    spans.pop(same.span, None)
            if same is None or not _is_equal(each, same):
                found.add(each.where)
        found.update(each.where for each in spans.values())
        numbers = now._numbers
        found.update(where for where, value in self._numbers.items() if repr(numbers.get(where, value)) != repr(value))
        return found

    def put_back(self) -> None:
        """Give all of it what it had."""
        for container, copy in self._containers:
            _refill(container, copy)
        for each in self._tensors:
            if not is_same_place(each.tensor, each.data):
                each.tensor.data = each.data
            for piece in each.pieces:
                if not piece.is_as_it_was():
                    for first in range(0, piece.size, _AT_ONCE):
                        piece.bits.write(first, piece.copy[first : first + _AT_ONCE])


def check_nothing_packed(module: Any, tensors: Sequence[tuple[str, Any]]) -> None:
    """Raise UnsupportedError if a module reaches, outside its parameters and buffers, which are `tensors`, one that has
    the elements of one of these, in another order or padded with zeros: as engines pack weights once they are loaded.
    """
    sums: dict[str, int] = {}
    for where, tensor in outside(module, known_of(tensor for _, tensor in tensors)):
        own: dict[int, int] = {}
        for name, other in tensors:
            width = other.element_size()
            if not _is_as_large(tensor, other) or not _has_many(other):
                continue
            if width not in own:
                own[width] = _sum_of(tensor, width)
            if name not in sums:
                sums[name] = _sum_of(other, width)
            if own[width] == sums[name]:
                facts = f"keeps {shown(where)} outside its parameters, which has the elements of tensor {shown(name)}"
                hint = "a patch would leave it as it was: use dcr pull --engine"
                raise UnsupportedError(f"module {type(module).__name__}", facts, hint=hint)


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


def _kept(where: str, tensor: Any, known: Known) -> Iterator[Kept]:
    span = span_of(tensor)
    if span is not None and (ranges := _unknown(span, known)):
        storage = tensor.untyped_storage()
        pieces = []
        for begin, end in ranges:
            bits = bits_of(storage, begin, end - begin, 1)
            pieces.append(Piece(bits, end - begin, bits.read(0, end - begin)))
        yield Kept(where, tensor, tensor.data, span, tuple(pieces))


def _is_equal(one: Kept, other: Kept) -> bool:
    """Whether two tensors had the same form and bits."""
    if (one.data.dtype, one.data.shape, len(one.pieces)) != (other.data.dtype, other.data.shape, len(other.pieces)):
        return False
    pairs = zip(one.pieces, other.pieces, strict=True)
    return all(np.array_equal(piece.copy, same.copy) for piece, same in pairs)


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


def _copy(container: Container) -> Any:
    if isinstance(container, CellType):
        try:
            return [container.cell_contents]
        except ValueError:
            return []
    return dict(container.items()) if isinstance(container, dict) else list(container)


def _refill(container: Container, copy: Any) -> None:
    """Put back what a container had, unless it has it."""
    if _identities(_copy(container)) == _identities(copy):
        return
    if isinstance(container, dict | set):
        container.clear()
        container.update(copy)
    elif isinstance(container, list):
        container[:] = copy
    elif copy:
        container.cell_contents = copy[0]
    else:
        del container.cell_contents


def _identities(copy: Any) -> list[Any]:
    if isinstance(copy, dict):
        return [(key, id(value)) for key, value in copy.items()]
    return [id(value) for value in copy]


def _is_as_large(tensor: Any, other: Any) -> bool:
    """Whether a tensor could have all elements of another one, packed."""
    size, wanted = (each.numel() * each.element_size() for each in (tensor, other))
    is_size = wanted <= size <= _MOST_PADDED * wanted and size % other.element_size() == 0
    return is_size and other.numel() >= _FEW_ELEMENTS and span_of(other) is not None


def _has_many(tensor: Any) -> bool:
    """Whether a tensor has enough different elements to be told from others by them."""
    return len(np.unique(_elements(tensor.reshape(-1)[:_FIRST], tensor.element_size()))) > _FEW_VALUES


def _sum_of(tensor: Any, width: int) -> int:
    """What tells all elements of a tensor that are not zero, in whatever order they are."""
    elements = _elements(tensor, width).astype(np.uint64)
    return int(mixed(elements[elements != 0]).sum(dtype=np.uint64))


def _elements(tensor: Any, width: int) -> Elements:
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    elements: Elements = data.view(uint_dtype(width))
    return elements
