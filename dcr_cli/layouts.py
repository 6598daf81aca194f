"""Shows, checks, composes and writes layouts: what `dcr layout` does.

What a layout means is layout/'s business.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcr_cli.arguments import check_path
from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint, unless_changed
from dcr_cli.content import Side, Workers, in_file_order, tensor_digests, tensor_of_part
from dcr_cli.durable import NEW_FILE_MODE, open_folder
from dcr_cli.errors import ConflictError, UsageError
from dcr_cli.layout.box import Box
from dcr_cli.layout.composition import compose_layouts as compose
from dcr_cli.layout.coverage import Coverage, check_locals
from dcr_cli.layout.document import encode_layout, read_layout
from dcr_cli.layout.exchanged import check_places
from dcr_cli.layout.laid import LaidCheckpoint, check_like, lay
from dcr_cli.layout.layout import Layout, LocalTensor
from dcr_cli.layout.opening import layout_of
from dcr_cli.layout.padding import check_padding
from dcr_cli.layout.shards import open_shards

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BoxFacts:
    """A strided box of a local tensor: `axes` are count, canonical stride and local stride, in elements."""

    tensor: str
    elements: int
    canonical_offset: int
    local_offset: int
    axes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """A local tensor; `padding` of its elements are in no box, and hold zeros if `fill` is zero."""

    shard: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str
    padding: int
    boxes: tuple[BoxFacts, ...]


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """What a layout holds.

    `elements` are those of its canonical tensors, `placed_elements` those of boxes, replicas too; `padding` are
    elements of local tensors that are in no box. `rules` counts the tensors that are made by a rule, by its kind.
    Unless `has_known_shapes`, nobody said how large tensors are, and they are as large as the shards that are there
    need. `rows` are the local tensors, if they were asked for; `output` is the file that it was written to.
    """

    layout: str
    tensors: int
    elements: int
    shards: int
    local_tensors: int
    boxes: int
    placed_elements: int
    padding: int
    rules: Mapping[str, int]
    skipped: tuple[str, ...]
    has_known_shapes: bool
    output: str | None
    rows: tuple[LocalFacts, ...]


@dataclass(frozen=True, slots=True)
class CheckLayoutResult:
    """A layout that is right as far as it was checked: every element of every tensor is owned exactly once.

    `checkpoint`: its shards are those of the layout. `base`: its tensors are. `is_deep`: all bytes of the shards were
    read, replicas agree, and padding is as the layout says; `replica_elements` are there more than once.
    `has_known_shapes` is as in LayoutResult: without, no shard is missed that holds the end of a tensor.
    """

    layout: str
    checkpoint: str | None
    base: str | None
    is_deep: bool
    tensors: int
    elements: int
    shards: int
    replica_elements: int
    has_known_shapes: bool


def show_layout(
    layout: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    tensors: bool = False,
    skip: Sequence[str] = (),
) -> LayoutResult:
    """Say what a layout holds: that of a file, or that which the shards in a folder tell themselves, which `output`
    writes to a file; with `tensors`, every local tensor. Its tensors are those of checkpoint `base`, if it is given;
    shards do not say how large a tensor is.

    Raises NotFoundError, DamagedError, UnsupportedError, and ConflictError if the file is there already.
    """
    like = open_checkpoint(base, what="base") if base is not None else None
    found = _layout_at(layout, like, skip)
    if like is not None:
        check_like(found, like)
    return told(found, output, tensors=tensors)


def check_layout(
    layout: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
    deep: bool = False,
    skip: Sequence[str] = (),
    functions: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CheckLayoutResult:
    """Check that a layout, of a file or of a folder of shards, owns every element exactly once; that the shards in
    `checkpoint` are those of the layout; that its tensors are those of `base`, and no shard holds what belongs to
    another one; and if `deep`, that replicas agree and padding is zero where the layout says so. `functions`, each
    `module:function`, are those that rules of the layout may call.

    Raises DamagedError, which names the tensor and the element, NotFoundError, UnsupportedError, UsageError.
    """
    if checkpoint is None and Path(layout).is_dir():
        checkpoint = layout
    if deep and checkpoint is None:
        raise UsageError("layout", "only replicas in a checkpoint can be compared", hint="say which checkpoint")
    like = open_checkpoint(base, what="base") if base is not None else None
    found = _layout_at(layout, like, skip, functions)
    check_locals(found)
    elements, replicas = _check_owners(found)
    laid = lay(open_shards(checkpoint, skip=skip), found, like) if checkpoint is not None else None
    if like is not None:
        check_like(found, like) if laid is None else check_places(laid, like)
    if deep and laid is not None:
        _read(laid, jobs, progress)
    return CheckLayoutResult(
        layout=found.what,
        checkpoint=str(checkpoint) if checkpoint is not None else None,
        base=str(base) if base is not None else None,
        is_deep=deep,
        tensors=len(found.tensors),
        elements=elements,
        shards=len(found.shards),
        replica_elements=replicas,
        has_known_shapes=found.has_known_shapes,
    )


def compose_layouts(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    tensors: bool = False,
) -> LayoutResult:
    """Compose two layouts of files: where the local tensors of `first` are the canonical ones of `second`, what is
    written leads from the canonical ones of `first` to the local ones of `second`."""
    return told(compose(read_layout(Path(first)), read_layout(Path(second))), output, tensors=tensors)


def _layout_at(
    path: str | os.PathLike[str], like: Checkpoint | None, skip: Sequence[str], functions: Sequence[str] = ()
) -> Layout:
    check_path(path, "layout")
    return layout_of(path, like=like, skip=skip) if Path(path).is_dir() else read_layout(Path(path), functions)


def _check_owners(layout: Layout) -> tuple[int, int]:
    """How many elements the tensors that boxes lead to have, and how many of them are there again."""
    coverage = Coverage(layout)
    elements = replicas = 0
    forms, read = layout.forms(), layout.read()
    for name, placed in layout.placed().items():
        if name not in read:
            continue
        owners = coverage.owners_of(name, forms[name], placed)
        elements += forms[name].elements
        replicas += sum(placed[number].box.elements for number in owners.replicas)
    return elements, replicas


def _read(laid: LaidCheckpoint, jobs: int | None, progress: Progress | None) -> None:
    """Read all elements; replicas are compared with their owners on the way, and padding with zeros."""
    with Workers(jobs, "check", progress) as workers, laid.reader() as reader, unless_changed(reader):
        check_padding(reader, laid.local, laid.layout)
        tensor_digests(workers, Side(laid, reader, tensor_of_part), in_file_order(laid.tensors))
        reader.check_unchanged()


def told(layout: Layout, output: str | os.PathLike[str] | None, *, tensors: bool) -> LayoutResult:
    """Say what a layout holds, and write it to a new file, if that is asked for."""
    if output is not None:
        write_layout(layout, Path(output))
    locals_of = [(path, name, tensor) for path, found in layout.shards.items() for name, tensor in found.items()]
    placed = sum(placement.box.elements for _, _, tensor in locals_of for placement in tensor.placements)
    return LayoutResult(
        layout=layout.what,
        tensors=len(layout.tensors),
        elements=sum(form.elements for form in layout.tensors.values()),
        shards=len(layout.shards),
        local_tensors=len(locals_of),
        boxes=layout.boxes,
        placed_elements=placed,
        padding=sum(tensor.form.elements for _, _, tensor in locals_of) - placed,
        rules=dict(Counter(rule.kind for rule in layout.rules.values())),
        skipped=tuple(sorted(layout.skipped)),
        has_known_shapes=layout.has_known_shapes,
        output=str(output) if output is not None else None,
        rows=tuple(_facts(*each) for each in locals_of) if tensors else (),
    )


def write_layout(layout: Layout, path: Path) -> None:
    """Write a layout to a new file; ConflictError if there is one."""
    check_path(path, "output")
    with open_folder(path.parent) as folder:
        if folder.status(path.name) is not None:
            raise ConflictError(str(path), "is there already", hint="remove it, or choose another name")
        folder.replace_file(path.name, encode_layout(layout), NEW_FILE_MODE)


def _facts(path: str, name: str, tensor: LocalTensor) -> LocalFacts:
    boxes = tuple(_box(placement.tensor, placement.box) for placement in tensor.placements)
    padding = tensor.form.elements - sum(box.elements for box in boxes)
    return LocalFacts(path, name, tensor.form.dtype, tensor.form.shape, tensor.fill, padding, boxes)


def _box(tensor: str, box: Box) -> BoxFacts:
    axes: Any = tuple((axis.steps, axis.canonical, axis.local) for axis in box.axes)
    return BoxFacts(tensor, box.elements, box.canonical, box.local, axes)
