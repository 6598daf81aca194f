"""What the commands take as a user runs them: seconds beside `cp`, peak memory, many tiny tensors, start-up.

Everything runs in processes of its own. What each way to apply made is compared once with the target, byte for byte.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench_child import Finished, dcr, run
from bench_clock import Times
from bench_files import check_same_files, file_system, folder_bytes
from bench_pairs import Pair
from bench_report import Report, at_most

MIB = 1 << 20
JOB_MIB = 96
FIXED_MIB = 300


def commands(report: Report, place: Path, pair: Pair, *, rounds: int, jobs: int) -> None:
    """Add the rows of `diff -o` and both applies against `cp`, in turn, and of `verify` beside them."""
    work, delta = place / "work", place / "delta"
    done: dict[str, list[Finished]] = {"cp": [], "diff": [], "replace": [], "in place": [], "verify": []}
    # The pages of the copy have to be touched once; that copy does not count.
    _copy(pair.base, work)
    for number in range(rounds):
        shutil.rmtree(delta, ignore_errors=True)
        done["diff"].append(dcr("diff", str(pair.base), str(pair.target), "-o", str(delta), jobs=jobs))
        for mode, options in (("replace", ()), ("in place", ("--in-place",))):
            shutil.rmtree(work / ".dcr", ignore_errors=True)
            done["cp"].append(_copy(pair.base, work))
            if mode == "replace":
                _back_free_memory(place, pair.bytes)
            done[mode].append(dcr("apply", str(delta), str(work), *options, jobs=jobs))
            if number == 0:
                check_same_files(work, pair.target)
        done["verify"].append(dcr("verify", str(work), "--against", str(pair.target), jobs=jobs))
    shutil.rmtree(work)
    times = {name: Times(tuple(one.seconds for one in runs)) for name, runs in done.items()}
    size = pair.bytes / 1e9
    title = f"{pair.bytes / 2**30:.2f} GiB, {pair.change}, {jobs} threads, {file_system(place)}"
    report.begin("commands", f"{title}, best of {rounds} rounds in turn with cp")
    base = times["cp"]
    rows = (
        ("dcr diff -o / cp", "diff", at_most(0.75)),
        ("dcr apply / cp", "replace", at_most(1.25)),
        ("dcr apply --in-place / cp", "in place", at_most(0.75)),
        ("dcr verify --against / cp", "verify", None),
    )
    for what, name, goal in rows:
        ours = times[name]
        cpu = min(one.cpu_seconds for one in done[name])
        note = (
            f"{ours.best:.2f} s, {size / ours.best:.2f} GB/s, processors {cpu:.2f} s; "
            f"medians {ours.median:.2f} s, {ours.median / base.median:.3f} x"
        )
        report.add(what, ours.best / base.best, "x", goal, note)
    note = f"{size / base.best:.2f} GB/s; median {base.median:.2f} s, {len(base.seconds)} times"
    report.add("cp, onto files that are there", base.best, "s", None, note)
    report.add("delta / all bytes of the tensors", 100 * folder_bytes(delta) / pair.bytes, "%", None, "")
    shutil.rmtree(delta)


def _back_free_memory(place: Path, size: int) -> None:
    """Use as much memory as an apply will, and free it. A virtual machine that has given free memory back to its host
    gets it again page by page, which takes longer than all of the apply."""
    scratch = place / "scratch"
    with scratch.open("wb") as file:
        for _ in range(0, size, MIB):
            file.write(bytes(MIB))
    scratch.unlink()


def memory(report: Report, place: Path, pairs: Iterable[tuple[str, Pair]], jobs_list: Sequence[int]) -> None:
    """Add the peaks of diff and both applies for every pair and number of jobs; a row holds the worst of all pairs."""
    peaks: dict[tuple[str, int], dict[str, int]] = {}
    for name, pair in pairs:
        for jobs in jobs_list:
            for command, peak_bytes in _peaks(place, pair, jobs).items():
                peaks.setdefault((command, jobs), {})[name] = peak_bytes
    report.begin("memory", "highest resident memory of the process, mapped pages included; worst of all pairs")
    for (command, jobs), found in sorted(peaks.items()):
        note = ", ".join(f"{name}: {peak_bytes / MIB:.0f}" for name, peak_bytes in found.items())
        goal = at_most(FIXED_MIB + JOB_MIB * jobs)
        report.add(f"{command}, jobs {jobs}", max(found.values()) / MIB, "MiB", goal, note)


def _peaks(place: Path, pair: Pair, jobs: int) -> dict[str, int]:
    work, delta = place / "work", place / "delta"
    try:
        found = {"dcr diff -o": dcr("diff", str(pair.base), str(pair.target), "-o", str(delta), jobs=jobs).peak_bytes}
        # Replacing leaves the other name of a file alone, so links save the room and the time of a copy.
        run("cp", "-r", "--link", str(pair.base), str(work))
        found["dcr apply"] = dcr("apply", str(delta), str(work), jobs=jobs).peak_bytes
        check_same_files(work, pair.target)
        shutil.rmtree(work)
        run("cp", "-r", str(pair.base), str(work))
        found["dcr apply --in-place"] = dcr("apply", str(delta), str(work), "--in-place", jobs=jobs).peak_bytes
        check_same_files(work, pair.target)
        return found
    finally:
        for folder in (work, delta):
            shutil.rmtree(folder, ignore_errors=True)


def tiny(report: Report, place: Path, pair: Pair, *, count: int, jobs: int) -> None:
    """Add the rows of a checkpoint of tiny tensors."""
    work, delta = place / "work", place / "delta"
    try:
        diffed = dcr("diff", str(pair.base), str(pair.target), "-o", str(delta), jobs=jobs)
        run("cp", "-r", str(pair.base), str(work))
        applied = dcr("apply", str(delta), str(work), jobs=jobs)
        check_same_files(work, pair.target)
        delta_bytes, full_bytes = folder_bytes(delta), folder_bytes(pair.target)
    finally:
        for folder in (work, delta):
            shutil.rmtree(folder, ignore_errors=True)
    report.begin("tiny", f"{count:,} tensors of 1 to 16 bytes, {pair.change}, {jobs} threads")
    note = (
        f"diff {diffed.seconds:.2f} s, processors {diffed.cpu_seconds:.2f} s; "
        f"apply {applied.seconds:.2f} s, processors {applied.cpu_seconds:.2f} s"
    )
    report.add("dcr diff -o and dcr apply", diffed.seconds + applied.seconds, "s", at_most(30), note)
    note = f"diff {diffed.peak_bytes / MIB:.0f} MiB, apply {applied.peak_bytes / MIB:.0f} MiB"
    peak_bytes = max(diffed.peak_bytes, applied.peak_bytes)
    report.add("highest resident memory", peak_bytes / MIB, "MiB", at_most(600), note)
    note = f"{delta_bytes:,} B of {full_bytes:,} B; the tensors alone {pair.bytes:,} B"
    report.add("delta / a full copy", delta_bytes / full_bytes, "x", at_most(1.01), note)


def startup(report: Report, rounds: int) -> None:
    """Add how long `dcr --help` takes, beside an interpreter that does nothing."""
    script = Path(sys.executable).with_name("dcr")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "dcr_cli"]
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        ours.append(_helped(command).seconds)
        bare.append(run(sys.executable, "-c", "pass").seconds)
    report.begin("startup", f"{'the installed dcr' if script.exists() else 'python -m dcr_cli'}, best of {rounds}")
    times = Times(tuple(ours))
    note = f"median {times.median:.3f} s; python -c pass {min(bare):.3f} s"
    report.add("dcr --help", times.best, "s", at_most(0.2), note)


def _helped(command: Sequence[str]) -> Finished:
    return run(*command, "--help")


def _copy(source: Path, to: Path) -> Finished:
    """Copy the files of a checkpoint onto those of `to`."""
    to.mkdir(exist_ok=True)
    return run("cp", "-r", f"{source}/.", str(to))
