"""Reads a receiver that stores its tensors through a layout as if it were the one shard that the layout thinks of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from dcr_cli.checkpoint.folder import Identity
from dcr_cli.layout.laid import LaidCheckpoint


class LaidFiles:
    """Stands for the files of a canonical checkpoint; a context manager. The real ones must be those of `identities`
    when they are read."""

    def __init__(self, laid: LaidCheckpoint, identities: Mapping[str, Identity]) -> None:
        self._reader = replace(laid, identities=dict(identities)).reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reader.close()

    def read_path_into(self, path: str, offset: int, buffer: Any) -> None:
        """Fill the whole of `buffer` with what the thought-of shard holds from byte `offset` on."""
        self._reader.read_shard_into(0, offset, buffer)
