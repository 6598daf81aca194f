"""A fleet of live receivers, each a process of its own, that dies at random while versions are prepared and committed:
whoever reports a version held exactly its bits, and in the end all of them are at the last one."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcr_cli import commit, push
from dcr_cli.errors import ConflictError
from dcr_cli.fetch.words import say
from live_modules import FORMS, MADE, Converting, held, loaded, new_bits, train, write

RECEIVERS, QUORUM, VERSIONS = 16, 8, 6
DEATH = 0.12
SECONDS = 600
DIED = 9
FORKING = multiprocessing.get_context("forkserver")
ALL = {**FORMS, **MADE}


def digest_of(module: Any) -> str:
    return hashlib.sha256(repr(held(module)).encode()).hexdigest()


def serve(root: Path, name: str, version: int, seed: int) -> None:
    """An engine, loaded at a version, until the last one is there, or it dies."""
    from dcr_cli.live import Fate, Member, Receiver, bits, member as members

    dice = random.Random(seed)

    def perhaps_die() -> None:
        if not (root / "calm").exists() and dice.random() < DEATH:
            os._exit(DIED)

    write_all = bits.HostPatch.write

    def write_perhaps(patch: Any) -> None:
        if not (root / "calm").exists() and dice.random() < DEATH / 8:
            for piece, positions, _, new in patch._pieces:
                piece[positions[: len(positions) // 2]] = new[: len(positions) // 2]
            os._exit(DIED)
        write_all(patch)

    def say_perhaps(store: Any, speaker: Any, word: Any, now: float) -> None:
        perhaps_die()
        if word.stage == "applied":
            # What it is about to report is what it holds.
            (root / f"held/{name}.{word.place.version}").write_text(digest_of(module))
        say(store, speaker, word, now)
        perhaps_die()

    patched = pytest.MonkeyPatch()
    patched.setattr(bits.HostPatch, "write", write_perhaps)
    patched.setattr(members, "say", say_perhaps)
    checkpoint = root / f"v{version}"
    module = loaded(Converting, checkpoint)
    receiver = Receiver(module, checkpoint=checkpoint, jobs=1)
    with Member(receiver, str(root / "remote"), version=version, name=name, jobs=1) as member:
        member.announce()
        while member.version < VERSIONS:
            if member.stage_next() is None:
                time.sleep(0.2)
            elif member.wait(5) is Fate.COMMITTED:
                member.apply()


def applied(root: Path) -> set[tuple[str, int]]:
    """Who has acknowledged which version."""
    found = (root / "remote").glob("acks/*/*.applied")
    return {(path.name.removesuffix(".applied"), int(path.parent.name.partition("-")[0])) for path in found}


@pytest.mark.parametrize("seed", [1, 2])
def test_who_reports_a_version_holds_its_bits(tmp_path: Path, seed: int) -> None:
    FORKING.set_forkserver_preload(["torch", "dcr_cli.live", "live_modules"])
    dice = random.Random(seed)
    (tmp_path / "held").mkdir()
    remote, bits = str(tmp_path / "remote"), new_bits(ALL, seed)
    publish = partial(push, remote=remote, baseline=tmp_path / "baseline", encodings=["gap", "whole"], jobs=1)
    publish(write(tmp_path / "v1", ALL, bits))
    newest, deaths, starts = 1, 0, 0
    fleet: dict[str, Any] = {}

    def tend() -> None:
        """Start who is not there: from a checkpoint at any version that there is."""
        nonlocal deaths, starts
        for name in (f"rank-{number}" for number in range(RECEIVERS)):
            process = fleet.get(name)
            if process is not None and process.exitcode is not None:
                assert process.exitcode in (0, DIED), name
                deaths += process.exitcode == DIED
            if process is None or process.exitcode == DIED:
                starts += 1
                given = tmp_path, name, dice.randint(1, newest), starts * 1000 + seed
                fleet[name] = FORKING.Process(target=serve, args=given, daemon=True)
                fleet[name].start()

    end = time.monotonic() + SECONDS
    try:
        tend()
        while newest < VERSIONS:
            bits = train(bits, ALL, newest)
            publish(write(tmp_path / f"v{newest + 1}", ALL, bits), prepare=True)
            is_committed = False
            while not is_committed:
                assert time.monotonic() < end
                tend()
                with suppress(ConflictError):
                    is_committed = commit(remote, quorum=QUORUM, timeout_seconds=1).committed
            newest += 1
        (tmp_path / "calm").touch()
        while any(process.exitcode != 0 for process in fleet.values()):
            assert time.monotonic() < end
            tend()
            time.sleep(0.2)
    finally:
        for process in fleet.values():
            process.kill()
            process.join()
    expected = {number: digest_of(loaded(Converting, tmp_path / f"v{number}")) for number in range(1, VERSIONS + 1)}
    reported = applied(tmp_path)
    for name, number in reported:
        assert (tmp_path / f"held/{name}.{number}").read_text() == expected[number], (name, number)
    assert {name for name, number in reported if number == VERSIONS} == set(fleet)
    print(f"{starts} starts, {deaths} deaths, {len(reported)} reports")
    assert deaths > RECEIVERS // 2
