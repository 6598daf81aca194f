"""How much room a file system, or the memory it lives in, has left.

It reads what the system says and changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from dcr_cli.durable import Folder, translating


def free_bytes(folder: Folder) -> int:
    """Bytes that may still be written to the folder's file system; of one that lives in memory, at most half of
    what is free."""
    with translating(folder.path, "its file system cannot be looked at"):
        facts = os.fstatvfs(folder.fd)
        device = os.fstat(folder.fd).st_dev
    room = facts.f_bavail * facts.f_frsize
    return min(room, _free_memory() // 2) if _is_in_memory(device) else room


def _is_in_memory(device: int) -> bool:
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _free_memory() -> int:
    free = 1 << 62
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].strip().isdigit():
        free = min(free, max(int(limit[0]) - int(used[0]), 0))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
