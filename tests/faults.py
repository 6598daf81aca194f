"""Faults for tests of what changes local disk: stopping at a step, failing a call, and losing power.

All of them watch `durable.hooks`, so they see every step that there is.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from dcr_cli import durable
from dcr_cli.errors import DcrError

PAGE_BYTES = 4096


def steps(apart: int = 1) -> Iterator[int]:
    """The numbers of steps to stop at, so many apart; all of them, if the environment says so."""
    return count(0, 1 if os.environ.get("DCR_TEST_EVERY_STEP") else apart)


class StoppedError(BaseException):
    """The process is no more: every further step raises this too, so that nothing tidies up."""


@contextmanager
def watching(hook: Callable[[str, str, str], None]) -> Iterator[None]:
    durable.hooks.append(hook)
    try:
        yield
    finally:
        durable.hooks.remove(hook)


def stopped_at(number: int, run: Callable[[], object]) -> bool:
    """Run until step `number` (from 0), which is not done, nor any after it; whether `run` ended before that."""
    steps = 0

    def stop(kind: str, path: str, other: str) -> None:
        nonlocal steps
        steps += 1
        if steps > number:
            raise StoppedError

    with watching(stop):
        try:
            run()
        except StoppedError:
            return False
    return True


def in_child(run: Callable[[], object]) -> int:
    """Run in a process of its own: the exit code of the DcrError, 0 if there is none, 99 for anything else."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            run()
            code = 0
        except DcrError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(number: int, run: Callable[[], object]) -> bool:
    """As stopped_at, in a process of its own that SIGKILL ends; whatever else ends it is an error here."""
    child = os.fork()
    if child == 0:
        steps = 0

        def kill(kind: str, path: str, other: str) -> None:
            nonlocal steps
            steps += 1
            if steps > number:
                os.kill(os.getpid(), 9)

        durable.hooks.append(kill)
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == 9
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def failing_at(number: int, error: int, run: Callable[[], object]) -> bool:
    """Let step `number` fail with an errno, and only that one. Whether `run` ended without getting there.

    It becomes the error that a system would cause; what `run` raises for it passes through.
    """
    steps = 0

    def fail(kind: str, path: str, other: str) -> None:
        nonlocal steps
        steps += 1
        if steps == number + 1:
            raise OSError(error, os.strerror(error))

    with watching(fail):
        run()
    return steps <= number


@dataclass(slots=True)
class _Node:
    """A file or link as the disk knows it. `durable` is what survives for sure."""

    durable: bytes
    mode: int
    mtime_ns: int
    text: str | None = None


@dataclass(slots=True)
class _Name:
    """A change of names that no folder's sync has made durable. `folders` are those in which it would."""

    folders: set[str]
    remove: str | None
    add: str | None
    node: int | None


@dataclass
class PowerLoss:
    """Knows, step by step, what of the tree below `root` would survive a loss of power.

    A file's bytes survive when it was synced after they were written, a name when its folder was. What was not synced
    may survive in part: `survivors` builds a tree with what a chosen way of losing it leaves.
    """

    root: Path
    names: dict[str, int | None] = field(default_factory=dict)
    nodes: dict[int, _Node] = field(default_factory=dict)
    pending: list[_Name] = field(default_factory=list)
    last: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        for path in sorted(self.root.rglob("*")):
            key = str(path)
            if path.is_dir() and not path.is_symlink():
                self.names[key] = None
            else:
                self.names[key] = self._node(key, is_durable=True)

    def __call__(self, kind: str, path: str, other: str) -> None:
        """Hear of a step that is about to happen; the one before it has happened."""
        self._take_last()
        self.last = (kind, path, other)

    def lost_at(self, number: int, run: Callable[[], object]) -> bool:
        """Run until step `number` (from 0), at which power is lost; whether `run` ended before that."""

        def run_watched() -> None:
            with watching(self):
                run()

        # The stop is asked first: of a step that is not done, nothing is heard.
        return stopped_at(number, run_watched)

    def survivors(self, to: Path, way: str, seed: int = 0) -> None:
        """Write below `to` what is left. Ways: "nothing" that is not durable is; "names" are, but no bytes;
        "all" is; "some": names and pages by chance."""
        self._take_last()
        dice = random.Random(seed)
        names = dict(self.names)
        for change in self.pending:
            if way in ("names", "all") or (way == "some" and dice.random() < 0.5):
                if change.remove is not None:
                    for name in [n for n in names if n == change.remove or n.startswith(change.remove + "/")]:
                        moved = names.pop(name)
                        if change.add is not None and name != change.remove:
                            names[change.add + name[len(change.remove) :]] = moved
                if change.add is not None:
                    names[change.add] = change.node
        for name in sorted(names):
            place = to / os.path.relpath(name, self.root)
            if not place.parent.is_dir():
                continue
            number = names[name]
            if number is None:
                place.mkdir(exist_ok=True)
            elif (text := self.nodes[number].text) is not None:
                place.symlink_to(text)
            else:
                place.write_bytes(self._bytes(number, way, dice))
                place.chmod(stat.S_IMODE(self.nodes[number].mode))
                os.utime(place, ns=(self.nodes[number].mtime_ns,) * 2)

    def _bytes(self, number: int, way: str, dice: random.Random) -> bytes:
        """What a file holds: pages that were not synced are old, new, or zero."""
        node = self.nodes[number]
        current = self._current.get(number)
        if way in ("nothing", "names") or current is None:
            return node.durable
        if way == "all":
            return current
        size = dice.choice((len(node.durable), len(current)))
        pages = []
        for begin in range(0, size, PAGE_BYTES):
            end = min(begin + PAGE_BYTES, size)
            choices = [part for part in (node.durable[begin:end], current[begin:end]) if len(part) == end - begin]
            pages.append(dice.choice([*choices, bytes(end - begin)] if len(node.durable) < end else choices))
        return b"".join(pages)

    @property
    def _current(self) -> dict[int, bytes]:
        found = {}
        for path in self.root.rglob("*"):
            if path.is_file() and not path.is_symlink():
                found[path.lstat().st_ino] = path.read_bytes()
        return found

    def _node(self, path: str, *, is_durable: bool) -> int:
        status = os.lstat(path)
        number = status.st_ino
        if stat.S_ISLNK(status.st_mode):
            self.nodes[number] = _Node(b"", status.st_mode, status.st_mtime_ns, os.readlink(path))
        elif is_durable or number not in self.nodes:
            self.nodes[number] = _Node(
                Path(path).read_bytes() if is_durable else b"", status.st_mode, status.st_mtime_ns
            )
        return number

    def _take_last(self) -> None:
        if self.last is None:
            return
        (kind, path, other), self.last = self.last, None
        parent = os.path.dirname(path)
        if kind in ("create", "link", "symlink", "clone") and os.path.lexists(path):
            # A number may have been another file's, which is gone.
            if kind != "link" and path not in self.names and not self._is_pending(path):
                self.nodes.pop(os.lstat(path).st_ino, None)
            self.pending.append(_Name({parent}, None, path, self._node(path, is_durable=False)))
        elif kind == "mkdir":
            self.pending.append(_Name({parent}, None, path, None))
        elif kind in ("unlink", "rmdir"):
            self.pending.append(_Name({parent}, path, None, None))
        elif kind == "rename":
            node = self._node(other, is_durable=False) if not os.path.isdir(other) or os.path.islink(other) else None
            self.pending.append(_Name({parent, os.path.dirname(other)}, path, other, node))
        elif kind == "sync":
            self._node(path, is_durable=True)
        elif kind == "sync-folder":
            self._make_durable(path)

    def _is_pending(self, path: str) -> bool:
        return any(change.add == path for change in self.pending)

    def _make_durable(self, folder: str) -> None:
        """Make the changes of names in a folder durable, as far as every folder of theirs has been synced."""
        left = []
        for change in self.pending:
            change.folders.discard(folder)
            if change.folders:
                left.append(change)
                continue
            if change.remove is not None:
                for name in [n for n in self.names if n == change.remove or n.startswith(change.remove + "/")]:
                    moved = self.names.pop(name)
                    if change.add is not None and name != change.remove:
                        self.names[change.add + name[len(change.remove) :]] = moved
            if change.add is not None:
                self.names[change.add] = change.node
        self.pending = left
