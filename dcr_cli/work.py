"""How many threads a job gets. It starts none."""

from __future__ import annotations

import os

from dcr_cli.errors import UsageError

MOST_DEFAULT_JOBS = 16


def default_jobs() -> int:
    """The processors that this process may use, at most MOST_DEFAULT_JOBS."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, MOST_DEFAULT_JOBS))


def threads(jobs: int | None) -> int:
    """How many threads were asked for, or `default_jobs`; UsageError if that is no number of threads."""
    if jobs is not None and jobs < 1:
        raise UsageError("jobs", f"a number from 1 on expected, found {jobs}")
    return default_jobs() if jobs is None else jobs
