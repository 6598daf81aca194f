"""How work was done, as lines for people who asked for more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcr_cli.errors import one_line, size

if TYPE_CHECKING:
    from dcr_cli.stages import Account, Stage


def account_text(account: Account) -> str:
    """The device and why it was taken; of each stage its bytes and the seconds of all threads together."""
    lines = [f"device: {account.device} ({one_line(account.why)})", *map(_stage_line, account.stages)]
    return "".join(f"{line}\n" for line in lines)


def _stage_line(stage: Stage) -> str:
    rate = f", {stage.bytes / stage.seconds / 1e9:.3g} GB/s" if stage.seconds > 0 else ""
    return f"stage {stage.name}: {size(stage.bytes)}, {stage.seconds:.3f} s{rate}"
