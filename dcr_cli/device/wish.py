"""Which device somebody wishes for, and whether work is large enough to look for one (pure).

Looking for it is finding.py's matter; torch takes a second or two to import, and is not known here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dcr_cli.errors import UsageError, size

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?")

# Importing torch, making CUDA's context and loading the kernels take some 4 seconds, and compiling them, the first
# time on a machine, about as many for a dtype. A thread on a processor reads and compares some 2 GB a second, files in
# memory, of which a device spares it about half: reading is left. So work has to take threads 16 seconds for nothing to
# be lost the first time, and 4 to be gained each other time.
AUTO_BYTES_PER_JOB = 32 * 10**9
# So many batches are on their way to a device at once. Each is read by one thread, at 4 GB a second by the same
# numbers; those of eight are both sides of 32 GB, as much as a fast link to a device carries. More threads do more.
MOST_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Wish:
    """A device that is wished for: `kind` is auto, cpu or cuda, `index` which of the latter."""

    kind: str
    index: int = 0

    @property
    def text(self) -> str:
        """As somebody would write it."""
        return f"{CUDA}:{self.index}" if self.kind == CUDA else self.kind


def wish_of(text: str) -> Wish:
    """What `text` wishes for; UsageError if that is no device."""
    if text in (AUTO, CPU):
        return Wish(text)
    match = _CUDA.fullmatch(text)
    if match is None:
        raise UsageError("--device", f"auto, cpu, cuda or cuda:N expected, found {text!r}")
    return Wish(CUDA, int(match[1] or 0))


def why_not_worth(work_bytes: int, jobs: int) -> str | None:
    """Why so many bytes to compare are not worth the start of a device; None if they are."""
    if jobs > MOST_SLOTS:
        return f"{jobs} threads compare as fast as a device is given what it compares"
    least = AUTO_BYTES_PER_JOB * jobs
    if work_bytes >= least:
        return None
    threads = f"{jobs} threads" if jobs > 1 else "one thread"
    return f"{size(work_bytes)} to compare, and with {threads} a device is worth its start from {size(least)} on"
