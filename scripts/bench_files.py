"""Folders of a benchmark: where they fit, how much they hold, whether two are the same, and their end."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bench_report import BenchError

COMPARED_AT_ONCE = 1 << 20
SPARE_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")


def make_place(parent: Path | None, needed_bytes: int) -> Path:
    """Make a new folder for data: in `parent`, else in shared memory where `needed_bytes` fit, else in TMPDIR."""
    if parent is None:
        parent = SHARED_MEMORY if _has_room(SHARED_MEMORY, needed_bytes) else Path(tempfile.gettempdir())
    if shutil.disk_usage(parent).free < needed_bytes:
        raise BenchError(
            f"{parent} has less than {needed_bytes >> 20:,} MiB free; name another place with --dir, or less with --gib"
        )
    return Path(tempfile.mkdtemp(prefix="dcr-bench-", dir=parent))


def _has_room(folder: Path, needed_bytes: int) -> bool:
    """Whether `folder`, which lies in memory, can take that much and leave the rest of the machine some."""
    if not folder.is_dir() or not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < needed_bytes:
        return False
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024 >= needed_bytes + SPARE_BYTES


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, as the kernel calls it."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def files_of(folder: Path) -> dict[str, Path]:
    """All files below `folder` by relative path, but those that dcr keeps for itself."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if not name.startswith(".dcr/")}


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in files_of(folder).values())


def check_same_files(found: Path, expected: Path) -> None:
    """Compare two folders byte for byte. BenchError names the first file that differs."""
    ours, theirs = files_of(found), files_of(expected)
    if set(ours) != set(theirs):
        raise BenchError(f"{found}: other files than in {expected}: {sorted(set(ours) ^ set(theirs))[:3]}")
    for name, path in ours.items():
        if not _same_bytes(path, theirs[name]):
            raise BenchError(f"{path} differs from {theirs[name]}")


def _same_bytes(one: Path, two: Path) -> bool:
    if one.stat().st_size != two.stat().st_size:
        return False
    with one.open("rb") as first, two.open("rb") as second:
        while part := first.read(COMPARED_AT_ONCE):
            if part != second.read(COMPARED_AT_ONCE):
                return False
    return True
