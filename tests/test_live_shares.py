"""Digests of what ranks hold, and what they are together."""

from __future__ import annotations

import numpy as np
import pytest

from dcr_cli.checkpoint.digest import content_digest, digest_bytes, tensor_digest
from dcr_cli.errors import DamagedError
from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.layout import Form
from dcr_cli.live.shares import Part, Shares, content_of

WHOLE = np.arange(24, dtype="<u2") * 2749
FORMS = {"empty": Form("BF16", (0,)), "w": Form("BF16", (4, 6))}


def share(box: Box, elements: np.ndarray[tuple[int], np.dtype[np.uint16]] = WHOLE) -> Shares:
    """What a rank gives that holds a box of the tensor."""
    held = np.zeros_like(elements)
    for part in box.rectangles(0, box.elements):
        box.canonical_view(held, 0, part)[...] = box.canonical_view(elements, 0, part)
    return Shares(FORMS, {Part("w", box.footprint): digest_bytes(tensor_digest(held))})


def expected() -> bytes:
    digests = {"empty": bytes(16), "w": digest_bytes(tensor_digest(WHOLE))}
    return content_digest((name, *FORMS[name], digests[name]) for name in sorted(FORMS))


def column(first: int, count: int) -> Box:
    return slice_box((4, 6), (0, first), (4, count))


def test_parts_add_up_and_replicas_count_once() -> None:
    left, right = share(column(0, 2)), share(column(2, 4))
    assert content_of([left, right]) == content_of([right, left, right]) == expected()
    assert content_of([share(whole_box(24)), left]) == expected()
    assert left.tensors() == {"empty": bytes(16)}


def test_what_nobody_holds_and_what_overlaps() -> None:
    for shares in ([share(column(0, 2))], [share(column(0, 4)), share(column(3, 3))]):
        with pytest.raises(DamagedError, match="no ranks hold all elements of tensors w, or parts of them overlap"):
            content_of(shares)
    with pytest.raises(DamagedError, match="are of different tensors"):
        content_of([share(whole_box(24)), Shares({}, {})])


def test_ranks_that_hold_other_bits() -> None:
    other = WHOLE.copy()
    other[3] += 1
    with pytest.raises(DamagedError, match="two places that should hold the same bits differ"):
        content_of([share(whole_box(24)), share(whole_box(24), other)])
    digest = digest_bytes(tensor_digest(WHOLE))
    one, two = Shares(FORMS, {}, {"w": digest}), Shares(FORMS, {}, {"w": bytes(16)})
    assert content_of([one, one]) == expected()
    with pytest.raises(DamagedError, match="two ranks were given different bits of it"):
        content_of([one, two])
