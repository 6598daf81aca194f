"""Which part of how many a rank publishes, and what that came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from dcr_cli.checkpoint.digest import State
from dcr_cli.errors import UsageError
from dcr_cli.remote.part import MOST_ATTEMPT_CHARACTERS, MOST_RANKS
from dcr_cli.stages import Account

_NO_ATTEMPT = "0"


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many parts, from 0; `attempt` is a text that all ranks of one attempt share, and no other has.

    `is_launched`: it is a launcher's, the same for all checkpoints that its processes publish.
    """

    number: int
    count: int
    attempt: str = _NO_ATTEMPT
    is_launched: bool = False

    @property
    def names_checkpoint(self) -> bool:
        """Whether the attempt tells one checkpoint from another."""
        return self.attempt != _NO_ATTEMPT and not self.is_launched


@dataclass(frozen=True, slots=True)
class PartResult:
    """What publishing a part came to.

    `kind` is delta (the version exists), prepared, same (nothing changed, nothing was published), or part (this part
    is complete; nobody waited for the others). Rank 0 alone knows what all parts have together; for others
    `changed_tensors`, `changed_elements` and `delta_bytes` are None, and `target` too if they did not wait.
    `recovered`: what a stopped run of the same attempt had published was taken over. `not_read` are tensors that the
    layout of CHECKPOINT skips, which all parts leave as they are. `device` is where this part was compared, if this run
    did that, and `account` how.
    """

    remote: str
    checkpoint: str
    history: str
    version: int
    id: str
    kind: str
    rank: int
    ranks: int
    attempt: str
    base_version: int
    base: State
    target: State | None
    tensors: int
    elements: int
    dense_bytes: int
    changed_tensors: int | None
    changed_elements: int | None
    delta_bytes: int | None
    uploaded_bytes: int
    recovered: bool
    not_read: tuple[str, ...]
    device: str | None = None
    account: Account | None = field(default=None, compare=False, repr=False)


def check_rank(rank: Rank) -> None:
    """Raise UsageError about a part that there cannot be."""
    if not 0 <= rank.number < rank.count <= MOST_RANKS:
        facts = f"R/W expected, R from 0 to W - 1 and W at most {MOST_RANKS}, found {rank.number}/{rank.count}"
        raise UsageError("--part", facts, hint="0/8 is the first of eight, 7/8 the last")
    if not rank.attempt.isprintable() or not 0 < len(rank.attempt) <= MOST_ATTEMPT_CHARACTERS:
        facts = f"1 to {MOST_ATTEMPT_CHARACTERS} printable characters expected, found {len(rank.attempt)} characters"
        raise UsageError("--attempt", facts, hint="a short text that all parts share, such as step-2")
