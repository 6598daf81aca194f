"""Wanted states for tests, made of folders, and fetchers over these: right, wrong, short, broken, counting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.content import Workers, read_state
from dcr_cli.delta import file_rules
from dcr_cli.delta.file_rules import RangedFile
from dcr_cli.errors import TransportError
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.install.here import Request
from dcr_cli.receiver.install.install import Manner, install
from dcr_cli.receiver.install.result import InstallResult
from dcr_cli.receiver.install.site import Allowance
from dcr_cli.receiver.install.wanted import Fetcher, Wanted

ORIGIN = "file:///remote"


def wanted_of(source: Path) -> Wanted:
    """The state of a checkpoint as plain files, as a publisher would state it."""
    checkpoint = open_checkpoint(source)
    with checkpoint.reader() as reader, Workers(1, "test", None) as workers:
        state, _ = read_state(workers, checkpoint, reader)
        digests = checkpoint.files_digest(reader)
    files, step = [], file_rules.RANGE_BYTES
    for file in digests:
        data = (source / file.path).read_bytes()
        ranges = [object_digest(data[begin : begin + step]) for begin in range(0, len(data), step)]
        files.append(RangedFile(file.path, file.kind, len(data), file.blake3, tuple(ranges)))
    return Wanted(state, (), tuple(files))


@dataclass
class FromFolder:
    """Yields what a folder has, and keeps what was asked for."""

    root: Path
    at_once: int = 100
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        self.asked.append((path, begin, size))
        with open(self.root / path, "rb") as file:
            file.seek(begin)
            left = size
            while left:
                data = file.read(min(left, self.at_once))
                yield data
                left -= len(data)


class FlipsAByte(FromFolder):
    """Yields a wrong byte the first `times` times that a path is asked for."""

    def __init__(self, root: Path, path: str, times: int) -> None:
        super().__init__(root)
        self.path, self.times = path, times

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        data = bytearray(b"".join(super().fetch(path, begin, size)))
        if path == self.path and self.times:
            self.times -= 1
            data[size // 2] ^= 1
        yield bytes(data)


class Sizes(FromFolder):
    """Yields more or fewer bytes than were asked for."""

    def __init__(self, root: Path, more: int) -> None:
        super().__init__(root)
        self.more = more

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        data = b"".join(super().fetch(path, begin, size))
        yield data + bytes(self.more) if self.more > 0 else data[: self.more]


class BreaksAt(FromFolder):
    """Goes away in the middle of the call with this number."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number = number

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        data = b"".join(super().fetch(path, begin, size))
        if len(self.asked) > self.number:
            yield data[: size // 2]
            raise TransportError(f"{ORIGIN}/{path}", "went away")
        yield data


class Gone:
    """Has nothing any more."""

    def fetch(self, path: str, begin: int, size: int) -> Iterator[bytes]:
        raise TransportError(f"{ORIGIN}/{path}", "is not there")


def bring(
    checkpoint: Path,
    wanted: Wanted,
    fetcher: Fetcher,
    *,
    jobs: int = 1,
    repair: bool = False,
    known: tuple[str, ...] = (),
    **manner: object,
) -> InstallResult:
    """Bring a checkpoint to a wanted state."""
    request = Request(wanted, fetcher, ORIGIN, Effort(jobs, None))
    return install(checkpoint, request, Manner(allowance=Allowance(known, repair), **manner))  # type: ignore[arg-type]
