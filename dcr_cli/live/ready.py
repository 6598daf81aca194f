"""What is staged in a live receiver: for whoever staged it, and for applying it. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcr_cli.checkpoint.digest import State
from dcr_cli.live.bits import Patch
from dcr_cli.live.holdings import Elements
from dcr_cli.live.shares import Part, Shares
from dcr_cli.remote.version import Published


@dataclass(frozen=True, slots=True, repr=False)
class Staged:
    """What is ready to be applied: from which state to which, and what the module's shares will be then.

    `version` is that of a remote, be it prepared, None for a delta that is of none. `changed_elements` of the module
    change in all, `loaded` tensors go through its loader.
    """

    delta: str
    version: int | None
    base: State
    target: State
    changed_elements: int
    loaded: tuple[str, ...]
    shares: Shares

    def __repr__(self) -> str:
        version = f"version {self.version}, " if self.version is not None else ""
        loaded = f", {len(self.loaded):,} tensors through the loader" if self.loaded else ""
        return f"<Staged {self.delta}: {version}{self.changed_elements:,} elements{loaded}>"


@dataclass(frozen=True, slots=True)
class Ready:
    """What is staged, with all that applying it takes. `weights` are whole tensors for the loader, `content` is that of
    the module then, as far as it is known."""

    staged: Staged
    patches: tuple[Patch, ...]
    kept: Mapping[str, Elements]
    weights: Mapping[str, Elements]
    parts: Mapping[Part, bytes]
    content: bytes | None
    published: Published | None
