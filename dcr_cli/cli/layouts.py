"""The commands that work on layouts: layout show, check, compose, and those that make them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from dcr_cli.checkpoint.names import shown
from dcr_cli.cli.options import Function, Skip, command_of, groups, path_of
from dcr_cli.cli.session import Session
from dcr_cli.errors import UsageError

GROUP = "layout"
groups[GROUP] = "Say, check and make what shards of ranks are parts of."

Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the layout to this new file.")
]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every local tensor with its boxes.")]
Given = Annotated[
    str, typer.Argument(metavar="LAYOUT", help="A layout file, or a folder of shards that say of themselves.")
]


LikeBase = Annotated[
    str | None,
    typer.Option("--base", metavar="CHECKPOINT", help="The tensors have to be those of this checkpoint."),
]


@command_of(GROUP, "show")
def show(
    session: Session,
    layout: Given,
    base: LikeBase = None,
    output: Output = None,
    tensors: Tensors = False,
    skip: Skip = None,
) -> int:
    """Say what a layout holds. Tensors, shards, boxes, padding, rules."""
    from dcr_cli.layouts import show_layout
    from dcr_cli.report import layouts

    where = path_of(output, "--output") if output is not None else None
    like = path_of(base, "--base") if base is not None else None
    result = show_layout(path_of(layout, "LAYOUT"), base=like, output=where, tensors=tensors, skip=skip or ())
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
        typer.Option(
            "--base",
            metavar="CHECKPOINT",
            help="Its tensors have to be those of the layout, and no shard in another's place.",
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Read all bytes: copies have to agree, and padding to be as the layout says.",
        ),
    ] = False,
    skip: Skip = None,
    function: Function = None,
) -> int:
    """Check a layout, and shards with it. Each element is owned once, the shards are those it tells of; 4 if not."""
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
    """Compose two layouts into one. It leads where FIRST and then SECOND lead.

    Such as: dcr layout compose engine.json ranks-of-engine.json -o ranks.json, where the tensors that engine.json makes
    of the checkpoint's are those that ranks-of-engine.json divides between ranks.
    """
    from dcr_cli.layouts import compose_layouts
    from dcr_cli.report import layouts

    where = path_of(output, "--output") if output is not None else None
    result = compose_layouts(path_of(first, "FIRST"), path_of(second, "SECOND"), output=where, tensors=tensors)
    return session.finish(result, lambda: layouts.layout_lines(result))


Base = Annotated[str, typer.Argument(metavar="BASE", help="A canonical checkpoint of the model: its tensors' shapes.")]
Config = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="The model's config. [default: config.json in BASE]")
]


Fp8 = Annotated[
    list[str] | None,
    typer.Option(
        "--fp8",
        metavar="OPTION=VALUE",
        help="How FP8 weights of BASE were made, as formula='x * (448 / a)', least_amax=1e-4, power_of_two=true or "
        "block=[64,64]; may be repeated. [default: as in BASE's config, else as DeepSeek's: x / s, blocks of 128x128]",
    ),
]


@command_of(GROUP, "megatron")
def megatron(
    session: Session,
    base: Base,
    config: Config = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option("--pp", metavar="N", help="Pipeline parallel size.")] = 1,
    ep: Annotated[int, typer.Option("--ep", metavar="N", help="Expert parallel size.")] = 1,
    etp: Annotated[
        int | None, typer.Option("--etp", metavar="N", help="Tensor parallel size of experts. [default: --tp]")
    ] = None,
    vpp: Annotated[int, typer.Option("--vpp", metavar="N", help="Virtual stages of each pipeline stage.")] = 1,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="N,N,...", help="Layers of each stage, where they differ.")
    ] = None,
    padded_vocab: Annotated[
        int | None, typer.Option("--padded-vocab", metavar="N", help="Rows of embeddings with their padding.")
    ] = None,
    stored: Annotated[
        list[str] | None,
        typer.Option(
            "--stored",
            metavar="[PATTERN=]DTYPE",
            help="The dtype of shards, as F32 of masters: that of tensors that match PATTERN, as '*norm*=BF16', the "
            "first one that does, or of all others; may be repeated.",
        ),
    ] = None,
    skip_tensor: Annotated[
        list[str] | None,
        typer.Option(
            "--skip-tensor", metavar="PATTERN", help="Canonical tensors that are in no shard; may be repeated."
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            metavar="PATTERN",
            help="How the files of ranks are named, with fields {tensor}, {pipeline}, {expert} and {expert_tensor}, "
            "numbers from 0. [default: mp_rank_{tensor:02d}/model.safetensors, its folder with _{pipeline:03d} and "
            "_{expert:03d} where there are several of these ranks]",
        ),
    ] = None,
    fp8: Fp8 = None,
    separate_norms: Annotated[
        bool, typer.Option("--separate-norms", help="Norms are modules of their own, as without Transformer Engine.")
    ] = False,
    separate_experts: Annotated[
        bool, typer.Option("--separate-experts", help="Each expert is a module of its own.")
    ] = False,
    output: Output = None,
    tensors: Tensors = False,
) -> int:
    """Make the layout of Megatron-Core's ranks. Of the shards of a model like BASE."""
    from dcr_cli.families import megatron_layout
    from dcr_cli.report import layouts

    result = megatron_layout(
        path_of(base, "BASE"),
        config=path_of(config, "--config") if config is not None else None,
        tensor=tp,
        pipeline=pp,
        expert=ep,
        expert_tensor=etp,
        virtual=vpp,
        layers=_numbers(layers) if layers is not None else None,
        padded_vocabulary=padded_vocab,
        stored=_stored(stored or ()),
        skip=skip_tensor or (),
        path=path,
        fp8=_fp8(fp8 or ()),
        has_fused_norms=not separate_norms,
        has_grouped_experts=not separate_experts,
        output=path_of(output, "--output") if output is not None else None,
        tensors=tensors,
    )
    return session.finish(result, lambda: layouts.layout_lines(result))


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError("--layers", "numbers of layers expected", hint="such as --layers 7,8,8,7")
    return [int(part) for part in parts]


def _stored(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        pattern, equals, dtype = text.rpartition("=")
        key = pattern if equals else "*"
        if not key or not dtype or key in found:
            facts = f"[PATTERN=]DTYPE expected, each pattern once, one DTYPE alone, found {shown(text)}"
            raise UsageError("--stored", facts, hint="such as --stored F32, or --stored '*norm*=BF16'")
        found[key] = dtype
    return found


def _fp8(given: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in given:
        option, equals, value = text.partition("=")
        if not option or not equals or option in found:
            facts = f"OPTION=VALUE expected, each option once, found {shown(text)}"
            raise UsageError("--fp8", facts, hint="such as --fp8 power_of_two=true")
        try:
            found[option] = json.loads(value)
        except ValueError:
            found[option] = value
    return found


@command_of(GROUP, "fp8")
def fp8(
    session: Session,
    base: Annotated[str, typer.Argument(metavar="BASE", help="A checkpoint with FP8 weights and their scales.")],
    shards: Annotated[
        str,
        typer.Argument(
            metavar="SHARDS",
            help="The same model without FP8: a checkpoint, shards that say of themselves, or a layout file of others.",
        ),
    ],
    config: Config = None,
    fp8: Fp8 = None,
    skip: Skip = None,
    output: Output = None,
    tensors: Tensors = False,
) -> int:
    """Make the layout that reads SHARDS as FP8.

    They hold BF16, or F32 masters, and are read as a checkpoint like BASE. Where BASE has NAME and NAME_scale_inv, or
    NAME_scale, both are made of NAME in SHARDS, by blocks or by rows.
    """
    from dcr_cli.families import fp8_layout
    from dcr_cli.report import layouts

    result = fp8_layout(
        path_of(base, "BASE"),
        path_of(shards, "SHARDS"),
        config=path_of(config, "--config") if config is not None else None,
        fp8=_fp8(fp8 or ()),
        skip=skip or (),
        output=path_of(output, "--output") if output is not None else None,
        tensors=tensors,
    )
    return session.finish(result, lambda: layouts.layout_lines(result))


@command_of(GROUP, "vllm-sharded-state")
def vllm_sharded_state(
    session: Session,
    base: Base,
    shards: Annotated[str, typer.Argument(metavar="SHARDS", help="The folder that vLLM has saved.")],
    config: Config = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor parallel size.")] = 1,
    skip: Skip = None,
    output: Output = None,
    tensors: Tensors = False,
) -> int:
    """Make the layout of vLLM's sharded_state. Of the files that it saves of a model like BASE."""
    from dcr_cli.families import vllm_layout
    from dcr_cli.report import layouts

    result = vllm_layout(
        path_of(base, "BASE"),
        path_of(shards, "SHARDS"),
        tensor=tp,
        config=path_of(config, "--config") if config is not None else None,
        skip=skip or (),
        output=path_of(output, "--output") if output is not None else None,
        tensors=tensors,
    )
    return session.finish(result, lambda: layouts.layout_lines(result))


@command_of(GROUP, "probe")
def probe(
    session: Session,
    loader: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="Loads a checkpoint's folder and returns its tensors.")
    ],
    base: Base,
    scratch: Annotated[
        str | None, typer.Option("--scratch", metavar="FOLDER", help="Where to put checkpoints for a while.")
    ] = None,
    may_lack: Annotated[
        list[str] | None,
        typer.Option("--may-lack", metavar="PATTERN", help="Tensors that it may leave out; may be repeated."),
    ] = None,
    tied: Annotated[
        list[str] | None,
        typer.Option("--tied", metavar="A=B", help="Tensors for both of which it has one; may be repeated."),
    ] = None,
    output: Output = None,
    tensors: Tensors = False,
) -> int:
    """Derive the layout of any loader. It loads checkpoints whose values say where they come from.

    It returns tensors by name, or by file and name, of NumPy or PyTorch. BF16 may be NumPy's uint16, and a dtype of
    F8 its uint8, with the same bits, if BASE has no other dtype that these could be.
    """
    from dcr_cli.families import probe_layout
    from dcr_cli.report import layouts

    result = probe_layout(
        loader,
        path_of(base, "BASE"),
        scratch=path_of(scratch, "--scratch") if scratch is not None else os.environ.get("TMPDIR") or "/tmp",
        may_lack=may_lack or (),
        tied=[_pair(text) for text in tied or ()],
        output=path_of(output, "--output") if output is not None else None,
        tensors=tensors,
    )
    return session.finish(result, lambda: layouts.layout_lines(result))


def _pair(text: str) -> tuple[str, str]:
    one, _, other = text.partition("=")
    if not one or not other:
        facts = f"A=B expected, found {shown(text)}"
        raise UsageError("--tied", facts, hint="such as --tied model.embed_tokens.weight=lm_head.weight")
    return one, other
