"""Opens a folder, whatever it holds: a checkpoint in canonical form, or shards that a layout leads to one."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.folder import Files, Identity, scan
from dcr_cli.checkpoint.header import read_header
from dcr_cli.checkpoint.in_progress import LAYOUT_NOTE
from dcr_cli.checkpoint.parts import SHARD_SUFFIX, is_weight_map
from dcr_cli.errors import DcrError, NotFoundError
from dcr_cli.layout.box import whole_box
from dcr_cli.layout.dcp import SHARDING_INFO, dcp_layout
from dcr_cli.layout.document import read_layout
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement
from dcr_cli.layout.shards import RankShards, open_shards


def open_any(
    root: str | os.PathLike[str],
    *,
    layout: Layout | str | Path | None = None,
    like: Checkpoint | None = None,
    skip: Sequence[str] = (),
    what: str = "checkpoint",
) -> Checkpoint:
    """Open the checkpoint at `root`: through `layout`, or the file of one, if it is given, or was given to whoever
    changed it; through what its shards say of themselves, if PyTorch's distributed checkpoint has written them; else as
    it is.

    What is read through a layout has the shards, the weight map and, but for those of its own, the sidecars of `like`;
    without it, a single shard is thought of. Raises as open_checkpoint, and DamagedError where the shards and the
    layout do not agree.
    """
    return look_at(root, layout=layout, skip=skip, what=what).like(like)


@dataclass(frozen=True, slots=True)
class Given:
    """A folder that was looked at: a checkpoint, or shards that are one once it is known in the files of which other.

    `layout` says of shards what they hold; without it, they say so themselves.
    """

    opened: Checkpoint | RankShards
    layout: Layout | None

    @property
    def root(self) -> Path:
        return self.opened.root

    @property
    def identities(self) -> Mapping[str, Identity]:
        return self.opened.identities

    @property
    def skipped(self) -> tuple[str, ...]:
        return self.opened.skipped

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.opened, RankShards)

    def like(self, other: Checkpoint | None) -> Checkpoint:
        """The checkpoint that it holds, as open_any says."""
        if isinstance(self.opened, Checkpoint):
            return self.opened
        return lay(self.opened, self.layout_like(other), other)

    def layout_like(self, other: Checkpoint | None) -> Layout:
        """What its shards hold, if it has shards of ranks: they alone do not say how large a tensor is."""
        if self.layout is not None:
            return self.layout
        assert isinstance(self.opened, RankShards)
        return dcp_layout(self.opened, forms_of(other) if other is not None else None)


def look_at(
    root: str | os.PathLike[str],
    *,
    layout: Layout | str | Path | None = None,
    skip: Sequence[str] = (),
    what: str = "checkpoint",
) -> Given:
    """Look at the folder at `root`, as open_any does, before it is known what it is compared with."""
    check_path(root, what)
    given = layout or noted_path(root)
    if given is not None:
        known = given if isinstance(given, Layout) else read_layout(given)
        return Given(open_shards(root, skip=skip, what=what), known)
    if is_sharded(root, skip=skip):
        return Given(open_shards(root, skip=skip, what=what), None)
    return Given(open_checkpoint(root, skip=skip, what=what), None)


def noted_path(root: str | os.PathLike[str]) -> Path | None:
    """The file in which the layout is noted of the receiver at `root`, if one is: where nothing but a file counts."""
    note = Path(root) / LAYOUT_NOTE
    try:
        return note if stat.S_ISREG(note.lstat().st_mode) else None
    except OSError:
        return None


def layout_given(path: str | os.PathLike[str] | None, functions: Sequence[str]) -> Layout | None:
    """Read the layout that somebody gave, if anybody did, with the functions that its rules may call."""
    return read_layout(path, functions) if path is not None else None


def is_sharded(root: str | os.PathLike[str], *, skip: Sequence[str] = ()) -> bool:
    """Whether PyTorch's distributed checkpoint has written the shards at `root`, and nobody has joined them."""
    folder = Path(root)
    try:
        found = scan(folder, skip=skip, must_be_files=()) if folder.is_dir() else {}
        shards = [path for path in found if path.endswith(SHARD_SUFFIX) and "/" not in path]
        if not shards or any(map(is_weight_map, found)):
            return False
        with Files(folder, found) as files, files.opened(shards[0]) as fd:
            return SHARDING_INFO in read_header(fd, str(folder / shards[0])).metadata
    except DcrError:
        # Whatever is wrong is said by who opens it.
        return False


def forms_of(checkpoint: Checkpoint) -> dict[str, Form]:
    """The forms of a checkpoint's tensors."""
    return {tensor.name: Form(tensor.dtype.name, tensor.shape) for tensor in checkpoint.tensors}


def layout_of_own(checkpoint: Checkpoint) -> Layout:
    """The layout of a checkpoint in canonical form, whose tensors are there as they are."""
    forms, shards = forms_of(checkpoint), {shard.path: dict[str, LocalTensor]() for shard in checkpoint.shards}
    for tensor in checkpoint.tensors:
        form = forms[tensor.name]
        placements = (Placement(tensor.name, whole_box(form.elements)),) if form.elements else ()
        shards[checkpoint.shards[tensor.shard].path][tensor.name] = LocalTensor(form, placements)
    return Layout(f"layout of {checkpoint.root}", forms, shards)


def layout_of_any(root: str | os.PathLike[str], forms: Mapping[str, Form], *, skip: Sequence[str] = ()) -> Layout:
    """The layout of the tensors that a folder holds, in canonical form or in shards of ranks that say of themselves;
    these are parts of tensors of the shapes of `forms`, of the dtypes that they have there."""
    given = look_at(root, skip=skip, what="shards")
    if isinstance(given.opened, Checkpoint):
        return layout_of_own(given.opened)
    if given.layout is not None:
        return given.layout
    found = dcp_layout(given.opened, None).tensors
    known = {name: Form(found.get(name, form).dtype, form.shape) for name, form in forms.items()}
    return dcp_layout(given.opened, known)


def layout_of(root: str | os.PathLike[str], *, like: Checkpoint | None, skip: Sequence[str] = ()) -> Layout:
    """The layout that shards say of themselves, or that was given to whoever changed them; NotFoundError if neither."""
    note = noted_path(root)
    if note is not None:
        return read_layout(note)
    shards = open_shards(root, skip=skip)
    if not any(SHARDING_INFO in shard.header.metadata for shard in shards.shards.values()):
        hint = "give the file of one, as LAYOUT here and as --layout elsewhere; dcr layout --help says how to make it"
        raise NotFoundError(f"layout of {root}", "its shards do not say what they are parts of", hint=hint)
    return dcp_layout(shards, forms_of(like) if like is not None else None)
