"""The layout of the shards of Megatron-Core's ranks, made from a model's config.json, its canonical tensors and sizes.

Which local tensors there are is matching.py's, how ranks divide them dividing.py's, which ranks there are ranks.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.layout.fp8 import CAST, options_of, plain_forms, with_rules
from dcr_cli.layout.layout import Form, Layout, Rule
from dcr_cli.layout.megatron.dividing import Divider, Naming
from dcr_cli.layout.megatron.entries import Config
from dcr_cli.layout.megatron.families import family_of
from dcr_cli.layout.megatron.matching import WHAT, Local, check_all_found, find_locals, find_vocabulary
from dcr_cli.layout.megatron.ranks import Sizes
from dcr_cli.layout.residual.rules import HALVES

# The pattern of what no other one is of.
ALL = "*"
_NAMES = "names are those of the base, such as model.norm.weight; dcr inspect --tensors lists them"


@dataclass(frozen=True, slots=True)
class Options:
    """How a trainer was set up besides its parallel sizes.

    `padded_vocabulary` is how many rows embeddings have, by default the fewest that all ranks can divide. `stored`
    says by patterns of canonical names which dtypes shards have, such as {"*": "F32"} where they hold F32 masters; of
    several that match the first one counts, and `*` wherever it stands only where no other one does. `skip` are
    patterns of canonical tensors that no shard holds. `path` names the files of ranks, as Sizes.paths() says. `fp8` are
    options of the rules that make FP8 weights, besides what config.json says of them.
    """

    padded_vocabulary: int | None = None
    stored: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    naming: Naming = field(default_factory=Naming)
    path: str | None = None
    fp8: Mapping[str, Any] = field(default_factory=dict)


def megatron_layout(
    config: Mapping[str, Any], forms: Mapping[str, Form], sizes: Sizes, options: Options | None = None
) -> Layout:
    """Make the layout of shards in which every rank has written its own tensors: what `state_dict()` names, without
    `_extra_state`.

    `forms` are those of the canonical tensors, taken from a checkpoint; shards have FP8 weights that have scales in
    BF16, and these are made of them. There is a file for each of Sizes.ranks().
    Where there are several expert ranks, each of their files has the dense tensors of its tensor rank too: the first
    file in the order of ranks owns them, the others hold replicas. Layers are numbered from 0 in each pipeline stage,
    experts in each expert rank. With virtual stages, names begin with the stage's, model0, model1 and so on. A tied
    embedding is in the last stage too, as the output layer; and any embedding is, where that stage predicts more than
    one token.

    UsageError, naming the tensor, where sizes do not divide it or no rule makes it of what is stored; naming the
    pattern, where it is of no tensor. UnsupportedError for an unknown family, and for
    canonical tensors of which nobody knows where they lie. DamagedError where config.json and the tensors contradict
    each other.
    """
    setup = options if options is not None else Options()
    known = Config(config)
    family = family_of(known)
    chunks, files = sizes.chunks(known.layers), sizes.paths(setup.path)
    plain = plain_forms(forms)
    skipped = _skipped(plain, setup.skip)
    model = {name: form for name, form in plain.items() if name not in skipped}
    found = [
        *find_vocabulary(known, family, model, sizes, setup.padded_vocabulary),
        *find_locals(family.entries, model, known.layers),
    ]
    check_all_found(known.model_type, model, found)
    stored = dict(_stored(found, model, setup.stored))
    rules = dict(_rules(found, model, stored))
    shards = Divider(sizes, stored, chunks, setup.naming).divide(found, files)
    layout = Layout(WHAT, plain, shards, skipped, {name: stored[name] for name in rules}, rules)
    return with_rules(layout, forms, {**options_of(config), **setup.fp8})


def _skipped(forms: Mapping[str, Form], patterns: Iterable[str]) -> frozenset[str]:
    """The canonical tensors that match one of the patterns; UsageError about one that none matches."""
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in forms if fnmatchcase(name, pattern)}
        if not matches:
            raise UsageError(f"pattern {shown(pattern)}", "no tensor of the base matches it", hint=_NAMES)
        found |= matches
    return frozenset(found)


def _stored(found: Iterable[Local], model: Mapping[str, Form], chosen: Mapping[str, str]) -> Iterator[tuple[str, Form]]:
    """The forms of what shards hold of each canonical tensor. UsageError about a pattern that is of none."""
    patterns = [pattern for pattern in chosen if pattern != ALL]
    idle = set(patterns)
    for dtype in chosen.values():
        if dtype not in DTYPES:
            facts = f"is none of {', '.join(DTYPES)}"
            raise UsageError(f"dtype {shown(dtype)}", facts, hint="F32, where shards hold masters")
    for local in found:
        for name in (*local.names, *local.also):
            form = model[name]
            pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
            idle.discard(pattern or ALL)
            dtype = chosen[pattern] if pattern is not None else local.entry.stored or chosen.get(ALL, form.dtype)
            if DTYPES[form.dtype].is_packed or DTYPES[dtype].is_packed:
                facts = f"is {form.dtype}, in shards {dtype}, and elements that share bytes cannot be divided"
                raise UnsupportedError(f"tensor {shown(name)}", facts)
            yield name, Form(dtype, form.shape)
    for pattern in (pattern for pattern in patterns if pattern in idle):
        is_late = any(fnmatchcase(name, pattern) for name in model)
        facts = "others before it match every tensor that it does" if is_late else "no tensor of the base matches it"
        raise UsageError(f"pattern {shown(pattern)}", facts, hint=_NAMES)


def _rules(found: Iterable[Local], model: Mapping[str, Form], stored: Mapping[str, Form]) -> Iterator[tuple[str, Rule]]:
    """Which canonical tensors are made of what shards hold. The dtype of that is its form's: any rule may be a cast
    too."""
    for local in found:
        for name in (*local.names, *local.also):
            if local.entry.rule is not None:
                yield name, Rule(local.entry.rule, name, _through(stored[name], model[name]))
            elif stored[name] != model[name]:
                yield name, Rule(CAST, name)


def _through(stored: Form, canonical: Form) -> dict[str, str]:
    """Masters are rounded to what the trainer's parameters are before a rule computes, as Megatron-Core does."""
    is_rounded = stored.dtype == "F32" and canonical.dtype in HALVES
    return {"through": canonical.dtype} if is_rounded else {}
