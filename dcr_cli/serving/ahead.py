"""A thread of its own that stages what comes next while an engine serves; whoever asks for that waits for nothing.

It ends with the process, whatever it is doing then. What staging is, is the member's matter.
"""

from __future__ import annotations

from threading import Event, Lock, Thread

from dcr_cli.live import Member

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 2.0


class Ahead:
    """Stages for a member, which nobody else may use until `end` has returned, but to see where it is."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._lock = Lock()
        self._thread: Thread | None = None
        # Whether it was asked again, and whether the thread looks at that still.
        self._is_asked = self._is_looking = False
        self._version = member.version
        # Whether nobody lets the thread wait any more for what a pull has not decoded yet.
        self._is_over = Event()
        self._error: Exception | None = None

    def ask(self, version: int) -> None:
        """Begin to say what could not be said, and to stage what follows the member's version, if that is not yet
        `version`."""
        with self._lock:
            self._is_over.clear()
            self._version, self._is_asked = version, True
            if not self._is_looking:
                self._is_looking = True
                self._thread = Thread(target=self._run, name="dcr stage", daemon=True)
                self._thread.start()

    def end(self, seconds: float | None = None) -> Exception | None:
        """Wait until nothing is being staged, but for no pull, and at most so many seconds: what that raised since it
        was last asked."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(seconds)
        error, self._error = self._error, None
        return error

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_asked:
                    self._is_looking = False
                    return
                self._is_asked, self._error, version = False, None, self._version
            try:
                self._stage(version)
            except Exception as error:
                # Raised where it is waited for.
                self._error = error

    def _stage(self, version: int) -> None:
        self._member.speak()
        step = _SHORTEST_SECONDS
        while self._member.version < version and not self._is_asked:
            # Who lets nobody wait any more is told of what has come until then.
            is_last = self._is_over.is_set()
            if self._member.stage_next() is not None or self._member.awaited_version is None or is_last:
                return
            self._is_over.wait(step)
            step = min(2 * step, _LONGEST_SECONDS)
