"""Receivers that store tensors another way, for tests: two ranks' files cut from a canonical checkpoint by NumPy alone,
and the layout that says so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dcr_cli.layout.box import Box, slice_box, whole_box
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout, LocalTensor, Placement

Tensors = Mapping[str, NDArray[Any]]

VOCABULARY, WIDTH, INNER, RANKS = 30, 8, 12, 2
PADDING = 2


def canonical(seed: int, *, rate: float = 0.1) -> dict[str, NDArray[Any]]:
    """Tensors of version `seed`: those of version 0 with some bits changed."""
    rng = np.random.default_rng(7)
    shapes = {"emb": (VOCABULARY, WIDTH), "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    tensors: dict[str, NDArray[Any]] = {name: _halves(rng, shape) for name, shape in shapes.items()}
    tensors["norm"] = rng.standard_normal(WIDTH).astype(np.float32)
    tensors["wide"] = _halves(rng, (70, 50))
    tensors |= {f"small.{number}": _halves(rng, (3,)) for number in range(5)}
    change = np.random.default_rng(seed)
    for tensor in tensors.values() if seed else ():
        bits = tensor.view(f"u{tensor.itemsize}").reshape(-1)
        chosen = change.choice(bits.size, max(1, int(bits.size * rate)), replace=False)
        bits[chosen] ^= np.array(1 + change.integers(0, 3), bits.dtype)
    return tensors


def _halves(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    return rng.standard_normal(shape).astype(np.float16)


def write_canonical(folder: Path, tensors: Tensors, seed: int = 0) -> Path:
    """The checkpoint, with a config that tells its version."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"version": seed}))
    return folder


def rank_tensors(tensors: Tensors, rank: int) -> dict[str, NDArray[Any]]:
    """What a rank holds: rows, padded; gate over up; columns; columns, transposed; what all have; a buffer."""
    rows, inner, wide = VOCABULARY // RANKS, INNER // RANKS, 50 // RANKS
    mine = slice(rank * inner, (rank + 1) * inner)
    padding = np.zeros((PADDING, WIDTH), np.float16)
    found = {
        "emb": np.concatenate([tensors["emb"][rank * rows : (rank + 1) * rows], padding]),
        "gate_up": np.concatenate([tensors["gate"][mine], tensors["up"][mine]]),
        "down": np.ascontiguousarray(tensors["down"][:, mine]),
        "wide": np.ascontiguousarray(tensors["wide"][:, rank * wide : (rank + 1) * wide].T),
        "norm": tensors["norm"],
        "buffer": np.arange(5, dtype=np.float32) + rank,
    }
    return found | {name: tensors[name] for name in tensors if name.startswith("small.")}


def path_of(rank: int) -> str:
    return f"model-rank-{rank}-part-0.safetensors"


def write_ranks(folder: Path, tensors: Tensors, seed: int = 0) -> Path:
    """The ranks' files of a checkpoint, with its config."""
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        save_file(rank_tensors(tensors, rank), folder / path_of(rank))
    (folder / "config.json").write_text(json.dumps({"version": seed}))
    return folder


def make_layout() -> Layout:
    """The layout of these ranks."""
    forms = {
        name: Form("F32" if tensor.itemsize == 4 else "F16", tensor.shape) for name, tensor in canonical(0).items()
    }
    return Layout("ranks", forms, {path_of(rank): _local_tensors(forms, rank) for rank in range(RANKS)})


def _local_tensors(forms: Mapping[str, Form], rank: int) -> dict[str, LocalTensor]:
    rows, inner, wide = VOCABULARY // RANKS, INNER // RANKS, 50 // RANKS
    whole = {
        name: LocalTensor(form, (Placement(name, whole_box(form.elements)),))
        for name, form in forms.items()
        if name == "norm" or name.startswith("small.")
    }
    part = inner * WIDTH
    return {
        "emb": _local(
            (rows + PADDING, WIDTH), ("emb", slice_box((VOCABULARY, WIDTH), (rank * rows, 0), (rows, WIDTH))), fill=ZERO
        ),
        "gate_up": _local(
            (2 * inner, WIDTH),
            ("gate", Box.make([(part, 1, 1)], rank * part, 0)),
            ("up", Box.make([(part, 1, 1)], rank * part, part)),
        ),
        "down": _local((WIDTH, inner), ("down", slice_box((WIDTH, INNER), (0, rank * inner), (WIDTH, inner)))),
        "wide": _local((wide, 70), ("wide", Box.make([(wide, 1, 70), (70, 50, 1)], rank * wide, 0))),
        "buffer": LocalTensor(Form("F32", (5,)), ()),
        **whole,
    }


def _local(shape: tuple[int, ...], *boxes: tuple[str, Box], fill: str = KEEP) -> LocalTensor:
    return LocalTensor(Form("F16", shape), tuple(Placement(*box) for box in boxes), fill)


def write_layout(folder: Path, layout: Layout | None = None) -> Path:
    path = folder / "layout.json"
    path.write_bytes(encode_layout(layout or make_layout()))
    return path
