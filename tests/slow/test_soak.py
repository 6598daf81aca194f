"""A run of pushes as in training, its receivers following, everything killed now and then and pruned meanwhile.

    DCR_PUSHES=2000 scripts/test -s tests/slow/test_soak.py

DCR_PUSHES (150) pushes, by one publisher, now and then beside a second one, and five receivers that follow: in each of
the three ways, with acknowledgements, and through a store that is slow and fails. Publishers are killed all the time,
receivers in the first half; in the second half each lives on, and what it holds of memory and descriptors must not
grow. Each arrival is at what the log says; in the end all receivers are at the last checkpoint, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dcr_cli.prune import prune
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.remote.keys import VERSIONS
from dcr_cli.verify import verify
from dcr_cli.verify_remote import verify_remote
from published import commits
from publishers import Outcome, Publisher
from receivers import fresh_copy, names_below, tree
from store_wrappers import start_dcr
from strategies import Tensors, tiny_tensors, with_changes, write_checkpoint

PUSHES = int(os.environ.get("DCR_PUSHES", "150"))
ANCHOR_EVERY, PRUNE_EVERY, RIVAL_EVERY = 10, 15, 9
# One of so many pushes ends in a kill, and after one of so many a receiver is killed.
KILL_PUSH, KILL_RECEIVER = 6, 5
ARRIVE_SECONDS, LONGEST_PUSH_SECONDS = 180.0, 300.0
WARM_ARRIVALS = 2
GROWTH_KIB, GROWTH_DESCRIPTORS = 16 << 10, 2
SEED = 20310203


@dataclass
class Follower:
    """A receiver that follows in a process, and what it said."""

    name: str
    root: Path
    remote: Path
    options: tuple[str, ...] = ()
    wrapper: str = "BACKEND"
    kills: int = 0
    first_use: tuple[int, int] | None = None
    begun_at: int = 0
    process: subprocess.Popen[bytes] | None = None
    files: list[IO[bytes]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.root.parent / f"{self.name}.log"

    @property
    def errors(self) -> Path:
        return self.root.parent / f"{self.name}.errors"

    def start(self) -> None:
        self.files = [self.log.open("ab"), self.errors.open("ab")]
        self.begun_at = self.files[0].tell()
        out, errors = self.files
        options = ("--follow", "--json", "--no-progress", "-j", "2", *self.options)
        self.process = start_dcr(self.wrapper, "pull", *options, self.remote, self.root, stdout=out, stderr=errors)

    def kill(self) -> None:
        self.stop(signal.SIGKILL)
        self.kills += 1
        # What it was writing when it was killed is no line.
        with self.log.open("ab") as file:
            file.write(b"\n")

    def stop(self, number: int) -> None:
        self.check_alive()
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()
        for file in self.files:
            file.close()

    def check_alive(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}: {self.said()}"

    def said(self) -> str:
        return self.errors.read_text()[-4000:]

    def used(self) -> tuple[int, int]:
        """The memory, in KiB, and the descriptors that its process has."""
        assert self.process is not None
        place = Path(f"/proc/{self.process.pid}")
        status = (place / "status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]), len(os.listdir(place / "fd"))

    def take_first_use(self) -> None:
        """Note what it uses once it has come to some versions in this life."""
        if self.first_use is None and self.log.read_bytes()[self.begun_at :].count(b"\n") >= WARM_ARRIVALS:
            self.first_use = self.used()

    def arrivals(self) -> Iterator[dict[str, Any]]:
        for line in self.log.read_bytes().splitlines():
            said = json.loads(line) if line.endswith(b"}") else {}
            if "result" in said:
                yield said
            else:
                assert said.get("exit_code", 143) == 143, said

    def last_version(self) -> int:
        return max((arrival["result"]["version"] for arrival in self.arrivals()), default=0)


@dataclass
class Trainer:
    """Writes one checkpoint after the other into the same folder, and pushes it."""

    name: str
    folder: Path
    remote: Path
    dice: random.Random
    tensors: Tensors
    step: int = 0
    kills: int = 0
    publisher: Publisher | None = None

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def train(self) -> None:
        self.step += 1
        name = self.dice.choice(sorted(self.tensors))
        positions = sorted(self.dice.sample(range(4096), self.dice.randrange(1, 60)))
        self.tensors = {**self.tensors, name: with_changes(self.tensors[name], positions, self.dice.randrange(1, 256))}
        sidecars = {"config.json": b'{"model_type": "tiny"}\n', "step.txt": f"{self.name} {self.step}\n".encode()}
        write_checkpoint(self.checkpoint, self.tensors, shards=2, sidecars=sidecars)

    def begin(self) -> Publisher:
        if self.publisher is None:
            self.publisher = Publisher.in_process(str(self.remote), {})
        self.publisher.begin(
            self.checkpoint, baseline=self.folder / "baseline", anchor_every=ANCHOR_EVERY, jobs=2, publisher=self.name
        )
        return self.publisher

    def end(self) -> Outcome:
        """What became of the push, which is killed now and then and begun again."""
        publisher = self.publisher
        assert publisher is not None
        while not self.dice.randrange(KILL_PUSH) and not publisher.has_ended(self.dice.random() * 0.5):
            publisher.kill()
            self.kills += 1
            self.publisher = None
            publisher = self.begin()
        assert publisher.has_ended(LONGEST_PUSH_SECONDS), f"{self.name} does not end"
        return publisher.end()


def followers_of(folder: Path, remote: Path) -> list[Follower]:
    pull(remote, folder / "first")
    (folder / "aside").symlink_to("first")
    slow = "Slow(FailsByChance(BACKEND, 12), 0.03)"
    return [
        Follower("replace", folder / "replace", remote),
        Follower("in-place", folder / "in-place", remote, ("--in-place",)),
        Follower("aside", folder / "aside", remote, ("--aside",)),
        Follower("speaker", folder / "speaker", remote, ("--receiver", "speaker")),
        Follower("slow", folder / "slow", remote, wrapper=slow),
    ]


def test_soak(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    remote = tmp_path / "remote"
    tensors, _ = tiny_tensors()
    trainers = [
        Trainer(name, tmp_path / name, remote, random.Random(f"{SEED} {name}"), tensors) for name in ("first", "second")
    ]
    for trainer in trainers:
        trainer.folder.mkdir()
    main, rival = trainers
    main.train()
    push(main.checkpoint, remote, baseline=main.folder / "baseline")
    fresh_copy(main.folder / "baseline", rival.folder / "baseline")
    folder = tmp_path / "receivers"
    folder.mkdir()
    followers = followers_of(folder, remote)
    lost, pruned_bytes = 0, 0
    begun = time.monotonic()
    with ExitStack() as stack:
        for follower in followers:
            follower.start()
            assert follower.process is not None
            stack.callback(lambda follower=follower: follower.process.kill())  # type: ignore[misc]
        for number in range(1, PUSHES + 1):
            racers = trainers if number % RIVAL_EVERY == 0 else [main]
            for trainer in racers:
                trainer.train()
                trainer.begin()
            for trainer in racers:
                outcome = trainer.end()
                assert outcome.code in (0, 6), outcome
                lost += outcome.code == 6
            for follower in followers:
                follower.check_alive()
            if number < PUSHES // 2 and not dice.randrange(KILL_RECEIVER):
                follower = dice.choice(followers)
                follower.kill()
                follower.start()
            if number >= PUSHES // 2 and number % 5 == 0:
                for follower in followers:
                    follower.take_first_use()
            if number % PRUNE_EVERY == 0:
                pruned_bytes += prune(remote, keep=3, keep_within=0, lease=60).freed_bytes
        # The last one has no rival, and so is published.
        main.train()
        main.begin()
        assert main.end().code == 0
        expected = tree(main.checkpoint)
        wait_until_all_are_at(followers, len(commits(remote)))
        now = {follower.name: follower.used() for follower in followers}
        for follower in followers:
            follower.stop(signal.SIGTERM)
    seconds = time.monotonic() - begun
    for trainer in trainers:
        if trainer.publisher is not None:
            trainer.publisher.kill()

    log = commits(remote)
    kills = sum(trainer.kills for trainer in trainers)
    print(f"\n{len(log)} versions in {seconds:.0f} s; publishers killed {kills} times, lost {lost} races;", end=" ")
    print(f"{pruned_bytes:,} bytes pruned")
    for follower in followers:
        check_arrivals(follower, log)
        print(f"  {follower.name}: {len(list(follower.arrivals()))} arrivals, killed {follower.kills} times;", end=" ")
        print(f"KiB, descriptors {follower.first_use} -> {now[follower.name]}")
        check_growth(follower, now[follower.name])
    check_receivers(followers, remote, expected, tmp_path / "fresh")
    check_remote(remote)


def wait_until_all_are_at(followers: list[Follower], version: int) -> None:
    end = time.monotonic() + ARRIVE_SECONDS
    left = list(followers)
    while left:
        for follower in left:
            follower.check_alive()
            assert time.monotonic() < end, f"{follower.name} does not arrive: {follower.said()}"
        left = [follower for follower in left if follower.last_version() < version]
        time.sleep(0.1)


def check_arrivals(follower: Follower, log: list[dict[str, Any]]) -> None:
    """Each is at what the log says of its version, and none goes back; what a kill kept untold is not missed."""
    last = 0
    for arrival in follower.arrivals():
        result = arrival["result"]
        assert result["target"] == log[result["version"] - 1]["target"], (follower.name, result)
        assert result["version"] > last, (follower.name, result)
        last = result["version"]
    assert last == len(log), follower.name


def check_growth(follower: Follower, after: tuple[int, int]) -> None:
    assert follower.first_use is not None, f"{follower.name}: too few arrivals in the second half"
    memory, descriptors = follower.first_use
    assert after[0] - memory < GROWTH_KIB, follower.name
    assert after[1] - descriptors <= GROWTH_DESCRIPTORS, follower.name


def check_receivers(followers: list[Follower], remote: Path, expected: dict[str, bytes], fresh: Path) -> None:
    """All are at the last checkpoint, and nothing but what a receiver has that was never killed lies beside it."""
    pull(remote, fresh)
    usual = set(names_below(fresh / ".dcr")) | {"link"}
    for follower in followers:
        assert tree(follower.root.resolve()) == expected, follower.name
        assert verify(follower.root, remote=remote).matches
        assert not pull(remote, follower.root).changed
        assert set(names_below(follower.root.resolve() / ".dcr")) <= usual, follower.name
    aside = next(follower.root for follower in followers if follower.name == "aside")
    # The folder that the link led to at first nobody has made for it.
    places = {follower.root.name for follower in followers} | {"first", os.readlink(aside)}
    found = {path.name for path in followers[0].root.parent.iterdir() if path.suffix not in (".log", ".errors")}
    assert found == places


def check_remote(remote: Path) -> None:
    """All that is there is right; and when it is old, a prune leaves nothing that is not needed."""
    checked = verify_remote(remote, deep=True)
    assert checked.matches, checked.damages
    for path in remote.rglob("*"):
        os.utime(path, (time.time() - 3 * 86400,) * 2)
    # By the clock of a store something is always young: what it has just been asked to write.
    result = prune(remote, keep=1, keep_within=0, lease=0)
    assert result.is_head_reachable and not result.unknown and not result.in_doubt
    kept = {f"{number:010d}" for number in result.kept}
    # A prune that was killed may leave an empty folder, which is no object.
    files = (path.relative_to(remote / VERSIONS) for path in (remote / VERSIONS).rglob("*") if path.is_file())
    held = {path.parts[0].partition("-")[0] for path in files}
    assert held <= kept, (held, kept)
    assert {path.name.partition("-")[0].partition(".")[0] for path in (remote / "anchors").iterdir()} <= {
        f"{number:010d}" for number in result.anchors
    }
    assert not [name for name in names_below(remote) if "/." in f"/{name}"]
    assert verify_remote(remote, deep=True).matches
