"""Which base tensor each target tensor is coded against, and which target tensors are equal (pure, but for a sampler).

A tensor keeps its own name as its source where dtype and element count allow; others are matched by their bytes.
It reads nothing itself: `sample` gives a few bytes of a tensor, `digest` the digest of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dcr_cli.checkpoint.checkpoint import Checkpoint, Tensor

# Tensors below this are not worth two reads to find out that they are equal to another.
TWIN_BYTES = 4096
# Above this many comparisons of samples, equal shapes are paired in canonical order.
MAX_COMPARISONS = 1_000_000

Sampler = Callable[[Checkpoint, Tensor], bytes]
Digester = Callable[[Checkpoint, Tensor], bytes]


@dataclass(frozen=True, slots=True)
class Matching:
    """`sources`: target name to base name, or None. `twins`: target name to an earlier one with the same changes."""

    sources: Mapping[str, str | None]
    twins: Mapping[str, str]


def match(base: Checkpoint, target: Checkpoint, sample: Sampler, digest: Digester) -> Matching:
    """Find sources and twins for all tensors of `target`."""
    sources: dict[str, str | None] = {}
    orphans: list[Tensor] = []
    for tensor in target.tensors:
        own = base.by_name.get(tensor.name)
        if own is not None and _kind(own) == _kind(tensor):
            sources[tensor.name] = own.name
        else:
            sources[tensor.name] = None
            if own is None and tensor.bytes:
                orphans.append(tensor)
    if orphans:
        sources.update(_adopt(base, target, orphans, sample))
    twins: dict[str, str] = {}
    for tensor, twin in _equal_pairs(target, sample, digest):
        source, other = sources[tensor.name], sources[twin.name]
        if source != other and (source is None or other is None or not _is_equal(base, source, other, digest)):
            sources[tensor.name] = other
        twins[tensor.name] = twin.name
    return Matching(sources, twins)


def _kind(tensor: Tensor) -> tuple[str, int]:
    return tensor.dtype.name, tensor.bytes


def _is_equal(base: Checkpoint, one: str, other: str, digest: Digester) -> bool:
    return digest(base, base.by_name[one]) == digest(base, base.by_name[other])


def _equal_pairs(target: Checkpoint, sample: Sampler, digest: Digester) -> list[tuple[Tensor, Tensor]]:
    """Pairs (tensor, the first one that it equals), in canonical order."""
    by_kind: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for tensor in target.tensors:
        if tensor.bytes >= TWIN_BYTES:
            by_kind[_kind(tensor)].append(tensor)
    pairs = []
    for group in by_kind.values():
        if len(group) < 2:
            continue
        by_sample: dict[bytes, list[Tensor]] = defaultdict(list)
        for tensor in group:
            by_sample[sample(target, tensor)].append(tensor)
        for alike in by_sample.values():
            first_of: dict[bytes, Tensor] = {}
            for tensor in alike if len(alike) > 1 else ():
                first = first_of.setdefault(digest(target, tensor), tensor)
                if first is not tensor:
                    pairs.append((tensor, first))
    return sorted(pairs, key=lambda pair: pair[0].name.encode())


def _adopt(base: Checkpoint, target: Checkpoint, orphans: list[Tensor], sample: Sampler) -> dict[str, str]:
    """Sources for new names: a vanished tensor with similar bytes, else any base tensor with the same sample."""
    vanished: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    present: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for tensor in base.tensors:
        (present if tensor.name in target.by_name else vanished)[_kind(tensor)].append(tensor)
    wanted: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for tensor in orphans:
        wanted[_kind(tensor)].append(tensor)
    sources: dict[str, str] = {}
    for kind, tensors in wanted.items():
        gone = vanished[kind]
        if len(gone) * len(tensors) > MAX_COMPARISONS:
            sources.update((new.name, old.name) for new, old in zip(tensors, gone, strict=False))
            continue
        gone_samples = [(old, np.frombuffer(sample(base, old), np.uint8)) for old in gone]
        known = {sample(base, old): old for old in present[kind]} if len(present[kind]) <= MAX_COMPARISONS else {}
        for new in tensors:
            taken = sample(target, new)
            bytes_of = np.frombuffer(taken, np.uint8)
            # Unrelated weights agree in a third of their bytes by chance, a step apart in nearly all.
            best, score = None, len(bytes_of) // 2
            for old, other in gone_samples:
                same = int(np.count_nonzero(bytes_of == other))
                if same > score:
                    best, score = old, same
            best = best if best is not None else known.get(taken)
            if best is not None:
                sources[new.name] = best.name
    return sources
