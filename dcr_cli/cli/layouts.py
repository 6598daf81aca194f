"""The commands that work on layouts: layout show, check, compose."""

from __future__ import annotations

from typing import Annotated

import typer

from dcr_cli.cli.options import Function, Skip, command_of, groups, path_of
from dcr_cli.cli.session import Session

GROUP = "layout"
groups[GROUP] = "Layouts: how tensors in the shards of ranks relate to those of a checkpoint."

Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the layout to this new file.")
]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every local tensor with its boxes.")]
Given = Annotated[
    str, typer.Argument(metavar="LAYOUT", help="A layout file, or a folder of shards that say of themselves.")
]


@command_of(GROUP, "show")
def show(
    session: Session,
    layout: Given,
    output: Output = None,
    tensors: Tensors = False,
    skip: Skip = None,
) -> int:
    """Say what a layout holds: tensors, shards, boxes, padding, rules."""
    from dcr_cli.layouts import show_layout
    from dcr_cli.report import layouts

    where = path_of(output, "--output") if output is not None else None
    result = show_layout(path_of(layout, "LAYOUT"), output=where, tensors=tensors, skip=skip or ())
    return session.finish(result, lambda: layouts.layout_lines(result))


@command_of(GROUP, "check")
def check(
    session: Session,
    layout: Given,
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[CHECKPOINT]", help="Shards that have to be those of the layout.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="CHECKPOINT", help="The tensors have to be those of this checkpoint."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of CHECKPOINT, and compare what is there more than once.")
    ] = False,
    skip: Skip = None,
    function: Function = None,
) -> int:
    """Check that a layout owns every element exactly once, and that shards are those that it tells of; 4 if not."""
    from dcr_cli.layouts import check_layout
    from dcr_cli.report import layouts

    with session.progress() as progress:
        result = check_layout(
            path_of(layout, "LAYOUT"),
            path_of(checkpoint, "CHECKPOINT") if checkpoint is not None else None,
            base=path_of(base, "--base") if base is not None else None,
            deep=deep,
            skip=skip or (),
            functions=function or (),
            jobs=session.jobs,
            progress=progress,
        )
    return session.finish(result, lambda: layouts.check_lines(result))


@command_of(GROUP, "compose")
def compose(
    session: Session,
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A layout file.")],
    second: Annotated[
        str, typer.Argument(metavar="SECOND", help="A layout file whose tensors are the local ones of FIRST.")
    ],
    output: Output = None,
    tensors: Tensors = False,
) -> int:
    """Compose two layouts into the one that leads where FIRST and then SECOND lead."""
    from dcr_cli.layouts import compose_layouts
    from dcr_cli.report import layouts

    where = path_of(output, "--output") if output is not None else None
    result = compose_layouts(path_of(first, "FIRST"), path_of(second, "SECOND"), output=where, tensors=tensors)
    return session.finish(result, lambda: layouts.layout_lines(result))
