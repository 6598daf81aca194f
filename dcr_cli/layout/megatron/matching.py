"""Which local tensors a model has, found by the canonical tensors that there are. Pure.

How ranks divide them is dividing.py's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.layout.layout import Form
from dcr_cli.layout.megatron.entries import EXPERT, LAYER, Config, Entry, without_numbers
from dcr_cli.layout.megatron.families import Family
from dcr_cli.layout.megatron.mappings import Mapping as Divides, vocabulary
from dcr_cli.layout.megatron.ranks import Sizes

WHAT = "layout of Megatron-Core"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
HEAD = "lm_head.weight"
_UNKNOWN = "--skip-tensor leaves out those that training does not change: they stay as the base has them"
_FIELDS = {LAYER: r"(?P<layer>\d+)", EXPERT: r"(?P<expert>\d+)"}


@dataclass(frozen=True, slots=True)
class Local:
    """A local tensor before it is divided: which entry it is of, its canonical tensors, which layer and expert it has.

    `also` are canonical tensors that are the same as its only one.
    """

    entry: Entry
    names: tuple[str, ...]
    layer: int | None = None
    expert: int | None = None
    also: tuple[str, ...] = ()


def find_vocabulary(
    config: Config, family: Family, model: Mapping[str, Form], sizes: Sizes, padded: int | None
) -> Iterator[Local]:
    """The embedding and the output layer, which have rows for every token: `padded` rows, or the fewest that all ranks
    can divide. DamagedError if the base has no embedding, or a copy of either that is of another form."""
    embedding = model.get(family.embedding)
    if embedding is None:
        raise DamagedError(WHAT, f"the base has no tensor {shown(family.embedding)}")
    rows = padded if padded is not None else -(-embedding.shape[0] // sizes.tensor) * sizes.tensor
    mapping = partial(vocabulary, rows=rows)
    embeddings, heads = (
        tuple(name for name in names if name in model) for names in (family.embedding_copies, family.head_copies)
    )
    if not config.is_set("tie_word_embeddings", family.is_tied) and HEAD in model:
        yield _same(EMBEDDING, mapping, model, (family.embedding, *embeddings))
        yield _same(OUTPUT, mapping, model, (HEAD, *heads))
        return
    names = (family.embedding, *((HEAD,) if HEAD in model else ()), *embeddings, *heads)
    for local in (EMBEDDING, OUTPUT) if sizes.pipeline > 1 else (EMBEDDING,):
        yield _same(local, mapping, model, names)


def _same(local: str, mapping: Divides, model: Mapping[str, Form], names: tuple[str, ...]) -> Local:
    """A local tensor that is several canonical ones, which have to be of one form."""
    first, *also = names
    for name in also:
        if model[name] != model[first]:
            raise DamagedError(f"tensor {shown(name)}", f"is {model[name]}, but tied to one that is {model[first]}")
    return Local(Entry(local, mapping, (first,)), (first,), also=tuple(also))


def find_locals(entries: Iterable[Entry], model: Mapping[str, Form], layers: int) -> Iterator[Local]:
    """All others. DamagedError where a tensor is there, but not those that belong to it."""
    alike: dict[str, list[str]] = {}
    for name in model:
        alike.setdefault(without_numbers(name), []).append(name)
    for entry in entries:
        first = entry.canonical[0]
        pattern = re.escape(first)
        for each, group in _FIELDS.items():
            pattern = pattern.replace(re.escape(each), group)
        matches = (re.fullmatch(pattern, name) for name in alike.get(without_numbers(first), ()))
        for found in (match.groupdict() for match in matches if match is not None):
            layer = int(found["layer"]) if "layer" in found else None
            if layer is not None and layer >= layers:
                continue
            yield from _locals(entry, model, layer, int(found["expert"]) if "expert" in found else None)


def _locals(entry: Entry, model: Mapping[str, Form], layer: int | None, expert: int | None) -> Iterator[Local]:
    """The local tensors of an entry in a layer: one, or one for each expert of a tensor that has all of them."""

    def name(pattern: str) -> str:
        return pattern.replace(LAYER, str(layer)).replace(EXPERT, str(expert))

    if entry.within is not None and name(entry.within) not in model:
        return
    if entry.without is not None and name(entry.without) in model:
        return
    names = tuple(map(name, entry.canonical))
    missing = [each for each in names if each not in model]
    if missing:
        raise DamagedError(f"tensor {shown(names[0])}", f"the base lacks what belongs to it: {listed(missing)}")
    if entry.seen_as is None:
        yield Local(entry, names, layer, expert)
        return
    for number in range(model[names[0]].shape[0]):
        yield Local(entry, names, layer, number)


def check_all_found(model_type: str, model: Mapping[str, Form], locals_: Iterable[Local]) -> None:
    """Raise UnsupportedError about canonical tensors that are in no local one."""
    matched = {name for local in locals_ for name in (*local.names, *local.also)}
    if unknown := [name for name in model if name not in matched]:
        facts = f"does not know where these tensors of a {shown(model_type)} lie: {listed(unknown)}"
        raise UnsupportedError(WHAT, facts, hint=_UNKNOWN)
