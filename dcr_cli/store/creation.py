"""Creating one object only if its key is free, and knowing afterwards whose object is there.

An answer may be lost, and a refusal may be the answer to our own first try, so after anything but a plain yes the
object is read back: ours is what has our bytes.
"""

from __future__ import annotations

from dcr_cli.errors import UnsupportedError
from dcr_cli.store.backend import AbsentError, Backend, DeniedError, PermanentError, TransientError
from dcr_cli.store.body import body

ONE_WRITER_HINT = "if nothing else ever writes there, say --single-writer"


class Creation:
    """The attempts to create one object, and whether there was one before.

    `is_single_writer` says that nothing else writes there: then, where a backend has no exclusive create, it may be a
    look and a write.
    """

    def __init__(self, backend: Backend, key: str, data: bytes, *, shown: str, is_single_writer: bool) -> None:
        self._backend = backend
        self._key = key
        self._data = data
        self._shown = shown
        self._is_single_writer = is_single_writer
        self._is_tried = False

    def attempt(self) -> bool:
        """Try once more: whether what is there is ours."""
        if self._is_tried and (is_ours := self._is_seen()) is not None:
            return is_ours
        self._is_tried = True
        try:
            if self.create():
                return True
        except AbsentError:
            raise TransientError("went away while it was written") from None
        except PermanentError:
            # An answer that cannot be understood says nothing of what was done.
            if not self._is_seen():
                raise
            return True
        is_ours = self._is_there()
        if is_ours is None:
            raise TransientError("is said to be taken, but is not there")
        return is_ours

    def create(self) -> bool:
        """Create it if the key is free, as the backend says; UnsupportedError where there is no way to."""
        if self._backend.can_create:
            return self._backend.create(self._key, self._data)
        if not self._is_single_writer:
            raise UnsupportedError(
                self._shown, "has no way to create an object only if it is not there", hint=ONE_WRITER_HINT
            )
        if self._backend.status(self._key) is not None:
            return False
        self._backend.write(self._key, self._data, len(self._data))
        return True

    def _is_seen(self) -> bool | None:
        """As `_is_there`; None too if that is denied, which without the right to list may mean that nothing is there.

        Trying to create it then says more, and does no harm.
        """
        try:
            return self._is_there()
        except DeniedError:
            return None

    def _is_there(self) -> bool | None:
        """Whether what has the key has our bytes; None if nothing has it."""
        found = bytearray()
        try:
            with self._backend.read(self._key, 0, None) as answer:
                if answer.total is not None and answer.total != len(self._data):
                    return False
                for chunk in body(answer, 0, len(self._data)):
                    found += chunk
        except AbsentError:
            return None
        return found == self._data
