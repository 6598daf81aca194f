"""How fast one thread codes and decodes blocks that lie in memory, beside dense XOR with zstd-1 and memory itself.

Both sides of a pair are cut into blocks as `dcr diff` cuts them, and each block goes through all that the commands do
with it but reading and writing files. Before anything is timed, every block is decoded and compared bit for bit, and
the digests that were added up block by block are compared with digests of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash
from bench_blocks import check, cut, decode, encode
from bench_clock import Times, interleave
from bench_kernels import kernel_times, memory_tasks
from bench_methods import TensorPair, dense_xor, dense_xor_apply
from bench_report import Goal, Report, at_least
from numpy.typing import NDArray

DIFF_KERNELS = ("compare", "magnitude_encode")
APPLY_KERNELS = ("context_decode",)


def codec(report: Report, pairs: list[TensorPair], rate: float, rounds: int) -> None:
    """Add the rows of one change rate."""
    blocks = cut(pairs)
    coded = encode(blocks)
    check(blocks, coded, pairs)
    dense = [dense_xor(pair.base, pair.target) for pair in pairs]
    small = [dense_xor(block.base, block.target) for block in blocks]
    tasks: dict[str, Callable[[], object]] = {
        "diff": lambda: encode(blocks),
        "diff, dense": lambda: [dense_xor(pair.base, pair.target) for pair in pairs],
        "diff, dense in blocks": lambda: [dense_xor(block.base, block.target) for block in blocks],
        "apply": lambda: decode(blocks, coded),
        "apply, dense": lambda: _dense_apply(dense, [pair.base for pair in pairs]),
        "apply, dense in blocks": lambda: _dense_apply(small, [block.base for block in blocks]),
        **memory_tasks(pairs),
    }
    times = interleave(tasks, rounds)
    parts = kernel_times(blocks, coded, rounds)
    size = sum(pair.base.nbytes for pair in pairs)
    changed = sum(int(np.count_nonzero(pair.base != pair.target)) for pair in pairs)
    report.begin(
        "codec", f"{rate:.0%} change, {size >> 20:,} MiB in memory, one thread, best of {rounds} rounds in turn"
    )
    diff_goal, apply_goal = _goals(rate)
    _ratio(report, "diff codec / dense XOR + zstd-1", times, ("diff", "diff, dense"), size, diff_goal)
    _ratio(report, "apply codec / zstd + XOR + xxh3", times, ("apply", "apply, dense"), size, apply_goal)
    _ratio(report, "diff codec / the same, block by block", times, ("diff", "diff, dense in blocks"), size, None)
    _ratio(report, "apply codec / the same, block by block", times, ("apply", "apply, dense in blocks"), size, None)
    _shares(report, times, parts, size)
    for name, seconds in parts.items():
        note = f"{1e9 * seconds / max(changed, 1):.2f} ns a change"
        report.add(f"kernel {name}", size / 1e9 / seconds, "GB/s", None, note)


def _dense_apply(encoded: list[bytes], bases: list[NDArray[Any]]) -> None:
    for code, base in zip(encoded, bases, strict=True):
        xxhash.xxh3_64_digest(dense_xor_apply(code, base).data)


def _goals(rate: float) -> tuple[Goal, Goal]:
    return (at_least(4.5), at_least(2.2)) if rate < 0.02 else (at_least(3.0), at_least(1.6))


def _ratio(
    report: Report, what: str, times: Mapping[str, Times], names: tuple[str, str], size: int, goal: Goal | None
) -> None:
    ours, theirs = times[names[0]], times[names[1]]
    note = (
        f"{size / 1e9 / ours.best:.2f} against {size / 1e9 / theirs.best:.2f} GB/s; "
        f"medians {size / 1e9 / ours.median:.2f} against {size / 1e9 / theirs.median:.2f}, "
        f"{theirs.median / ours.median:.2f} x"
    )
    report.add(what, theirs.best / ours.best, "x", goal, note)


def _shares(report: Report, times: Mapping[str, Times], kernels: Mapping[str, float], size: int) -> None:
    """How near both codecs come to memory, and what takes their time."""
    for name, streams in (("read", 1), ("read both", 2), ("copy", 1)):
        note = {"copy": "each byte read and written once", "read both": "bytes of both streams"}.get(name, "")
        report.add(f"memory of one core: {name}", streams * size / 1e9 / times[name].best, "GB/s", None, note)
    for name, bound, needed in (("diff", "read both", DIFF_KERNELS), ("apply", "copy", APPLY_KERNELS)):
        best = times[name].best
        spent = sorted(((kernels[kernel], kernel) for kernel in needed), reverse=True)
        rest = best - sum(seconds for seconds, _ in spent)
        listed = ", ".join(f"{kernel} {seconds / best:.0%}" for seconds, kernel in spent)
        report.add(
            f"{name} codec, share of '{bound}'",
            100 * times[bound].best / best,
            "%",
            None,
            f"its time: {listed}, the rest {max(rest, 0) / best:.0%}",
        )
