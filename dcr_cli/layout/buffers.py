"""Large buffers that are used again, once nobody looks at them any more.

New memory has to be cleared page by page by the system, which takes longer than a tensor takes to be read into it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

# So many that are not in use are kept; of that size, unless more was asked for.
_SPARE = 2


class Buffers:
    """Buffers of at least `least_bytes`. Its methods may be called from several threads."""

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._spare: deque[NDArray[np.uint8]] = deque(maxlen=_SPARE)

    def take(self, count: int, dtype: str) -> NDArray[Any]:
        """An array of `count` elements, of any values. Its memory is given to others when neither it nor a view of it
        is left."""
        size = count * np.dtype(dtype).itemsize
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < size:
            buffer = np.empty(max(size, self._least_bytes), np.uint8)
        return np.asarray(_Loan(self._spare, buffer)).view(dtype)[:count]


class _Loan:
    """What arrays on a buffer hold on to. When it is let go, the buffer is spare."""

    def __init__(self, spare: deque[NDArray[np.uint8]], buffer: NDArray[np.uint8]) -> None:
        self._spare = spare
        self._buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._spare.append(self._buffer)
