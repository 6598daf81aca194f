"""Finds out which shards a receiver with a layout has, and how those are made that it has not.

It reads and changes nothing; what the shards hold is cutter.py's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.checkpoint import Shard
from dcr_cli.checkpoint.folder import Identity, scan
from dcr_cli.checkpoint.header import parse_header, write_header
from dcr_cli.checkpoint.names import listed
from dcr_cli.checkpoint.parts import SHARD_SUFFIX
from dcr_cli.durable import open_folder
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError
from dcr_cli.layout.dcp import dcp_layout
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import Form, Layout, LocalTensor
from dcr_cli.layout.shards import RankShards, read_shards
from dcr_cli.receiver.laid.plan import check_forms
from dcr_cli.receiver.view import View, check_patchable, noted_layout

_FROM_A_LOAD = "copy the shards of a full load there first, then run dcr pull --repair"
_ANEW = "move it out of the checkpoint; another one is made in its place"


@dataclass(frozen=True, slots=True)
class CutShards:
    """The shards of a receiver in `root` as they will be, by path, all that the layout is of; those that are there
    already are `held`, and keep their headers."""

    root: Path
    layout: Layout
    shards: Mapping[str, Shard]
    held: Mapping[str, Identity]

    @property
    def new_bytes(self) -> int:
        """How much those take that are not there."""
        return sum(shard.size for path, shard in self.shards.items() if path not in self.held)


def find_shards(root: Path, view: View, skip: Sequence[str], forms: Mapping[str, Form] | None) -> CutShards:
    """Find the shards of the receiver in `root`, which may not be there, for a target whose tensors have these forms,
    if they are known.

    UnsupportedError if its layout is not one of bits alone, or not of these tensors, or if a shard is not there and
    holds what comes from nowhere; DamagedError if shards and layout do not agree.
    """
    held = scan(root, skip=skip, must_be_files=(SHARD_SUFFIX,), strangers=[]) if root.is_dir() else {}
    held = {path: identity for path, identity in held.items() if path.endswith(SHARD_SUFFIX)}
    found = _read(root, held)
    layout = _layout(root, view, found, forms)
    check_patchable(layout)
    if forms is not None:
        check_forms(root, layout, forms)
    shards = {path: found.get(path) or _make(root, path, layout.shards[path]) for path in layout.shards}
    # Those that no rule is of come last, for the layout to refuse.
    lay(RankShards(root, shards | found, {}, ()), layout, None)
    return CutShards(root, layout, shards, held)


def can_be_cut(root: Path, view: View, skip: Sequence[str]) -> bool:
    """Whether the shards of the receiver in `root` are those of its layout, or can be made, whatever they hold."""
    try:
        find_shards(root, view, skip, None)
    except DcrError:
        return False
    return True


def _read(root: Path, held: Mapping[str, Identity]) -> dict[str, Shard]:
    try:
        return read_shards(root, held)
    except DamagedError as error:
        raise DamagedError(error.what, error.facts, hint=_ANEW) from error


def _layout(root: Path, view: View, found: Mapping[str, Shard], forms: Mapping[str, Form] | None) -> Layout:
    """The layout that was given, or noted, or that the shards say of themselves."""
    noted = None
    if view.layout is None and root.is_dir():
        with open_folder(root) as folder:
            noted = noted_layout(folder)
    return view.layout or noted or dcp_layout(RankShards(root, found, {}, ()), forms)


def _make(root: Path, path: str, tensors: Mapping[str, LocalTensor]) -> Shard:
    """A shard with the local tensors of a layout, in its order."""
    lacking = [name for name, tensor in tensors.items() if tensor.form.elements and not tensor.placements]
    if lacking:
        facts = f"cannot be made: tensors in it are no part of a checkpoint: {listed(lacking)}"
        raise UnsupportedError(str(root / path), facts, hint=_FROM_A_LOAD)
    raw = write_header({name: tensor.form for name, tensor in tensors.items()})
    header = parse_header(raw, None, path)
    return Shard(path, header, len(raw) + header.data_bytes)
