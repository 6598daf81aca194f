"""How many bytes go over the wire: whole delta folders beside the published methods and the entropy limits.

Every delta is applied to its base first, and the result compared with the target byte for byte. All files of a folder
count, but sidecars that changed are taken off: they are no weights, and cost every method the same.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bench_child import dcr
from bench_files import check_same_files, folder_bytes
from bench_methods import METHODS, Measure, measure, read_pairs
from bench_report import Goal, Report, at_most

from dcr_cli.delta.manifest import decode_manifest

SIDECAR = 2
FEW_CHANGES = 100_000
MANY_CHANGES = 400_000
ENCODINGS = ("context", "gap", "auto")


@dataclass(frozen=True, slots=True)
class Case:
    """A pair of checkpoints and what to call it."""

    title: str
    base: Path
    target: Path


def wire(report: Report, place: Path, case: Case, jobs: int) -> None:
    """Add the rows of one pair. `place` is an empty folder that may be written to."""
    found = measure(read_pairs(case.base, case.target))
    sizes = {encoding: _delta_bytes(place, case, encoding, jobs) for encoding in ENCODINGS}
    share = found.changed / max(found.elements, 1)
    report.begin("wire", f"{case.title}: {found.changed:,} of {found.elements:,} elements changed ({share:.2%})")
    changed = max(found.changed, 1)

    def bits(size: float) -> str:
        return f"{8 * size / changed:.2f} bits a change"

    limit = found.limit_bytes("given base, ulp")
    report.add(
        "context / limit 'given base, ulp'",
        sizes["context"] / max(limit, 1),
        "x",
        _limit_goal(found),
        f"{sizes['context']:,} B, {bits(sizes['context'])}; the limit {bits(limit)}",
    )
    goals = {"dense XOR": 0.38, "16-bit gaps": 0.56}
    for method in METHODS:
        size = found.method_bytes[method]
        goal = at_most(goals[method]) if method in goals and found.changed >= FEW_CHANGES else None
        note = f"{method}: {size:,} B, {bits(size)}"
        report.add(f"context / {method} + zstd-1", sizes["context"] / size, "x", goal, note)
    plain = found.limit_bytes("plain")
    note = f"{sizes['gap']:,} B, {bits(sizes['gap'])}; the limit {bits(plain)}"
    goal = at_most(1.05) if found.changed >= FEW_CHANGES else None
    report.add("gap / limit 'plain'", sizes["gap"] / max(plain, 1), "x", goal, note)
    smaller = min(sizes["context"], sizes["gap"])
    report.add("auto / the smaller of both", sizes["auto"] / smaller, "x", None, f"{sizes['auto']:,} B")
    note = f"a full copy is {found.dense_bytes / sizes['auto']:,.0f} times the delta"
    report.add("auto / all bytes of the tensors", 100 * sizes["auto"] / found.dense_bytes, "%", None, note)
    given = found.limit_bytes("given base")
    report.add("limit 'given base' / limit 'plain'", given / max(plain, 1), "x", None, bits(given))


def _limit_goal(found: Measure) -> Goal | None:
    if found.changed >= MANY_CHANGES:
        return at_most(1.10)
    return at_most(1.15) if found.changed >= FEW_CHANGES else None


def _delta_bytes(place: Path, case: Case, encoding: str, jobs: int) -> int:
    """Write a delta, check what it makes of the base, and count it."""
    delta, result = place / "delta", place / "result"
    try:
        dcr("diff", str(case.base), str(case.target), "-o", str(delta), "--encoding", encoding, jobs=jobs)
        dcr("apply", str(delta), str(case.base), "--to", str(result), jobs=jobs)
        check_same_files(result, case.target)
        manifest = decode_manifest((delta / "manifest.zst").read_bytes(), None, "the delta's manifest")
        sidecars = sum(run.bytes for file in manifest.files if file.kind == SIDECAR for run in file.runs)
        return folder_bytes(delta) - sidecars
    finally:
        for folder in (delta, result):
            shutil.rmtree(folder, ignore_errors=True)
