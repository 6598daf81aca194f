"""Rows that are made from columns when they are asked for.

What a row is, and how it is made, is told by who has the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

Row = TypeVar("Row")

_ROWS_AT_ONCE = 1024


class Rows(Sequence[Row]):
    """Rows that are made from columns when they are asked for, so that a million of them cost what is in use."""

    def __init__(self, count: int, make: Callable[[int, int], list[Row]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return (
                self._make(start, stop) if step == 1 and start < stop else [self[i] for i in range(start, stop, step)]
            )
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(index)
        return self._make(position, position + 1)[0]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, self._count, _ROWS_AT_ONCE):
            yield from self._make(start, min(start + _ROWS_AT_ONCE, self._count))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == yours for mine, yours in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]
