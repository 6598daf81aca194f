"""What a trainer's tensors are compared with: the newest version, in a folder or in host memory.

How it came there, and what the remote says of it, is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import dcr_kernels as kernels
from dcr_cli.checkpoint.checkpoint import Checkpoint, FileDigest, Tensor
from dcr_cli.checkpoint.names import listed
from dcr_cli.delta.encoding import Elements, uint_dtype
from dcr_cli.delta.scan import Part, TensorReader
from dcr_cli.errors import WrongBaseError
from dcr_cli.publisher.given import Bytes, writable_bytes
from dcr_cli.receiver.record import Record

_AGAIN = "make the baseline anew from the newest version"


@dataclass(frozen=True, slots=True)
class Change:
    """New elements of a block: of those at `positions` within it, or of all."""

    part: Part
    positions: Any
    values: Elements


class Base(TensorReader, Protocol):
    """The tensors and files that a delta starts from, in canonical order.

    `digests` are those of tensors that are known without reading them. `keeps_changes`: it is itself brought to the
    next version, by what has changed, which somebody has to keep until then.
    """

    what: str
    tensors: tuple[Tensor, ...]
    files: tuple[FileDigest, ...]
    skipped: tuple[str, ...]
    digests: Mapping[str, bytes]
    keeps_changes: bool

    def bytes_on(self, device: str, tensor: Tensor) -> Any:
        """The bytes of a tensor as a torch tensor on a device, if they lie there; else None."""

    def check_unchanged(self) -> None:
        """Raise ConflictError if it is not what it was."""

    def close(self) -> None: ...


class FolderBase:
    """A checkpoint in a folder. Where its record counts, that says what is in it."""

    keeps_changes = False

    def __init__(self, checkpoint: Checkpoint, record: Record | None) -> None:
        self.what = str(checkpoint.root)
        self.tensors = checkpoint.tensors
        self.skipped = checkpoint.skipped
        self._reader = checkpoint.reader()
        self.files = tuple(checkpoint.files_digest(self._reader))
        is_current = record is not None and record.is_current(checkpoint.identities)
        self.digests: Mapping[str, bytes] = {}
        if record is not None and is_current:
            self.digests = {row.name: row.digest for row in record.tensors}

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        self._reader.read_into(tensor, byte_offset, buffer)

    def bytes_on(self, device: str, tensor: Tensor) -> Any:
        return None

    def check_unchanged(self) -> None:
        self._reader.check_unchanged()

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors and files of a version, in canonical order; `digests` are empty where nobody says them."""

    tensors: tuple[Tensor, ...]
    files: tuple[FileDigest, ...]
    skipped: tuple[str, ...]
    digests: Mapping[str, bytes]


class MemoryBase:
    """Arrays in host memory, by tensor name, that are at the version that is described."""

    what = "the baseline in host memory"
    keeps_changes = True

    def __init__(self, arrays: Mapping[str, Any], description: Description) -> None:
        self.tensors = description.tensors
        self.files = description.files
        self.skipped = description.skipped
        self.digests = description.digests
        names = {tensor.name for tensor in self.tensors}
        odd = sorted(names.symmetric_difference(arrays))
        if odd:
            facts = f"it and the newest version do not have the same tensors: {listed(odd)}"
            raise WrongBaseError(self.what, facts, hint=_AGAIN)
        self._bytes: dict[str, Bytes] = {
            tensor.name: writable_bytes(arrays[tensor.name], tensor) for tensor in self.tensors
        }

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bytes[tensor.name][byte_offset : byte_offset + len(buffer)].data

    def bytes_on(self, device: str, tensor: Tensor) -> Any:
        return None

    def check_unchanged(self) -> None:
        """Nobody else may change it; what was compared was checked then."""

    def patch(self, changes: Iterable[Change]) -> None:
        """Bring it to the next version."""
        for change in changes:
            part = change.part
            begin = part.start * part.tensor.dtype.width
            block = self._bytes[part.tensor.name][begin : begin + part.bytes].view(uint_dtype(part.tensor.dtype.width))
            if change.positions is None:
                block[:] = change.values
            else:
                kernels.patch(block, change.positions, change.values)

    def close(self) -> None: ...
