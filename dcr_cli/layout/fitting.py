"""Fits boxes to elements: from where each element of a local tensor lies in a canonical one to a short list of boxes.

Elements that follow each other at equal steps become one row, rows of one form that do so one box, and so on, until
nothing can be joined. What a list is of, and what its length may be, is its users' business. Pure.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.layout.box import Box, Indices

# A tensor that is a short list of boxes is never made of rows of so many different forms.
_MAX_FORMS = 4096
# Rows are joined with the next one, or with every second one, and so on: what lies in turns is told apart.
_PERIODS = range(1, 9)

Flags = NDArray[np.bool_]
# (count, canonical stride, local stride) of each axis, the innermost first.
RowForm = tuple[tuple[int, int, int], ...]


class TooIrregularError(ValueError):
    """The elements are not a short list of boxes."""


class _Rows(NamedTuple):
    """Sets of elements, each of them of one of `forms`, by where their first elements are; they ascend in `local`."""

    local: Indices
    canonical: Indices
    form: Indices
    forms: list[RowForm]


class Fitting:
    """Takes the elements of a local tensor in parts, in order, and fits boxes to all of them."""

    def __init__(self) -> None:
        self._parts: list[_Rows] = []
        self._forms: list[RowForm] = [()]
        self._known: dict[RowForm, int] = {(): 0}

    def add(self, local: Indices, canonical: Indices) -> None:
        """Add elements: number `local[i]` of the local tensor is number `canonical[i]` of the canonical one. `local`
        ascends, from what was added before on. TooIrregularError as soon as it is plain."""
        if not len(local):
            return
        rows = _join(_Rows(local, canonical, np.zeros(len(local), np.int64), [()]))
        numbers = np.array([self._number(form) for form in rows.forms], np.int64)
        self._parts.append(rows._replace(form=numbers[rows.form]))

    def boxes(self, limit: int) -> tuple[Box, ...]:
        """The boxes of all elements that were added, in the order of the local tensor. TooIrregularError if there are
        more than `limit`."""
        if not self._parts:
            return ()
        self._mend()
        rows = _Rows(
            np.concatenate([part.local for part in self._parts]),
            np.concatenate([part.canonical for part in self._parts]),
            np.concatenate([part.form for part in self._parts]),
            self._forms,
        )
        while True:
            joined = min((_join(rows, period) for period in _PERIODS), key=lambda joined: len(joined.local))
            if len(joined.local) == len(rows.local):
                break
            rows = joined
        if len(rows.local) > limit:
            raise TooIrregularError(f"they are {len(rows.local)} boxes, more than {limit}")
        columns = zip(rows.form.tolist(), rows.canonical.tolist(), rows.local.tolist(), strict=True)
        return tuple(Box.make(rows.forms[form], canonical, local) for form, canonical, local in columns)

    def _number(self, form: RowForm) -> int:
        number = self._known.setdefault(form, len(self._known))
        if number == len(self._forms):
            self._forms.append(form)
            if number >= _MAX_FORMS:
                raise TooIrregularError(f"its rows have more than {_MAX_FORMS} forms")
        return number

    def _mend(self) -> None:
        """Join the rows that were cut where one part ends and the next begins."""
        for before, after in pairwise(self._parts):
            (left, at), (right, begin) = _row(before, -1, self._forms), _row(after, 0, self._forms)
            if len(left) > 1 or len(right) > 1:
                continue
            step = (left or right or ((1, 1, 1),))[0][1:]
            if (right and right[0][1:] != step) or (not left and not right):
                continue
            count = left[0][0] if left else 1
            if (begin[0] - at[0], begin[1] - at[1]) == (count * step[0], count * step[1]):
                whole = ((count + (right[0][0] if right else 1), *step),)
                after.canonical[0], after.local[0], after.form[0] = *at, self._number(whole)
                for column in (before.canonical, before.local, before.form):
                    column[-1] = -1
        self._parts = [_taken(part, np.flatnonzero(part.local >= 0)) for part in self._parts]


def _row(rows: _Rows, number: int, forms: list[RowForm]) -> tuple[RowForm, tuple[int, int]]:
    return forms[rows.form[number]], (int(rows.canonical[number]), int(rows.local[number]))


def _join(rows: _Rows, period: int = 1) -> _Rows:
    """Join rows of one form that follow each other at equal steps, each of them `period` such rows after the one
    before; the result has no more rows than there were."""
    of_one_kind = None
    if len(rows.forms) > 1 or period > 1:
        rows = _taken(rows, np.lexsort((rows.local, rows.form)))
        first = np.searchsorted(rows.form, rows.form)
        kind = rows.form * period + (np.arange(len(first)) - first) % period
        order = np.argsort(kind, kind="stable")
        rows, kind = _taken(rows, order), kind[order]
        of_one_kind = kind[1:] == kind[:-1]
    step, step_local = np.diff(rows.canonical), np.diff(rows.local)
    starts, counts = _runs(step, step_local, of_one_kind)
    keys = np.stack((rows.form[starts], counts, step[starts], step_local[starts]), axis=1)
    different, which = np.unique(keys, axis=0, return_inverse=True)
    if len(different) > _MAX_FORMS:
        raise TooIrregularError(f"its rows have more than {_MAX_FORMS} forms")
    longer = [(*rows.forms[form], (count, *strides)) for form, count, *strides in different.tolist()]
    # Where rows lie between each other so that no box has them all, they stay apart.
    is_box = np.array([_is_box(form) for form in longer], np.bool_)[which.reshape(-1)]
    starts, counts, which = starts[is_box], counts[is_box], which.reshape(-1)[is_box]
    ends = np.concatenate((np.zeros(1, np.int64), starts + counts))
    alone = _ranges(ends, np.append(starts, len(rows.local)) - ends)
    forms = np.concatenate((rows.form[alone], len(rows.forms) + which))
    kept = np.concatenate((alone, starts))
    joined = _Rows(rows.local[kept], rows.canonical[kept], forms, [*rows.forms, *longer])
    return _tidy(_taken(joined, np.argsort(joined.local)))


def _runs(step: Indices, step_local: Indices, of_one_kind: Flags | None) -> tuple[Indices, Indices]:
    """Find runs of rows at equal steps, in order: the number of their first rows, and how many, at least two, they are.

    `step[i]` leads from row i to the next one. No row is in two runs: one that two long runs would share is the earlier
    one's, and what is in no long run is paired.
    """
    if not len(step):
        return step, step
    is_other = (step[1:] != step[:-1]) | (step_local[1:] != step_local[:-1])
    if of_one_kind is not None:
        is_other |= of_one_kind[1:] != of_one_kind[:-1]
    first = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(is_other) + 1))
    steps = np.diff(first, append=len(step))
    can_join = step[first] > 0
    if of_one_kind is not None:
        can_join &= of_one_kind[first]
    is_long = can_join & (steps > 1)
    before, after = np.roll(is_long, 1), np.roll(is_long, -1)
    before[0] = after[-1] = False
    free = np.flatnonzero(can_join & ~is_long & ~before & ~after)
    follows = np.concatenate((np.zeros(1, np.bool_), np.diff(free) == 1))[: len(free)]
    place = np.arange(len(free))
    is_pair = np.zeros(len(first), np.bool_)
    is_pair[free[(place - np.maximum.accumulate(np.where(follows, 0, place))) % 2 == 0]] = True
    is_late = is_long & before
    taken = is_long | is_pair
    return (first + is_late)[taken], (steps + 1 - is_late)[taken]


def _ranges(begins: Indices, lengths: Indices) -> Indices:
    """The integers from each of `begins` on, as many as `lengths` says."""
    ends = np.cumsum(lengths)
    return np.repeat(begins - ends + lengths, lengths) + np.arange(ends[-1])


def _is_box(form: RowForm) -> bool:
    try:
        Box.make(form, 0, 0)
    except ValueError:
        return False
    return True


def _tidy(rows: _Rows) -> _Rows:
    """Leave out the forms that no row has any more."""
    used, numbers = np.unique(rows.form, return_inverse=True)
    return _Rows(rows.local, rows.canonical, numbers.reshape(-1), [rows.forms[number] for number in used.tolist()])


def _taken(rows: _Rows, order: Indices) -> _Rows:
    return _Rows(rows.local[order], rows.canonical[order], rows.form[order], rows.forms)
