"""Makes layouts: of the families of models that are known, and of loaders that are probed.

How tensors lie is layout/'s business, what is told of a layout layouts.py's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr_cli.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dcr_cli.checkpoint.json_text import strict_json
from dcr_cli.errors import DamagedError, LocalError, NotFoundError, hint_of
from dcr_cli.layout.document import read_layout
from dcr_cli.layout.fp8 import options_of, plain_forms, with_rules
from dcr_cli.layout.loader import find_loader
from dcr_cli.layout.megatron.assembly import Options, megatron_layout as make_megatron
from dcr_cli.layout.megatron.dividing import Naming
from dcr_cli.layout.megatron.ranks import Sizes
from dcr_cli.layout.opening import forms_of, layout_of_any
from dcr_cli.layout.probe import probe
from dcr_cli.layout.shards import open_shards
from dcr_cli.layout.vllm import sharded_state_layout
from dcr_cli.layouts import LayoutResult, told

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20

Where = str | os.PathLike[str]


def megatron_layout(
    base: Where,
    *,
    config: Where | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    virtual: int = 1,
    layers: Sequence[int] | None = None,
    padded_vocabulary: int | None = None,
    stored: Mapping[str, str] | None = None,
    skip: Sequence[str] = (),
    path: str | None = None,
    fp8: Mapping[str, Any] | None = None,
    has_fused_norms: bool = True,
    has_grouped_experts: bool = True,
    output: Where | None = None,
    tensors: bool = False,
) -> LayoutResult:
    """Make the layout of the shards of Megatron-Core's ranks: a model like `base`, trained with these parallel sizes.

    `config` is its config.json, if not that in `base`. `layers` are those of each pipeline stage, where they are not
    alike. `stored` says by patterns of canonical names which dtypes shards have, {"*": "F32"} for F32 masters; `skip`
    are patterns of canonical tensors that no shard holds; `path` is a pattern of file names. FP8 weights of `base` that
    have scales are made of BF16 ones, with options `fp8` as of `fp8_layout`. Raises as `show_layout`,
    and UsageError where sizes do not divide a tensor, UnsupportedError for a family that is not known.
    """
    opened = open_checkpoint(base, what="base")
    sizes = Sizes(tensor, pipeline, expert, expert_tensor, virtual, tuple(layers) if layers is not None else None)
    naming = Naming(has_fused_norms, has_grouped_experts)
    options = Options(padded_vocabulary, dict(stored or {}), tuple(skip), naming, path, dict(fp8 or {}))
    layout = make_megatron(_config(opened, config), forms_of(opened), sizes, options)
    return told(layout, output, tensors=tensors)


def fp8_layout(
    base: Where,
    shards: Where,
    *,
    config: Where | None = None,
    fp8: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    output: Where | None = None,
    tensors: bool = False,
) -> LayoutResult:
    """Make the layout that leads from `shards` of a trainer, without FP8, to a checkpoint like `base`, in which weights
    are FP8 and have scales.

    `shards` is a checkpoint of the same model, shards that say of themselves what they are, or the file of a layout of
    such. `fp8` are options of the rules (FORMAT 14.3), over those that follow from the base's config.json, or from
    `config`: formula, least_amax, power_of_two, block, through. Raises as `show_layout`, DamagedError where the base
    has no FP8 weights with scales, and UnsupportedError where no rule makes scales of these shapes.
    """
    opened = open_checkpoint(base, what="base")
    has_config = config is not None or _CONFIG in opened.identities
    known = options_of(_config(opened, config)) if has_config else {}
    forms = forms_of(opened)
    is_file = not Path(shards).is_dir()
    plain = read_layout(Path(shards)) if is_file else layout_of_any(shards, plain_forms(forms), skip=skip)
    layout = with_rules(plain, forms, {**known, **(fp8 or {})})
    if not layout.rules:
        raise DamagedError(f"base {base}", "has no FP8 weights with scales", hint="BASE is what receivers hold")
    return told(layout, output, tensors=tensors)


def vllm_layout(
    base: Where,
    shards: Where,
    *,
    tensor: int = 1,
    config: Where | None = None,
    skip: Sequence[str] = (),
    output: Where | None = None,
    tensors: bool = False,
) -> LayoutResult:
    """Make the layout of the files that vLLM has saved as `sharded_state` in `shards`, of a model like `base`, with
    `tensor` tensor parallel ranks.

    Raises as `show_layout`, and UnsupportedError for a family that is not known.
    """
    opened = open_checkpoint(base, what="base")
    found = open_shards(shards, skip=skip)
    layout = sharded_state_layout(_config(opened, config), forms_of(opened), found, tensor_parallel=tensor)
    return told(layout, output, tensors=tensors)


def probe_layout(
    loader: str,
    base: Where,
    *,
    scratch: Where,
    may_lack: Sequence[str] = (),
    tied: Sequence[tuple[str, str]] = (),
    output: Where | None = None,
    tensors: bool = False,
) -> LayoutResult:
    """Derive the layout of what the function `loader`, `module:function`, returns for a folder with a checkpoint like
    `base`, by having it load checkpoints whose values say where they come from, written to a new folder in `scratch`.

    It returns tensors by name, or by file and name for several ranks. What it leaves out has to match a pattern of
    `may_lack`; of two tensors that are `tied` it has one, which then is both. It is imported and run: name only what
    you trust. Raises as `show_layout`, and UnsupportedError where it does more than to move elements.
    """
    opened = open_checkpoint(base, what="base")
    layout = probe(find_loader(loader), opened, scratch=Path(scratch), may_lack=may_lack, tied=tied)
    return told(layout, output, tensors=tensors)


def _config(base: Checkpoint, given: Where | None) -> dict[str, Any]:
    path = Path(given) if given is not None else base.root / _CONFIG
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        hint = "--config names the model's config.json"
        raise NotFoundError(str(path), "no such file", hint=hint) from error
    except OSError as error:
        raise LocalError(str(path), f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    found = strict_json(data, str(path))
    if not isinstance(found, dict):
        raise DamagedError(str(path), "is not a JSON object")
    return found
