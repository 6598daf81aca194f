"""Puts canonical tensors together from local ones that come one by one, in any order and from any thread; or what rules
make them of.

Of a tensor no more is kept than what has come of it, until all has. A replica is kept as the digest of its elements.
What rules make is makers.py's matter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.delta.encoding import Elements, uint_dtype
from dcr_cli.errors import DamagedError, UsageError
from dcr_cli.layout.box import Box
from dcr_cli.layout.coverage import Coverage, local_name
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placed
from dcr_cli.publisher.given import bytes_of
from dcr_cli.publisher.makers import Makers

_Local = tuple[str, str]


@dataclass(slots=True)
class _Joined:
    """A tensor of which something has come: its elements until all are there, and the digests of its replicas, of those
    that have come or, once all is there, of those that will."""

    elements: Elements | None
    left: int
    replicas: dict[Placed, bytes] = field(default_factory=dict)


class Joining:
    """Local tensors of a layout on their way to be canonical ones of `tensors`, the base's.

    DamagedError if the layout is not one of these, or does not own every element once; UnsupportedError if a rule calls
    a function that it may not.
    """

    def __init__(self, layout: Layout, tensors: Iterable[Tensor]) -> None:
        known = {tensor.name: Form(tensor.dtype.name, tensor.shape) for tensor in tensors}
        for name in sorted(known.keys() | layout.tensors.keys()):
            if layout.tensors.get(name) != known.get(name):
                facts = f"tensor {shown(name)} is {layout.tensors.get(name)}, in the version before {known.get(name)}"
                raise DamagedError(layout.what, facts)
        self._layout = layout
        self._owners: dict[str, list[Placed]] = {}
        self._replicas: dict[str, list[Placed]] = {}
        self._forms = layout.forms()
        coverage, read = Coverage(layout), layout.read()
        for name, placed in layout.placed().items():
            if name in read:
                found = coverage.owners_of(name, self._forms[name], placed)
                self._owners[name] = [placed[number] for number in found.owners]
                self._replicas[name] = [placed[number] for number in found.replicas]
        self._makers = Makers(layout)
        self._joined: dict[str, _Joined] = {}
        self._given_out: set[str] = set()
        self._added: set[_Local] = set()
        self._lock = threading.Lock()
        self._fault: DamagedError | None = None

    def add(self, shard: str, name: str, given: Any) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """Take what a shard of the layout holds as `name`; the canonical tensors of which all is there now, each made
        when it is asked for. Whoever has taken one says so by `taken`.

        UsageError if the layout has none, or it was added before; DamagedError if a replica has other bits.
        """
        local = self._layout.shards.get(shard, {}).get(name)
        if local is None:
            raise UsageError(f"tensor {shown(name)}", f"is in no shard {shown(shard)} of {self._layout.what}")
        data = bytes_of(given, _tensor(name, local)).view(uint_dtype(DTYPES[local.form.dtype].width))
        with self._lock:
            if (shard, name) in self._added:
                raise UsageError(f"tensor {shown(name)} of {shown(shard)}", "was added twice")
            self._added.add((shard, name))
            done = []
            # There may be boxes of what only tensors are made of that are skipped.
            for placement in (each for each in local.placements if each.tensor in self._owners):
                joined = self._take(placement.tensor, Placed(placement.box, shard, name), data)
                if joined is not None:
                    done.append((placement.tensor, joined))
                    self._given_out.update(self._makers.names(placement.tensor))
        return self._made(done)

    def taken(self, name: str) -> None:
        """Say that a tensor that was given out is where it belongs."""
        with self._lock:
            self._given_out.remove(name)

    def _made(self, done: Iterable[tuple[str, Elements]]) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for stored, elements in done:
            for name, made in self._makers.make(stored, elements):
                yield name, made.view(np.uint8)

    def check_complete(self) -> None:
        """Raise UsageError if of some tensor a part was added, and not all, or if one was not taken; DamagedError if
        replicas differed."""
        if self._fault is not None:
            raise self._fault
        if self._given_out:
            facts = "all of it has come, and making or adding it went wrong"
            raise UsageError(f"tensor {shown(min(self._given_out))}", facts, hint="begin() again")
        for name, joined in self._joined.items():
            missing = [each for each in self._owners[name] if (each.path, each.name) not in self._added]
            if joined.left and missing:
                facts = f"{joined.left} of its elements were not added: {local_name(missing[0])} is missing"
                raise UsageError(f"tensor {shown(name)}", facts, hint="add it, and commit again")

    def _take(self, tensor: str, placed: Placed, data: Elements) -> Elements | None:
        """Take a box of a local tensor; all of the canonical one once that is there."""
        form = self._forms[tensor]
        joined = self._joined.get(tensor)
        if joined is None:
            elements: Elements = np.empty(form.elements, uint_dtype(DTYPES[form.dtype].width))
            joined = self._joined[tensor] = _Joined(elements, form.elements)
        box = placed.box
        found = box.local_view(data, 0, box.whole)
        if placed not in self._owners[tensor]:
            digest = _digest(found)
            if joined.elements is None:
                self._check_replica(tensor, placed, digest, joined.replicas[placed])
            else:
                joined.replicas[placed] = digest
            return None
        assert joined.elements is not None
        box.canonical_view(joined.elements, 0, box.whole)[...] = found
        joined.left -= box.elements
        return self._complete(tensor, joined) if not joined.left else None

    def _complete(self, tensor: str, joined: _Joined) -> Elements:
        elements = joined.elements
        assert elements is not None
        for placed in self._replicas[tensor]:
            digest = _digest_within(placed.box, elements)
            if placed in joined.replicas:
                self._check_replica(tensor, placed, joined.replicas[placed], digest)
            joined.replicas[placed] = digest
        joined.elements = None
        return elements

    def _check_replica(self, tensor: str, placed: Placed, found: bytes, expected: bytes) -> None:
        if found != expected:
            facts = f"{local_name(placed)} has other bits than the shards that own its elements"
            hint = "replicas of one tensor have the same bits; begin() again"
            self._fault = DamagedError(f"tensor {shown(tensor)}", facts, hint=hint)
            raise self._fault


def _digest_within(box: Box, elements: Elements) -> bytes:
    return _digest(box.canonical_view(elements, 0, box.whole))


def _digest(view: Elements) -> bytes:
    return object_digest(np.ascontiguousarray(view).tobytes())


def _tensor(name: str, local: LocalTensor) -> Tensor:
    """A local tensor as one that lies nowhere."""
    dtype = DTYPES[local.form.dtype]
    return Tensor(name, dtype, local.form.shape, 0, 0, local.form.elements * dtype.width)
