"""Boxes for tests: any of them, and which elements they pair, one by one."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from dcr_cli.layout.box import Box, row_strides


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Boxes of slices with steps, whose local axes lie in any order, with gaps."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    axes, offset = [], 0
    for count, stride in zip(shape, row_strides(shape), strict=True):
        step = draw(st.sampled_from([1, 1, 2]))
        start = draw(st.integers(0, count - 1))
        taken = draw(st.integers(1, (count - 1 - start) // step + 1))
        axes.append((taken, stride * step))
        offset += start * stride
    order = draw(st.permutations(range(len(axes))))
    local = [0] * len(axes)
    reach = 1
    for number in order:
        local[number] = reach * draw(st.sampled_from([1, 1, 2]))
        reach = local[number] * axes[number][0]
    made = [(count, stride, step) for (count, stride), step in zip(axes, local, strict=True)]
    return Box.make(made, offset, draw(st.integers(0, 5)))


def places(box: Box) -> dict[int, int]:
    """Every element of the canonical tensor that is in the box, and which one of the local tensor it is."""
    found = {}
    for digits in itertools.product(*[range(axis.steps) for axis in box.axes]):
        canonical = box.canonical + sum(d * axis.canonical for d, axis in zip(digits, box.axes, strict=True))
        found[canonical] = box.local + sum(d * axis.local for d, axis in zip(digits, box.axes, strict=True))
    return found
