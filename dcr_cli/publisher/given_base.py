"""Tensors that were given as what a delta starts from: in the host's memory, or where they lie on a device.

They are taken to be a checkpoint of one shard, which has them in canonical order, and of no other file. What is given
as a tensor is given.py's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcr_cli.checkpoint.checkpoint import FileDigest, Tensor
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.header import write_header
from dcr_cli.checkpoint.parts import SHARD
from dcr_cli.publisher.given import bytes_of, bytes_there, tensor_of

_SHARD_NAME = "model.safetensors"


class GivenBase:
    """Tensors by name, which stay as they are until the delta is made. Of those that do not lie in one piece it has
    copies. UsageError, UnsupportedError as `tensor_of`.
    """

    what = "the base"
    skipped: tuple[str, ...] = ()
    digests: Mapping[str, bytes] = {}
    keeps_changes = False

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.tensors = tuple(tensor_of(name, given[name]) for name in sorted(given))
        header = write_header({tensor.name: (tensor.dtype.name, tensor.shape) for tensor in self.tensors})
        self.files: tuple[FileDigest, ...] = (FileDigest(_SHARD_NAME, SHARD, len(header), object_digest(header)),)
        self._there: dict[str, tuple[str, Any]] = {}
        self._here: dict[str, Any] = {}
        for tensor in self.tensors:
            found = bytes_there(given[tensor.name], tensor)
            if found is not None:
                self._there[tensor.name] = f"cuda:{found[0]}", found[1]
            else:
                self._here[tensor.name] = bytes_of(given[tensor.name], tensor)

    def read_into(self, tensor: Tensor, byte_offset: int, buffer: memoryview) -> None:
        end = byte_offset + len(buffer)
        if tensor.name in self._there:
            buffer[:] = self._there[tensor.name][1][byte_offset:end].cpu().numpy().data
        else:
            buffer[:] = self._here[tensor.name][byte_offset:end].data

    def bytes_on(self, device: str, tensor: Tensor) -> Any:
        where, data = self._there.get(tensor.name, (None, None))
        return data if where == device else None

    def check_unchanged(self) -> None:
        """Whoever gave them sees to that."""

    def close(self) -> None: ...
