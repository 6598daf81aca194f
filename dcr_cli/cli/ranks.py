"""Which part of how many this process is to publish: as --part says, or the variables that launchers set."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcr_cli.errors import UsageError

AUTO = "auto"
_PART = re.compile(r"([0-9]{1,5})/([0-9]{1,5})")
# What torchrun and srun call the number of a process and how many there are.
_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
# What tells one attempt of a job from the next; all processes of one have the same.
_ATTEMPTS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
_NO_ATTEMPT = "0"


def rank_of(part: str, attempt: str | None, environment: Mapping[str, str]) -> tuple[int, int, str]:
    """The number of this part, how many there are, and the attempt; UsageError where they cannot be told."""
    text = _launched(environment) if part == AUTO else part
    match = _PART.fullmatch(text)
    if match is None:
        facts = f"R/W or auto expected, found {text!r}"
        raise UsageError("--part", facts, hint="0/8 is the first of eight; auto takes both from torchrun or srun")
    return int(match[1]), int(match[2]), attempt if attempt is not None else _attempt(environment)


def _launched(environment: Mapping[str, str]) -> str:
    for names in _LAUNCHERS:
        values = [environment.get(name) for name in names]
        if None not in values:
            return "/".join(map(str, values))
    listed = " nor ".join(" and ".join(names) for names in _LAUNCHERS)
    raise UsageError("--part", f"neither {listed} are set", hint="--part R/W says which part of how many it is")


def _attempt(environment: Mapping[str, str]) -> str:
    for names in _ATTEMPTS:
        if names[0] in environment:
            return "/".join(environment.get(name, _NO_ATTEMPT) for name in names)
    return _NO_ATTEMPT
