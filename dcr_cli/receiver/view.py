"""How a receiver's folder is looked at: what is left out of it, and the layout that it stores its tensors through.

The layout is what was given, or what was noted when it was given before, or what PyTorch's shards say of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.checkpoint.in_progress import LAYOUT_NOTE
from dcr_cli.checkpoint.names import listed
from dcr_cli.durable import PRIVATE_FILE_MODE, Folder
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.coverage import check_locals
from dcr_cli.layout.dcp import dcp_layout
from dcr_cli.layout.document import MAX_LAYOUT_BYTES, decode_layout, encode_layout
from dcr_cli.layout.laid import LaidCheckpoint, lay
from dcr_cli.layout.layout import Form, Layout
from dcr_cli.layout.opening import is_sharded, noted_path
from dcr_cli.layout.shards import open_shards

NOTE_NAME = LAYOUT_NOTE.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class View:
    """Files that a pattern of `skip` matches are no part of the receiver; `layout` is one that was given."""

    skip: tuple[str, ...] = ()
    layout: Layout | None = None


def noted_layout(root: Folder) -> Layout | None:
    """The layout that is noted in the state folder of the checkpoint in `root`."""
    data = root.read(LAYOUT_NOTE, MAX_LAYOUT_BYTES)
    return decode_layout(data, str(root.path / LAYOUT_NOTE)) if data is not None else None


def note_layout(home: Folder, layout: Layout) -> None:
    """Note a layout, durably, in a receiver's state folder, so that it need not be given again."""
    data = encode_layout(layout)
    if home.read(NOTE_NAME, MAX_LAYOUT_BYTES) != data:
        home.replace_file(NOTE_NAME, data, PRIVATE_FILE_MODE)


def layout_blake3(layout: Layout) -> bytes:
    """What a record says of the layout that it was made through."""
    return object_digest(encode_layout(layout))


def has_layout(root: Path, view: View) -> bool:
    """Whether the receiver in `root` stores its tensors through a layout."""
    return view.layout is not None or noted_path(root) is not None or is_sharded(root, skip=view.skip)


def open_laid(root: Folder, view: View, skip: Sequence[str], forms: Mapping[str, Form] | None) -> LaidCheckpoint | None:
    """Open the receiver in `root` through its layout; None if it has none. `forms` are those of the tensors that it
    should have, if they are known.

    Raises DamagedError where shards and layout do not agree, UnsupportedError for a layout that is not of bits alone.
    """
    layout = view.layout or noted_layout(root)
    if layout is None and not is_sharded(root.path, skip=skip):
        return None
    shards = open_shards(root.path, skip=skip, allow_strangers=True)
    if layout is None:
        layout = dcp_layout(shards, forms)
    check_patchable(layout)
    return lay(shards, layout, None)


def check_patchable(layout: Layout) -> None:
    """Raise UnsupportedError unless every bit of every tensor lies somewhere in the shards as it is, DamagedError if an
    element of them would have to be two."""
    if layout.rules:
        facts = "has rules: what a receiver has converted cannot be patched"
        raise UnsupportedError(layout.what, facts, hint="a layout of boxes alone is needed")
    if layout.skipped:
        facts = f"skips tensors, so that nobody can say what a receiver is at: {listed(sorted(layout.skipped))}"
        raise UnsupportedError(layout.what, facts, hint="a layout that leads to all tensors is needed")
    check_locals(layout)
