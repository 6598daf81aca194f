"""The folder of a probe: the checkpoints that it has a loader load, one at a time, and what came back of each load.

Nothing in it is made durable, and all of it is removed in the end. What is written and what it means is probe.py's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Checkpoint
from dcr_cli.checkpoint.header import DTYPES, TensorEntry, bytes_view
from dcr_cli.durable import PRIVATE_FOLDER_MODE, File, Folder, open_folder
from dcr_cli.layout.addresses import WritesBits
from dcr_cli.layout.layout import Form
from dcr_cli.layout.loader import Loader

_AT_ONCE = 1 << 20


class Kept(NamedTuple):
    """A tensor that came back, which begins at byte `begin` of the file of its load."""

    form: Form
    begin: int


class ProbeFolder:
    """A folder of its own in the folder `scratch`; a context manager, which removes it."""

    def __init__(self, scratch: Path) -> None:
        self._name = f"dcr-probe-{os.urandom(8).hex()}"
        self._scratch = open_folder(scratch)
        self._readings: list[File] = []

    def __enter__(self) -> Self:
        try:
            self._scratch.make_folder(self._name, PRIVATE_FOLDER_MODE)
            self._folder = self._scratch.open_folder(self._name)
        except BaseException:
            self._scratch.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._scratch:
            for file in self._readings:
                file.close()
            self._folder.close()
            self._scratch.remove_tree(self._name)

    def load(
        self, loader: Loader, base: Checkpoint, begins: Mapping[str, int], values: WritesBits
    ) -> dict[str, dict[str, Kept]]:
        """Have a checkpoint loaded that is like `base` but for the values of its tensors, whose addresses begin at
        `begins`, and keep what comes back: by path and name, the tensors of that load, the next one in number.

        Each load has a folder of another name, lest a loader takes it for one that it knows.
        """
        number = len(self._readings)
        name = f"checkpoint-{number}"
        self._folder.make_folder(name)
        with self._folder.open_folder(name) as folder:
            _write_checkpoint(folder, base, begins, values)
        file = self._folder.create_file(f"load-{number}")
        self._readings.append(file)
        kept: dict[str, dict[str, Kept]] = {}
        end = 0
        dtypes = {tensor.dtype.name for tensor in base.tensors}
        for path, tensor_name, tensor in loader.load(str(self._folder.path / name), dtypes):
            kept.setdefault(path, {})[tensor_name] = Kept(tensor.form, end)
            file.write_at(end, tensor.data)
            end += len(tensor.data)
        self._folder.remove_tree(name)
        return kept

    def read(self, number: int, kept: Kept, first: int, count: int) -> NDArray[Any]:
        """Read elements of a tensor, from number `first` on, as a load has returned them."""
        width = DTYPES[kept.form.dtype].width
        data = np.empty(count, f"<u{width}")
        self._readings[number].read_into(kept.begin + first * width, bytes_view(data))
        return data


def _write_checkpoint(folder: Folder, base: Checkpoint, begins: Mapping[str, int], values: WritesBits) -> None:
    with base.reader() as reader:
        for sidecar in base.sidecars:
            folder.make_parents(sidecar.path)
            with folder.create_file(sidecar.path) as file:
                end = 0
                for part in reader.parts_of(sidecar.path):
                    file.write_at(end, part)
                    end += len(part)
    for shard in base.shards:
        folder.make_parents(shard.path)
        with folder.create_file(shard.path) as file:
            file.write_at(0, shard.header.raw)
            for entry in shard.header.tensors:
                _write_tensor(file, len(shard.header.raw), entry, begins[entry.name], values)


def _write_tensor(file: File, data_begin: int, entry: TensorEntry, address: int, values: WritesBits) -> None:
    dtype = DTYPES[entry.dtype]
    elements = (entry.end - entry.begin) // dtype.width
    for first in range(0, elements, _AT_ONCE):
        addresses = np.arange(address + first, address + min(first + _AT_ONCE, elements), dtype=np.int64)
        file.write_at(data_begin + entry.begin + first * dtype.width, bytes_view(values.bits(dtype, addresses)))
