"""What a rank holds of canonical tensors, for each way in which Megatron-Core divides them. Pure.

A mapping takes the shapes of the canonical tensors that a local one is made of, the number of the rank and how many
ranks divide them, and says the shape of the local tensor and its boxes. ValueError where a tensor cannot be divided so.
Which tensor is divided in which way is families.py's to say, tensors that lie within others are views.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from dcr_cli.layout.box import Box, slice_box, whole_box

Shape = tuple[int, ...]


class Part(NamedTuple):
    """What a rank holds: the shape of its local tensor, and its boxes, each of the canonical tensor of that number."""

    shape: Shape
    boxes: tuple[tuple[int, Box], ...]


Mapping = Callable[[Sequence[Shape], int, int], Part]


def replicated(shapes: Sequence[Shape], rank: int, size: int) -> Part:
    """Every rank holds all of it."""
    (shape,) = shapes
    return Part(shape, ((0, whole_box(prod(shape))),) if prod(shape) else ())


def column(shapes: Sequence[Shape], rank: int, size: int) -> Part:
    """Column parallel, a weight or a bias: each rank holds some rows. Of several tensors, such as gate and up, each
    rank holds its rows of the one above its rows of the other."""
    pieces = [(number, 0, shape[0]) for number, shape in enumerate(shapes)]
    return _divided(pieces, _width(shapes), _rest(shapes), rank, size)


class Section(NamedTuple):
    """Rows of a tensor that are those of so many heads or groups, which no rank has a part of."""

    units: int
    rows: int


def sections(shapes: Sequence[Shape], rank: int, size: int, *, of: Sequence[Section]) -> Part:
    """Column parallel within sections: each rank holds a part of every one of them."""
    (shape,) = shapes
    counts = [section.units * section.rows for section in of]
    if sum(counts) != shape[0]:
        raise ValueError(f"has {shape[0]} rows, not the {sum(counts)} of its sections {counts}")
    pieces, first = [], 0
    for section, count in zip(of, counts, strict=True):
        _share(section.units, size, "heads or groups")
        pieces.append((0, first, count))
        first += count
    return _divided(pieces, _width(shapes), _rest(shapes), rank, size)


def row(shapes: Sequence[Shape], rank: int, size: int) -> Part:
    """Row parallel: each rank holds some columns of a weight, and all of a bias."""
    (shape,) = shapes
    if len(shape) == 1:
        return replicated(shapes, rank, size)
    columns = _share(shape[1], size, "columns")
    local = (shape[0], columns, *shape[2:])
    if not prod(local):
        return Part(local, ())
    starts = (0, rank * columns, *(0 for _ in shape[2:]))
    return Part(local, ((0, slice_box(shape, starts, local)),))


def vocabulary(shapes: Sequence[Shape], rank: int, size: int, *, rows: int) -> Part:
    """Column parallel after rows have been added until there are `rows`; the added ones are in no box."""
    (shape,) = shapes
    if rows < shape[0]:
        raise ValueError(f"has {shape[0]} rows, more than the {rows} of the padded vocabulary")
    count, width = _share(rows, size, "rows of the padded vocabulary"), _width(shapes)
    taken = max(0, min(count, shape[0] - rank * count))
    boxes = ((0, _rows_box(taken, width, rank * count, 0)),) if taken * width else ()
    return Part((count, *shape[1:]), boxes)


def undivided(shapes: Sequence[Shape], rank: int, size: int) -> Part:
    """Column parallel, where it is not known how more than one rank would divide it."""
    if size != 1:
        raise ValueError(f"is not known to be divided by {size} ranks, only undivided")
    return column(shapes, rank, size)


def by_heads(shapes: Sequence[Shape], rank: int, size: int, *, count: int) -> Part:
    """Column parallel by heads; where there are fewer heads than ranks, neighbours hold the same head."""
    (shape,) = shapes
    if shape[0] % count:
        raise ValueError(f"has {shape[0]} rows, which {count} heads do not divide")
    if count >= size:
        return column(shapes, rank, size)
    return column(shapes, rank // _share(size, count, "tensor parallel ranks", "heads"), count)


class Run(NamedTuple):
    """Some rows of canonical tensor `tensor` that lie in a group one after the other: from row `first` of group 0 on,
    `blocks` blocks of `rows` rows, each `step` rows after the one before. Those of the next group are `group` rows
    further."""

    tensor: int
    first: int
    rows: int
    group: int
    blocks: int = 1
    step: int = 0


def qkv(
    shapes: Sequence[Shape], rank: int, size: int, *, query_heads: int, groups: int, is_gated: bool = False
) -> Part:
    """Queries, keys and values: for each group its query heads, its key, its value.

    With `is_gated`, each query head is followed by its output gate in the canonical tensor; in the local one all gates
    of a group follow all its query heads. Where there are fewer groups than ranks, a group is divided between ranks by
    rows, as Megatron-Core does; no rank holds a key or a value twice.
    """
    query, key, value = shapes
    each = _share(query_heads, groups, "query heads", "groups")
    dim = _share(key[0], groups, "rows of keys", "groups")
    stride = 2 * dim if is_gated else dim
    if query[0] != query_heads * stride or value[0] != key[0]:
        facts = (
            f"{query[0]}, {key[0]} and {value[0]} rows are not those of {query_heads} query heads in {groups} groups"
        )
        raise ValueError(facts)
    if is_gated:
        queries = [Run(0, first, dim, each * stride, each, stride) for first in (0, dim)]
    else:
        queries = [Run(0, 0, each * dim, each * dim)]
    return _interleaved([*queries, Run(1, 0, dim, dim), Run(2, 0, dim, dim)], groups, shapes, rank, size)


def delta_net(
    shapes: Sequence[Shape], rank: int, size: int, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> Part:
    """The input projection of a gated delta net. For each key head, one canonical tensor has query, key, value and
    output gate, the other both scalars of each of its value heads. A rank holds all queries of its key heads, then all
    their keys, and so on."""
    each = _share(value_heads, key_heads, "value heads", "key heads")
    mine = _share(key_heads, size, "key heads")
    counts = ((key_dim, key_dim, each * value_dim, each * value_dim), (each, each))
    for shape, rows in zip(shapes, counts, strict=True):
        if shape[0] != key_heads * sum(rows):
            raise ValueError(f"has {shape[0]} rows, not the {sum(rows)} of each of {key_heads} key heads")
    width, at = _width(shapes), 0
    boxes = []
    for number, rows in enumerate(counts):
        first = rank * mine * sum(rows)
        for count in rows:
            axes = [(mine, sum(rows) * width, count * width), (count * width, 1, 1)]
            boxes.append((number, Box.make(axes, first * width, at * width)))
            first += count
            at += mine * count
    return Part((at, *_rest(shapes)), tuple(boxes))


def _interleaved(runs: Sequence[Run], groups: int, shapes: Sequence[Shape], rank: int, size: int) -> Part:
    """Column parallel, of what has for each group all its runs, one after the other."""
    width = _width(shapes)
    per_group = sum(run.blocks * run.rows for run in runs)
    count = _share(groups * per_group, size, "rows of all heads")
    local = (count, *_rest(shapes))
    if groups % size == 0:
        return Part(local, tuple(_whole_groups(runs, groups // size, rank * groups // size, width)))
    if size % groups:
        raise ValueError(f"{groups} groups of heads cannot be divided by {size} ranks")
    group, begin = divmod(rank * count, per_group)
    return Part(local, tuple(_within_group(runs, group, range(begin, begin + count), width)))


def _whole_groups(runs: Sequence[Run], mine: int, first_group: int, width: int) -> list[tuple[int, Box]]:
    per_group = sum(run.blocks * run.rows for run in runs)
    boxes, at = [], 0
    for run in runs:
        axes = [
            (mine, run.group * width, per_group * width),
            (run.blocks, run.step * width, run.rows * width),
            (run.rows * width, 1, 1),
        ]
        boxes.append((run.tensor, Box.make(axes, (run.first + first_group * run.group) * width, at * width)))
        at += run.blocks * run.rows
    return boxes


def _within_group(runs: Sequence[Run], group: int, rows: range, width: int) -> list[tuple[int, Box]]:
    """The rows of a group, numbered within it, that a rank holds."""
    boxes, at = [], 0
    for run in runs:
        for block in range(run.blocks):
            start, stop = max(at, rows.start), min(at + run.rows, rows.stop)
            if start < stop:
                first = run.first + group * run.group + block * run.step + start - at
                boxes.append((run.tensor, _rows_box(stop - start, width, first, start - rows.start)))
            at += run.rows
    return boxes


def _divided(pieces: Sequence[tuple[int, int, int]], width: int, rest: Shape, rank: int, size: int) -> Part:
    """A rank's share of each piece, which is some rows of a canonical tensor: (number, first, count)."""
    boxes, at = [], 0
    for number, first, rows in pieces:
        count = _share(rows, size, "rows")
        if count * width:
            boxes.append((number, _rows_box(count, width, first + rank * count, at)))
        at += count
    return Part((at, *rest), tuple(boxes))


def _rows_box(count: int, width: int, first: int, at: int) -> Box:
    """`count` rows of `width` elements, row `first` and those after it in the canonical tensor, `at` in the local."""
    return Box.make([(count * width, 1, 1)], first * width, at * width)


def _share(count: int, size: int, what: str, of: str = "ranks") -> int:
    share, left = divmod(count, size)
    if left:
        raise ValueError(f"{count} {what} cannot be divided by {size} {of}")
    return share


def _rest(shapes: Sequence[Shape]) -> Shape:
    """What follows the rows, the same in all tensors."""
    rests = {shape[1:] for shape in shapes}
    if len(rests) != 1:
        raise ValueError(f"shapes {[list(shape) for shape in shapes]} differ in more than their rows")
    return rests.pop()


def _width(shapes: Sequence[Shape]) -> int:
    return prod(_rest(shapes))


def mamba_projection(*, heads: Section, groups: Section) -> Mapping:
    """The input projection of a Mamba mixer: gate, input, B, C and time step."""
    return partial(sections, of=(heads, heads, groups, groups, Section(heads.units, 1)))


def mamba_convolution(*, heads: Section, groups: Section) -> Mapping:
    """The convolution of a Mamba mixer: input, B and C."""
    return partial(sections, of=(heads, groups, groups))


def delta_net_convolution(*, keys: Section, values: Section) -> Mapping:
    """The convolution of a gated delta net: queries, keys and values."""
    return partial(sections, of=(keys, keys, values))
