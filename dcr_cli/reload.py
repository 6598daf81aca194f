"""Has engines load a checkpoint's folder again, whatever has changed it.

What is sent to an engine is engine/'s matter; a pull does the same when it has brought a checkpoint to a version.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import blake3_text
from dcr_cli.checkpoint.in_progress import check_complete
from dcr_cli.engine.engines import DEFAULT_SECONDS, Reloaded, parse_reload
from dcr_cli.errors import UsageError
from dcr_cli.fetch.resting import at_rest
from dcr_cli.fetch.situation import look


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The engines that serve from `checkpoint` now, and what they call its weights."""

    checkpoint: str
    label: str
    reloaded: tuple[Reloaded, ...]


def reload(
    checkpoint: str | os.PathLike[str],
    engines: Sequence[str],
    *,
    label: str | None = None,
    engine_seconds: float = DEFAULT_SECONDS,
    engine_token: str | None = None,
) -> ReloadResult:
    """Have `engines`, each `vllm=URL` or `sglang=URL`, load `checkpoint` one after the other, and call it `label`: by
    default the version that its record says it is at, or else the content digest of its state.

    Each may take `engine_seconds` to load, and is shown `engine_token`. Nothing is sent if the folder is no checkpoint,
    or one in which a change is in progress. A receiver's folder that this process may write is locked meanwhile, as by
    an apply. Raises HookError at the first engine that fails, and what opening a checkpoint raises; ConflictError if
    another dcr is changing the folder, or it was changed while an engine loaded it: that engine stays paused, without
    the label; UsageError if nothing says what it is to be called.
    """
    wanted = parse_reload(engines, engine_seconds, engine_token)
    if wanted is None:
        raise UsageError("--engine", "which engine is to load it?", hint="--engine vllm=http://localhost:8000")
    check_path(checkpoint, "checkpoint")
    path = Path(checkpoint)
    check_complete(path)
    with at_rest(path) as check:
        open_checkpoint(path, allow_strangers=True)
        name = label or _label_of(path)
        return ReloadResult(str(path), name, wanted.run(path, name, check))


def _label_of(path: Path) -> str:
    situation = look(path)
    if situation.position is not None and situation.is_at_position:
        return str(situation.position.version)
    if situation.held is None:
        facts = "nothing says which state this is"
        raise UsageError(str(path), facts, hint="--label TEXT says what the engines are to call it")
    return blake3_text(situation.held.content)
