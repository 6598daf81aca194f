"""Buffers that are used again, once nothing looks at them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.layout.buffers import Buffers


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_again_when_the_last_view_is_gone() -> None:
    buffers = Buffers(1000)
    first = buffers.take(10, "<u2")
    assert first.dtype == np.dtype("<u2") and len(first) == 10
    was, view = address(first), first[2:5].reshape(3, 1)
    del first
    assert address(buffers.take(10, "<u2")) != was
    del view
    gc.collect()
    assert address(buffers.take(500, "<u2")) == was


def test_more_than_a_spare_one_has_is_taken_anew() -> None:
    buffers = Buffers(16)
    buffers.take(16, "u1")
    large = buffers.take(1000, "u1")
    large[:] = 7
    assert len(large) == 1000


def test_few_are_spare() -> None:
    buffers = Buffers(100)
    taken = [buffers.take(1, "u1") for _ in range(5)]
    places = {address(each) for each in taken}
    del taken
    gc.collect()
    assert len(buffers._spare) == 2
    again = [buffers.take(1, "u1") for _ in range(5)]
    assert len(places & {address(each) for each in again[:2]}) == 2


def test_threads_never_share_one() -> None:
    buffers = Buffers(64)

    def use(number: int) -> bool:
        array = buffers.take(64, "u1")
        array[:] = number % 251
        return bool((array == number % 251).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(2000)))
