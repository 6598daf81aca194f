"""The parts of one run of the benchmark: which data each needs, and when that data is made and removed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from bench_codec import codec
from bench_commands import commands, memory, startup, tiny
from bench_layouts import layouts, matrices
from bench_methods import read_pairs
from bench_pairs import Named, Pair, decoder, giant, make_pair, make_tiny_pair
from bench_relay import relay
from bench_report import PARTS, BenchError, Report
from bench_wire import Case, wire

RATES = (0.01, 0.03)
REAL_RATES = ("1e-6", "5e-6")
REAL_STEPS = 2
TINY_RATES = (0.03, 1.0)
LIVE_RATES = (0.0001, 0.001, 0.01, 0.05)
MIB, GIB = 1 << 20, 1 << 30


class Parts:
    """The parts of one run. Pairs are made when they are first needed and removed after their last use."""

    def __init__(self, given: argparse.Namespace, report: Report, place: Path) -> None:
        self.given, self.report, self.place = given, report, place
        self.synthetic = cache(self._synthetic)
        self.large = cache(self._large)

    def run(self) -> None:
        """Run those that were asked for."""
        parts: dict[str, Callable[[], None]] = {
            "wire": self._wire,
            "codec": self._codec,
            "commands": self._commands,
            "layouts": self._layouts,
            "live": self._live,
            "memory": self._memory,
            "tiny": self._tiny,
            "startup": self._startup,
            "relay": self._relay,
        }
        for name in PARTS:
            if name in self.given.only:
                parts[name]()

    def _make(self, name: str, tensors: list[Named], rate: float, shards: int) -> Pair:
        say(f"making {name}")
        return make_pair(self.place / name, tensors, rate=rate, shards=shards, seed=self.given.seed)

    def _synthetic(self, rate: float) -> Pair:
        return self._make(f"synthetic-{rate}", decoder(self.given.mib * MIB // 2), rate, 3)

    def _large(self) -> Pair:
        return self._make("large", decoder(int(self.given.gib * GIB) // 2), self.given.rate, 8)

    def _wire(self) -> None:
        cases = real_cases(self.given, self.report, self.place)
        for rate in RATES:
            pair = self.synthetic(rate)
            cases.append(Case(f"synthetic, {rate:.0%}", pair.base, pair.target))
        for case in cases:
            say(f"wire: {case.title}")
            wire(self.report, self.place, case, self.given.jobs)

    def _codec(self) -> None:
        for rate in RATES:
            pair = self.synthetic(rate)
            say(f"codec: {rate:.0%}")
            codec(self.report, list(read_pairs(pair.base, pair.target)), rate, self.given.rounds)
            shutil.rmtree(pair.base.parent)

    def _commands(self) -> None:
        pair = self.large()
        say("commands")
        commands(self.report, self.place, pair, rounds=self.given.rounds, jobs=self.given.jobs)

    def _layouts(self) -> None:
        pair = self._make("matrices", matrices(self.given.mib * MIB // 2), self.given.rate, 4)
        say("layouts")
        layouts(self.report, self.place, pair, rounds=self.given.rounds, jobs=self.given.jobs)
        shutil.rmtree(pair.base.parent)

    def _live(self) -> None:
        from bench_live import live

        tensors = decoder(self.given.mib * MIB // 2)
        pairs = (self._make(f"live-{rate}", tensors, rate, 3) for rate in LIVE_RATES)
        live(self.report, self.place, tensors, pairs, self.given.rounds)

    def _memory(self) -> None:
        memory(self.report, self.place, self._memory_pairs(), (2,) if self.given.quick else (1, 2, 4))

    def _memory_pairs(self) -> Iterator[tuple[str, Pair]]:
        gib, rate = self.given.gib, self.given.rate
        elements = int(gib * GIB) // 2
        yield f"{gib:g} GiB", self.large()
        shutil.rmtree(self.large().base.parent)
        for name, tensors in (
            (f"{gib / 4:g} GiB", decoder(elements // 4)),
            (f"one tensor of {gib:g} GiB", giant(elements)),
        ):
            pair = self._make(name, tensors, rate, 8)
            yield name, pair
            shutil.rmtree(pair.base.parent)

    def _tiny(self) -> None:
        for rate in TINY_RATES:
            say(f"tiny: {rate:.0%}")
            pair = make_tiny_pair(self.place / "tiny", count=self.given.tensors, rate=rate, seed=self.given.seed)
            tiny(self.report, self.place, pair, count=self.given.tensors, jobs=self.given.jobs)
            shutil.rmtree(pair.base.parent)

    def _startup(self) -> None:
        say("startup")
        startup(self.report, 3 if self.given.quick else 20)

    def _relay(self) -> None:
        # All of it changes: so the payloads are large.
        pair = self._make("served", decoder(self.given.mib * MIB // 2), 1.0, 2)
        say("relay")
        sent_bytes = int(self.given.gib * GIB)
        relay(self.report, self.place, pair, sent_bytes=sent_bytes, rounds=self.given.rounds)
        shutil.rmtree(pair.base.parent)


def real_cases(given: argparse.Namespace, report: Report, place: Path) -> list[Case]:
    """Pairs of real checkpoints: those that were named, else made by scripts/make_checkpoint where it can run."""
    folders = {str(folder): folder for folder in given.real or ()}
    if not folders and given.quick:
        report.leave_out("wire on real checkpoints: --quick makes none, name some with --real")
    elif not folders:
        maker = Path(__file__).with_name("make_checkpoint")
        for rate in REAL_RATES:
            say(f"making real checkpoints at rate {rate}")
            folder = place / f"real-{rate}"
            command = [
                sys.executable,
                str(maker),
                str(folder),
                "--count",
                "2",
                "--rate",
                rate,
                "--every",
                str(REAL_STEPS),
            ]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                reason = (made.stderr.strip().splitlines() or ["it says nothing"])[-1]
                report.leave_out(f"wire on real checkpoints at rate {rate}: scripts/make_checkpoint failed: {reason}")
            else:
                folders[f"real, {REAL_STEPS} steps at rate {rate}"] = folder
    cases = []
    for title, folder in folders.items():
        steps = sorted((path for path in folder.iterdir() if path.is_dir()), key=_number_in)
        if len(steps) < 2:
            raise BenchError(f"{folder} does not hold two checkpoints")
        cases.append(Case(title, *steps[-2:]))
    return cases


def say(text: str) -> None:
    """Tell whoever waits what is going on."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _number_in(path: Path) -> tuple[int, str]:
    return int("".join(filter(str.isdecimal, path.name)) or 0), path.name
