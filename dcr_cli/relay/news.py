"""What a relay knows to be new: the newest version, and what is being made; and who waits to hear of more.

All of it is the event loop's. How it comes to be known is watching.py's matter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dcr_cli.remote.hint import GIVEN_UP, Hint, decode_hint
from dcr_cli.remote.keys import Place


@dataclass(slots=True)
class News:
    """`head` is the newest version, `hint` what next.json says."""

    head: int = 0
    hint: Hint | None = None
    _payloads: set[int] = field(default_factory=set)
    _hint_data: bytes | None = None
    _count: int = 0
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How much there has been, for `after`."""
        return self._count

    @property
    def making(self) -> Place | None:
        """The version that is being made, or prepared, if a hint says so of the one after the newest."""
        hint = self.hint
        is_next = hint is not None and hint.place.version == self.head + 1 and hint.state != GIVEN_UP
        return hint.place if hint is not None and is_next else None

    def reached(self, version: int) -> None:
        """This is the newest version, unless a newer one is."""
        if version > self.head:
            self.head = version
            self._tell()

    def saw_commit(self, version: int) -> None:
        """A commit is there. One further ahead says only that there is something to look for."""
        if version == self.head + 1:
            self.reached(version)
        elif version > self.head:
            self._tell()

    def hinted(self, data: bytes | None) -> None:
        """This is next.json now."""
        if data == self._hint_data:
            return
        before, self._hint_data = self.making, data
        self.hint = decode_hint(data) if data is not None else None
        if self.making != before:
            self._payloads = set()
        self._tell()

    def saw_payload(self, place: Place, number: int) -> None:
        """A payload of the version that is being made is there, or comes."""
        if place == self.making and number not in self._payloads:
            self._payloads.add(number)
            self._tell()

    def lost_payload(self, place: Place, number: int) -> None:
        """One that came does not come after all."""
        if place == self.making:
            self._payloads.discard(number)

    def has_payload(self, number: int) -> bool:
        """Whether a payload of the version that is being made is there, or comes."""
        return number in self._payloads

    async def after(self, count: int, seconds: float) -> bool:
        """Wait until there has been more than `count`, or so long: whether there has."""
        if self._count > count:
            return True
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True

    def end_waits(self) -> None:
        """Let all that wait go on, as if there were something."""
        self._tell()

    def _tell(self) -> None:
        self._count += 1
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)
