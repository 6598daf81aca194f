"""What a put reads from: a stream, from where it stood to where it ended, as often as that has to be tried.

It gives exactly the bytes that were announced, or an error that is this side's and not the remote's.
"""

from __future__ import annotations

import io
import os
from typing import BinaryIO

from dcr_cli.errors import ConflictError, LocalError, hint_of


class SentStream:
    """The rest of a stream that can be sought in; one that shrinks while it is read is ConflictError."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._name = str(getattr(stream, "name", "the source"))
        try:
            self._begin = stream.tell()
            self.size = stream.seek(0, io.SEEK_END) - self._begin
        except OSError as error:
            raise self._unreadable(error) from error
        self._left_bytes = 0

    def rewind(self) -> None:
        """Go back to where the stream stood at first."""
        try:
            self._stream.seek(self._begin, os.SEEK_SET)
        except OSError as error:
            raise self._unreadable(error) from error
        self._left_bytes = self.size

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, all of them unless fewer are left."""
        wanted = min(size, self._left_bytes)
        found: list[bytes] = []
        while wanted > 0:
            try:
                part = self._stream.read(wanted)
            except OSError as error:
                raise self._unreadable(error) from error
            if not part:
                raise ConflictError(self._name, f"became {self._left_bytes} bytes shorter while it was sent")
            found.append(part)
            wanted -= len(part)
            self._left_bytes -= len(part)
        return found[0] if len(found) == 1 else b"".join(found)

    def _unreadable(self, error: OSError) -> LocalError:
        return LocalError(self._name, f"cannot be read: {error.strerror or type(error).__name__}", hint=hint_of(error))
