"""What is asked of a pull, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dcr_cli.arguments import check_version
from dcr_cli.changes.owned import fault_of
from dcr_cli.engine.engines import DEFAULT_SECONDS as DEFAULT_ENGINE_SECONDS, Reload, parse_reload
from dcr_cli.errors import NOT_SET, UsageError
from dcr_cli.fetch.hook import DEFAULT_SECONDS, Hook
from dcr_cli.fetch.words import Speaker
from dcr_cli.layout.document import read_layout
from dcr_cli.receiver.beside.folders import ASIDE
from dcr_cli.receiver.change import IN_PLACE, REPLACE
from dcr_cli.receiver.install.gather import Effort
from dcr_cli.receiver.view import View
from dcr_cli.remote.keys import check_receiver
from dcr_cli.remote.signing import Trust, load_signing_key, trust_in

MODES = (REPLACE, IN_PLACE, ASIDE)


@dataclass(frozen=True, slots=True)
class Wish:
    """To which version a receiver is brought, in which way, and what is done then.

    `version`: this one, also if it lies behind; None: the newest. `is_repair`: whatever is there, by an anchor. `hook`:
    a command, or engines that are reloaded. `view`: through which layout its tensors are stored, if that was said.
    `changes`: a folder where what each delta changes is left, decoded.
    """

    effort: Effort
    version: int | None = None
    mode: str = REPLACE
    keep_previous: bool = False
    is_repair: bool = False
    trust: Trust = field(default_factory=Trust)
    speaker: Speaker | None = None
    hook: Hook | Reload | None = None
    dry_run: bool = False
    view: View = field(default_factory=View)
    changes: Path | None = None


def make_wish(
    effort: Effort,
    *,
    version: int | None = None,
    mode: str = REPLACE,
    keep_previous: bool = False,
    is_repair: bool = False,
    trusted_keys: Sequence[str] = (),
    receiver: str | None = None,
    receiver_key: str | os.PathLike[str] | None = None,
    hook: str | None = None,
    hook_seconds: float = DEFAULT_SECONDS,
    engines: Sequence[str] = (),
    engine_seconds: float = DEFAULT_ENGINE_SECONDS,
    engine_token: str | None = None,
    dry_run: bool = False,
    layout: str | os.PathLike[str] | None = None,
    publish_changes: str | os.PathLike[str] | None = None,
) -> Wish:
    """Make a wish of what was given; keys are texts or files. UsageError if it contradicts itself."""
    if mode not in MODES:
        raise UsageError("mode", f"one of {', '.join(MODES)} expected, found {mode!r}")
    if keep_previous and mode != ASIDE:
        raise UsageError("pull", "keep_previous needs mode aside")
    check_version(version)
    if hook is not None and not hook.strip():
        raise UsageError("--exec", "an empty command", hint=NOT_SET)
    if not hook_seconds > 0:
        raise UsageError("--exec-timeout", "a time above 0 expected")
    if publish_changes is not None:
        _check_changes(Path(publish_changes), has_layout=layout is not None)
    reload = parse_reload(engines, engine_seconds, engine_token)
    if hook is not None and reload is not None:
        hint = "dcr reload, in the command, reloads engines when the command wants it"
        raise UsageError("pull", "--exec and --engine exclude each other", hint=hint)
    if receiver_key is not None and receiver is None:
        raise UsageError(
            "--receiver-key", "signs what a receiver says, and needs its name", hint="give --receiver NAME"
        )
    key = load_signing_key(receiver_key, "--receiver-key") if receiver_key is not None else None
    return Wish(
        effort,
        version,
        mode,
        keep_previous,
        is_repair,
        trust_in(trusted_keys, "--trusted-key"),
        Speaker(check_receiver(receiver, "--receiver"), key) if receiver is not None else None,
        Hook(hook, hook_seconds) if hook is not None else reload,
        dry_run,
        View(layout=read_layout(Path(layout)) if layout is not None else None),
        Path(publish_changes) if publish_changes is not None else None,
    )


def _check_changes(folder: Path, *, has_layout: bool) -> None:
    if has_layout:
        facts = "needs a checkpoint in canonical form"
        raise UsageError("--publish-changes", facts, hint="pull to another folder, without --layout")
    if not os.path.lexists(folder) and folder.parent.is_dir():
        # It is made when the pull begins.
        return
    if not folder.is_dir():
        facts = f"{folder} is no folder, and none that can be made"
        raise UsageError("--publish-changes", facts, hint="give one in a folder that is there, such as /dev/shm")
    fault = fault_of(folder.stat(), folder)
    if fault is not None:
        raise UsageError("--publish-changes", f"{folder}: {fault[0]}", hint=fault[1])
