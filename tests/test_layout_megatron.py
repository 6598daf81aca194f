"""Layouts of Megatron-Core's ranks: each mapping against local tensors that NumPy alone cuts out of dense ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.layout.coverage import find_owners
from dcr_cli.layout.megatron import mappings, views
from dcr_cli.layout.megatron.mappings import Part, Section

Array = NDArray[Any]
Cut = Callable[[list[Array], int], list[Array]]
HIDDEN, DIM = 3, 2


def split_rows(array: Array, size: int) -> list[Array]:
    return np.split(array, size, axis=0)


def by_parts(arrays: Sequence[Array], size: int) -> list[Array]:
    """Every part divided by rows, and each rank's pieces one above the other."""
    return [np.concatenate(pieces) for pieces in zip(*(split_rows(array, size) for array in arrays), strict=True)]


def groups_of(array: Array, groups: int) -> Array:
    return array.reshape(groups, array.shape[0] // groups, *array.shape[1:])


def interleaved(arrays: Sequence[Array], groups: int) -> Array:
    """For each group its rows of all arrays, one after the other."""
    joined = np.concatenate([groups_of(array, groups) for array in arrays], axis=1)
    return joined.reshape(-1, *arrays[0].shape[1:])


def gate_apart(query: Array, groups: int, heads: int) -> Array:
    """For each group first the queries of its heads, then their gates."""
    pairs = query.reshape(groups, heads // groups, 2, DIM, *query.shape[1:])
    return np.moveaxis(pairs, 2, 1).reshape(query.shape)


def delta_net(arrays: Sequence[Array], size: int, key_heads: int, value_heads: int) -> list[Array]:
    both = [groups_of(array, key_heads) for array in arrays]
    each = value_heads // key_heads
    edges = ([DIM, 2 * DIM, 2 * DIM + each * DIM], [each])
    parts = [part for array, at in zip(both, edges, strict=True) for part in np.split(array, at, axis=1)]
    return by_parts([part.reshape(-1, HIDDEN) for part in parts], size)


def columns(arrays: list[Array], size: int) -> list[Array]:
    return np.split(arrays[0], size, axis=1)


def padded(arrays: list[Array], size: int, rows: int) -> list[Array]:
    full = np.zeros((rows, *arrays[0].shape[1:]), arrays[0].dtype)
    full[: len(arrays[0])] = arrays[0]
    return split_rows(full, size)


def alternating(stacked: Array, expert: int) -> list[Array]:
    return [stacked[expert].T[start::2] for start in (0, 1)]


def q_k_v(heads: int, groups: int, *rest: int) -> list[tuple[int, ...]]:
    return [(heads * DIM, *rest), (groups * DIM, *rest), (groups * DIM, *rest)]


def gqa(heads: int, groups: int) -> mappings.Mapping:
    return partial(mappings.qkv, query_heads=heads, groups=groups)


def gated(heads: int, groups: int) -> mappings.Mapping:
    return partial(mappings.qkv, query_heads=heads, groups=groups, is_gated=True)


NET = partial(mappings.delta_net, key_heads=4, value_heads=8, key_dim=DIM, value_dim=DIM)
GATE_UP = partial(views.gate_and_up, columns=HIDDEN)
DOWN = partial(views.of_expert, rows=HIDDEN)
DOWN_T = partial(views.of_expert_transposed, rows=HIDDEN)
ALTERNATING = partial(views.gate_and_up_alternating, columns=HIDDEN)

# The mapping, the shapes of the canonical tensors, how NumPy cuts them, and into how many parts.
CASES: dict[str, tuple[mappings.Mapping, list[tuple[int, ...]], Cut, Sequence[int]]] = {
    "replicated": (mappings.replicated, [(5, HIDDEN)], lambda a, t: [a[0]] * t, (1, 2, 4)),
    "replicated 0-d": (mappings.replicated, [()], lambda a, t: [a[0]] * t, (1, 2)),
    "column": (mappings.column, [(8, HIDDEN)], lambda a, t: split_rows(a[0], t), (1, 2, 4)),
    "column bias": (mappings.column, [(8,)], lambda a, t: split_rows(a[0], t), (1, 2, 4)),
    "row": (mappings.row, [(5, 8)], columns, (1, 2, 4)),
    "row bias": (mappings.row, [(8,)], lambda a, t: [a[0]] * t, (1, 2, 4)),
    "gate and up": (mappings.column, [(8, HIDDEN)] * 2, by_parts, (1, 2, 4)),
    "gate and up biases": (mappings.column, [(8,)] * 2, by_parts, (1, 2, 4)),
    "qkv": (gqa(8, 4), q_k_v(8, 4, HIDDEN), lambda a, t: split_rows(interleaved(a, 4), t), (1, 2, 4)),
    "qkv of one head a group": (
        gqa(4, 4),
        q_k_v(4, 4, HIDDEN),
        lambda a, t: split_rows(interleaved(a, 4), t),
        (1, 2, 4),
    ),
    "qkv bias": (gqa(8, 4), q_k_v(8, 4), lambda a, t: split_rows(interleaved(a, 4), t), (1, 2, 4)),
    "qkv, fewer groups than ranks": (
        gqa(8, 2),
        q_k_v(8, 2, HIDDEN),
        lambda a, t: split_rows(interleaved(a, 2), t),
        (4, 6),
    ),
    "qkv, one group": (gqa(6, 1), q_k_v(6, 1, HIDDEN), lambda a, t: split_rows(interleaved(a, 1), t), (1, 2, 4, 16)),
    "qkv with gates": (
        gated(8, 4),
        [(32, HIDDEN), (8, HIDDEN), (8, HIDDEN)],
        lambda a, t: split_rows(interleaved([gate_apart(a[0], 4, 8), a[1], a[2]], 4), t),
        (1, 2, 4),
    ),
    "qkv with gates, fewer groups than ranks": (
        gated(8, 2),
        [(32, HIDDEN), (4, HIDDEN), (4, HIDDEN)],
        lambda a, t: split_rows(interleaved([gate_apart(a[0], 2, 8), a[1], a[2]], 2), t),
        (1, 2, 4, 8),
    ),
    "qkv concatenated": (
        views.seen(gqa(8, 4), views.rows_of([16, 8, 8])),
        [(32, HIDDEN)],
        lambda a, t: split_rows(interleaved(np.split(a[0], [16, 24]), 4), t),
        (1, 2, 4, 8),
    ),
    "norms of heads": (
        partial(mappings.by_heads, count=2),
        [(2 * DIM,)],
        lambda a, t: [each for each in split_rows(a[0], min(t, 2)) for _ in range(max(1, t // 2))],
        (1, 2, 4),
    ),
    "mamba projection": (
        mappings.mamba_projection(heads=Section(4, 4), groups=Section(4, 2)),
        [(52, HIDDEN)],
        lambda a, t: by_parts(np.split(a[0], [16, 32, 40, 48]), t),
        (1, 2, 4),
    ),
    "mamba convolution": (
        mappings.mamba_convolution(heads=Section(4, 4), groups=Section(4, 2)),
        [(32, 1, 4)],
        lambda a, t: by_parts(np.split(a[0], [16, 24]), t),
        (1, 2, 4),
    ),
    "delta net convolution": (
        mappings.delta_net_convolution(keys=Section(4, 2), values=Section(8, 2)),
        [(32, 1, 4)],
        lambda a, t: by_parts(np.split(a[0], [8, 16]), t),
        (1, 2, 4),
    ),
    "delta net projection": (NET, [(48, HIDDEN), (16, HIDDEN)], lambda a, t: delta_net(a, t, 4, 8), (1, 2, 4)),
    "padded vocabulary": (
        partial(mappings.vocabulary, rows=16),
        [(9, HIDDEN)],
        lambda a, t: padded(a, t, 16),
        (1, 2, 4),
    ),
    "vocabulary": (partial(mappings.vocabulary, rows=8), [(8, HIDDEN)], lambda a, t: padded(a, t, 8), (1, 2, 4)),
    "expert of a stack": (
        views.seen(mappings.row, DOWN, 1),
        [(3, HIDDEN, 8)],
        lambda a, t: columns([a[0][1]], t),
        (1, 2, 4),
    ),
    "bias of a stack": (views.seen(mappings.row, DOWN, 2), [(3, HIDDEN)], lambda a, t: [a[0][2]] * t, (1, 2)),
    "transposed expert of a stack": (
        views.seen(mappings.row, DOWN_T, 2),
        [(3, 8, HIDDEN)],
        lambda a, t: columns([a[0][2].T], t),
        (1, 2, 4),
    ),
    "gated expert of a stack": (
        views.seen(mappings.column, GATE_UP, 1),
        [(3, 16, HIDDEN)],
        lambda a, t: by_parts(np.split(a[0][1], 2), t),
        (1, 2, 4),
    ),
    "alternating expert of a stack": (
        views.seen(mappings.undivided, ALTERNATING, 1),
        [(3, HIDDEN, 16)],
        lambda a, t: by_parts(alternating(a[0], 1), t),
        (1,),
    ),
    "alternating biases of a stack": (
        views.seen(mappings.undivided, views.biases_alternating, 1),
        [(3, 16)],
        lambda a, t: by_parts([a[0][1][::2], a[0][1][1::2]], t),
        (1,),
    ),
}


def numbered(shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Tensors in which every element is another number, and none is 0."""
    starts = np.cumsum([1, *(prod(shape) for shape in shapes)])
    return [np.arange(prod(shape)).reshape(shape) + start for shape, start in zip(shapes, starts, strict=False)]


def placed(part: Part, arrays: Sequence[Array]) -> Array:
    """The local tensor that boxes make of dense ones; what is in no box is 0."""
    local = np.zeros(prod(part.shape), np.int64)
    for number, box in part.boxes:
        view = box.local_view(local, 0, box.whole)
        assert not view.any()
        view[...] = box.canonical_view(arrays[number].reshape(-1), 0, box.whole)
    return local.reshape(part.shape)


@pytest.mark.parametrize("name", CASES)
def test_a_mapping_is_what_numpy_cuts(name: str) -> None:
    mapping, shapes, cut, sizes = CASES[name]
    arrays = numbered(shapes)
    for size in sizes:
        for rank, expected in enumerate(cut(arrays, size)):
            found = placed(mapping(shapes, rank, size), arrays)
            np.testing.assert_array_equal(found, expected, f"rank {rank} of {size}")


@pytest.mark.parametrize("name", [name for name in CASES if "of a stack" not in name])
def test_ranks_own_every_element_once(name: str) -> None:
    mapping, shapes, _, sizes = CASES[name]
    for size in sizes:
        boxes = [mapping(shapes, rank, size).boxes for rank in range(size)]
        for number, shape in enumerate(shapes):
            of_one = [box for each in boxes for of, box in each if of == number]
            find_owners(prod(shape), of_one)


def test_boxes_are_few() -> None:
    for name, (mapping, shapes, _, sizes) in CASES.items():
        if "fewer groups" not in name:
            assert max(len(mapping(shapes, rank, size).boxes) for size in sizes for rank in range(size)) <= 6
