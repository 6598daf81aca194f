"""How many threads a job gets. It starts none."""

from __future__ import annotations

import os

MOST_DEFAULT_JOBS = 16


def default_jobs() -> int:
    """The processors that this process may use, at most MOST_DEFAULT_JOBS."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, MOST_DEFAULT_JOBS))
