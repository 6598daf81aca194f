"""What it costs to read shards of ranks through a layout: `diff` on them beside `diff` on the same bytes dense.

Each kind of mapping lays all matrices of the target out anew. Every delta is compared with the dense one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench_child import Finished, dcr
from bench_clock import Times
from bench_files import check_same_files, file_system
from bench_pairs import Named, Pair, framed
from bench_report import Report, at_most
from numpy.typing import NDArray

MIB = 1 << 20
RANKS = 8
LARGE, SMALL = 2048, 256
HEAD_ROWS = 128
FUSED = 3
GOAL = 1.5

Matrix = NDArray[np.uint16]
Box = list[object]
Matrices = Sequence[tuple[str, Matrix]]


def matrices(elements: int) -> list[Named]:
    """Square matrices of about so many elements in all, as many as all kinds can divide."""
    together = FUSED * RANKS
    side = LARGE if elements >= together * LARGE**2 else SMALL
    count = max(1, elements // side**2 // together) * together
    return [(f"layers.{number}.weight", (side, side)) for number in range(count)]


@dataclass(slots=True)
class Shard:
    """A shard of a rank, and what a layout says of its tensors."""

    tensors: dict[str, Matrix] = field(default_factory=dict)
    boxes: dict[str, list[Box]] = field(default_factory=dict)

    def add(self, name: str, tensor: Matrix, boxes: list[Box]) -> None:
        self.tensors[name], self.boxes[name] = tensor, boxes


def _rows(given: Matrices, shards: Sequence[Shard]) -> None:
    for name, matrix in given:
        count = matrix.size // RANKS
        for rank, part in enumerate(np.split(matrix, RANKS)):
            shards[rank].add(name, part, [[name, rank * count, 0, [[count, 1, 1]]]])


def _columns(given: Matrices, shards: Sequence[Shard]) -> None:
    for name, matrix in given:
        rows, columns = matrix.shape
        width = columns // RANKS
        for rank, part in enumerate(np.split(matrix, RANKS, axis=1)):
            shards[rank].add(name, part, [[name, rank * width, 0, [[rows, columns, width], [width, 1, 1]]]])


def _interleaved(given: Matrices, shards: Sequence[Shard]) -> None:
    """Query, key and value of a head, then those of the next one."""
    for number, fused in enumerate(_fused(given, FUSED)):
        rows, columns = fused[0][1].shape
        heads, size = rows // HEAD_ROWS, HEAD_ROWS * columns
        parts = np.stack([matrix.reshape(heads, HEAD_ROWS, columns) for _, matrix in fused], axis=1)
        boxes: list[Box] = [
            [name, 0, at * size, [[heads, size, FUSED * size], [size, 1, 1]]] for at, (name, _) in enumerate(fused)
        ]
        shards[number % RANKS].add(f"qkv.{number}", parts.reshape(FUSED * rows, columns), boxes)


def _gate_up(given: Matrices, shards: Sequence[Shard]) -> None:
    for number, fused in enumerate(_fused(given, 2)):
        count = fused[0][1].size // RANKS
        for rank in range(RANKS):
            parts = [np.split(matrix, RANKS)[rank] for _, matrix in fused]
            boxes: list[Box] = [[name, rank * count, at * count, [[count, 1, 1]]] for at, (name, _) in enumerate(fused)]
            shards[rank].add(f"gate_up.{number}", np.concatenate(parts), boxes)


def _transposed(given: Matrices, shards: Sequence[Shard]) -> None:
    for number, (name, matrix) in enumerate(given):
        rows, columns = matrix.shape
        box: Box = [name, 0, 0, [[rows, columns, 1], [columns, 1, rows]]]
        shards[number % RANKS].add(name, np.ascontiguousarray(matrix.T), [box])


def _experts(given: Matrices, shards: Sequence[Shard]) -> None:
    """Experts in one tensor, each transposed."""
    for number, stacked in enumerate(_fused(given, RANKS)):
        rows, columns = stacked[0][1].shape
        stack = np.concatenate([matrix.T for _, matrix in stacked])
        boxes: list[Box] = [
            [name, 0, at * rows * columns, [[rows, columns, 1], [columns, 1, rows]]]
            for at, (name, _) in enumerate(stacked)
        ]
        shards[number % RANKS].add(f"experts.{number}", stack, boxes)


def _alternating(given: Matrices, shards: Sequence[Shard]) -> None:
    """Gate and up alternate in the columns, and lie one after the other here."""
    for number, (name, matrix) in enumerate(given):
        rows, columns = matrix.shape
        half = columns // 2
        parts = np.concatenate([matrix[:, at::2] for at in range(2)])
        boxes: list[Box] = [[name, at, at * rows * half, [[rows, columns, half], [half, 2, 1]]] for at in range(2)]
        shards[number % RANKS].add(name, parts, boxes)


KINDS: Mapping[str, Callable[[Matrices, Sequence[Shard]], None]] = {
    f"rows, {RANKS} ranks": _rows,
    f"columns, {RANKS} ranks": _columns,
    "query, key, value by heads": _interleaved,
    "gate above up": _gate_up,
    "gate and up alternating": _alternating,
    "transposed": _transposed,
    "experts stacked, transposed": _experts,
}


def layouts(report: Report, place: Path, pair: Pair, *, rounds: int, jobs: int) -> None:
    """Add a row for each kind of mapping: its time beside that of the dense target, in turn."""
    dense = place / "dense-delta"
    dcr("diff", str(pair.base), str(pair.target), "-o", str(dense), jobs=jobs)
    title = f"{pair.bytes / 2**20:,.0f} MiB, {pair.change}, {jobs} threads, {file_system(place)}"
    report.begin("layouts", f"{title}, best of {rounds} rounds in turn with the dense target")
    given = _read(pair.target)
    for kind, lay_out in KINDS.items():
        shards = [Shard() for _ in range(RANKS)]
        lay_out(given, shards)
        folder, layout = place / "ranks", place / "layout.json"
        layout.write_text(json.dumps(_write(folder, given, shards)))
        plain, laid = _in_turn(place, pair, folder, layout, rounds=rounds, jobs=jobs)
        shutil.rmtree(folder)
        ours, theirs = (Times(tuple(one.seconds for one in runs)) for runs in (laid, plain))
        processors = [min(one.cpu_seconds for one in runs) for runs in (laid, plain)]
        note = (
            f"{ours.best:.2f} s; processors {processors[0]:.2f} s, {processors[0] / processors[1]:.2f} x; "
            f"memory {max(one.peak_bytes for one in laid) / MIB:.0f} MiB, "
            f"dense {max(one.peak_bytes for one in plain) / MIB:.0f} MiB"
        )
        report.add(f"{kind} / dense", ours.best / theirs.best, "x", at_most(GOAL), note)
    shutil.rmtree(dense)


def _in_turn(
    place: Path, pair: Pair, folder: Path, layout: Path, *, rounds: int, jobs: int
) -> tuple[list[Finished], list[Finished]]:
    """Run `diff` on the dense target and on the shards, in turn; what both wrote is the same."""
    plain, laid = [], []
    delta = place / "delta"
    for number in range(rounds):
        plain.append(dcr("diff", str(pair.base), str(pair.target), "-o", str(delta), jobs=jobs))
        shutil.rmtree(delta)
        options = "-o", str(delta), "--layout", str(layout)
        laid.append(dcr("diff", str(pair.base), str(folder), *options, jobs=jobs))
        if number == 0:
            check_same_files(delta, place / "dense-delta")
        shutil.rmtree(delta)
    return plain, laid


def _read(checkpoint: Path) -> list[tuple[str, Matrix]]:
    """The matrices of a checkpoint, where they lie in its files."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            found[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return [(name, found[name]) for name in sorted(found)]


def _fused(given: Matrices, count: int) -> Iterator[Matrices]:
    """The matrices, so many at a time."""
    for first in range(0, len(given), count):
        yield given[first : first + count]


def _write(folder: Path, given: Matrices, shards: Sequence[Shard]) -> dict[str, object]:
    """Write the shards, and return their layout."""
    folder.mkdir()
    described: dict[str, dict[str, object]] = {}
    for rank, shard in enumerate(shards):
        path = f"rank-{rank}.safetensors"
        header: dict[str, object] = {}
        described[path] = {}
        at = 0
        for name, tensor in shard.tensors.items():
            form = {"dtype": "BF16", "shape": list(tensor.shape)}
            header[name] = {**form, "data_offsets": [at, at + tensor.nbytes]}
            described[path][name] = {**form, "boxes": shard.boxes[name]}
            at += tensor.nbytes
        with (folder / path).open("wb") as file:
            file.write(framed(header))
            for tensor in shard.tensors.values():
                file.write(np.ascontiguousarray(tensor).data)
    forms = {name: {"dtype": "BF16", "shape": list(matrix.shape)} for name, matrix in given}
    return {"format": "dcr-layout-1", "requires": [], "tensors": forms, "shards": described}
