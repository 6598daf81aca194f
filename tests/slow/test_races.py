"""Eight publishers race for each version of a remote, round after round, on every kind of store that can be had here.

    DCR_ROUNDS=200 scripts/test -s tests/slow/test_races.py

DCR_ROUNDS (25) rounds for each. In every second one all of them meet before they create their commits, so that all but
one lose; in the others they go as fast as each can. In some rounds half of them have the same checkpoint. A real S3
server is taken where AWS_ENDPOINT_URL names one, as for test_real_s3.py.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.delta.line import COMMIT_LIMIT
from dcr_cli.pull import pull
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import commit_key
from dcr_cli.remote.version import decode_version
from dcr_cli.store.opening import open_store
from publishers import SPAWNING, Meeting, Meets, Outcome, Publisher
from real_servers import azurite_server, openssh_server
from receivers import tree
from store_servers import moto_server
from store_wrappers import wrapping
from strategies import Tensors, tiny_tensors, with_changes, write_checkpoint

ROUNDS = int(os.environ.get("DCR_ROUNDS", "25"))
RACERS = 8
# In one of so many rounds half of them have the same.
SAME_EVERY = 5
Options = dict[str, object]


@dataclass
class Race:
    """Eight publishers, each with a baseline and checkpoints of its own, and what has come of it so far."""

    folder: Path
    url: str
    options: Options
    publishers: list[Publisher]
    published: dict[int, dict[str, bytes]] = field(default_factory=dict)
    ids: dict[int, str | None] = field(default_factory=dict)
    lost: int = 0
    same: int = 0

    def run(self) -> None:
        dice = random.Random(20310203)
        tensors: Tensors = tiny_tensors()[0]
        for number in range(ROUNDS):
            steps = [train(tensors, dice) for _ in self.publishers]
            if number % SAME_EVERY == SAME_EVERY - 1:
                steps[RACERS // 2 :] = [steps[-1]] * (RACERS // 2)
            checkpoints = [self.write(number, racer, step) for racer, step in enumerate(steps)]
            is_meeting = number % 2 == 0
            for racer, (publisher, checkpoint) in enumerate(zip(self.publishers, checkpoints, strict=True)):
                publisher.begin(checkpoint, is_meeting=is_meeting, baseline=self.folder / f"baseline-{racer}", jobs=1)
            outcomes = [publisher.end() for publisher in self.publishers]
            self.take(number, checkpoints, outcomes, is_meeting=is_meeting)
            winners = [racer for racer, outcome in enumerate(outcomes) if outcome.is_published]
            tensors = steps[winners[-1]]

    def write(self, number: int, racer: int, tensors: Tensors) -> Path:
        sidecars = {"config.json": b'{"model_type": "tiny"}\n'}
        return write_checkpoint(self.folder / f"step-{number}-{racer}", tensors, shards=2, sidecars=sidecars)

    def take(self, number: int, checkpoints: list[Path], outcomes: list[Outcome], *, is_meeting: bool) -> None:
        """Take what came of a round: each has won a version of its own, or has lost, or had the same as the winner."""
        first = max(self.published, default=0) + 1
        for checkpoint, outcome in zip(checkpoints, outcomes, strict=True):
            assert outcome.code in (0, 6), (number, outcome)
            if outcome.is_published:
                assert outcome.version is not None
                assert outcome.version not in self.published, (number, outcome)
                self.published[outcome.version] = tree(checkpoint)
                self.ids[outcome.version] = outcome.id
            self.lost += outcome.code == 6
        for checkpoint, outcome in zip(checkpoints, outcomes, strict=True):
            if outcome.code == 0 and not outcome.is_published:
                assert outcome.version is not None
                assert self.published[outcome.version] == tree(checkpoint), (number, outcome)
                assert self.ids[outcome.version] == outcome.id, (number, outcome)
                self.same += 1
        new = sorted(version for version in self.published if version >= first)
        assert new == list(range(first, first + len(new))) and new, (number, outcomes)
        assert len(new) == 1 or not is_meeting, (number, outcomes)

    def check(self) -> None:
        """The log has no gap, each commit names the one before, and each version is its winner's checkpoint."""
        with open_store(self.url, self.options) as store:
            history = require_history(store)
            before = None
            for number in range(1, len(self.published) + 1):
                data = store.get(commit_key(number), most_bytes=COMMIT_LIMIT)
                assert data is not None, number
                version = decode_version(data, number, "commit").version
                assert (version.history, version.previous) == (history.id, before), number
                assert version.place.id == self.ids[number], number
                before = object_digest(data)
            assert store.stat(commit_key(len(self.published) + 1), is_denied_absent=True) is None
        for number, files in sorted(self.published.items()):
            result = pull(self.url, self.folder / "receiver", version=number, storage_options=self.options, jobs=1)
            assert result.version == number
            assert tree(self.folder / "receiver") == files, number


def train(tensors: Tensors, dice: random.Random) -> Tensors:
    name = dice.choice(sorted(tensors))
    return {**tensors, name: with_changes(tensors[name], sorted(dice.sample(range(4096), 9)), dice.randrange(1, 256))}


def run_race(folder: Path, url: str, options: Options, start: Callable[[Meeting], Publisher], meeting: Meeting) -> None:
    begun = time.monotonic()
    with ExitStack() as stack:
        publishers = [stack.enter_context(start(meeting)) for _ in range(RACERS)]
        race = Race(folder, url, options, publishers)
        race.run()
    race.check()
    seconds = time.monotonic() - begun
    print(f"\n{url.partition(':')[0] if ':' in url else 'folder'}: {ROUNDS} rounds in {seconds:.0f} s:", end=" ")
    print(f"{len(race.published)} versions, {race.lost} lost, {race.same} had the same")
    assert race.lost >= RACERS // 2 * (ROUNDS // 2)


def run_processes(folder: Path, url: str, options: Options) -> None:
    meeting = SPAWNING.Barrier(RACERS)
    run_race(folder, url, options, lambda meeting: Publisher.in_process(url, options, meeting), meeting)


def test_a_folder(tmp_path: Path) -> None:
    run_processes(tmp_path, str(tmp_path / "remote"), {})


def test_memory(tmp_path: Path) -> None:
    """Its objects are those of one process, so threads race."""
    url = f"memory://{secrets.token_hex(8)}"
    meeting = threading.Barrier(RACERS)
    with wrapping(lambda backend: Meets(backend, meeting)):
        run_race(tmp_path, url, {}, lambda _: Publisher.in_thread(url), meeting)


def test_mock_s3(tmp_path: Path) -> None:
    with moto_server() as endpoint:
        options: Options = {"endpoint_url": endpoint, "key": "key", "secret": "secret", "region": "us-east-1"}
        run_processes(tmp_path, "s3://bucket/race", options)


@pytest.fixture
def bucket() -> Iterator[str]:
    if not os.environ.get("AWS_ENDPOINT_URL"):
        pytest.skip("AWS_ENDPOINT_URL names no S3 server to test")
    import boto3

    client = boto3.client("s3")
    name = f"dcr-test-{secrets.token_hex(8)}"
    client.create_bucket(Bucket=name)
    yield name
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for each in page.get("Contents", []):
            client.delete_object(Bucket=name, Key=each["Key"])
    client.delete_bucket(Bucket=name)


def test_real_s3(bucket: str, tmp_path: Path) -> None:
    run_processes(tmp_path, f"s3://{bucket}/race", {})


def test_openssh(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    with openssh_server(tmp_path / "ssh") as options:
        run_processes(tmp_path, f"sftp://127.0.0.1{tmp_path}/remote", options)


def test_azurite(tmp_path: Path) -> None:
    (tmp_path / "azurite").mkdir()
    with azurite_server(tmp_path / "azurite") as options:
        run_processes(tmp_path, "az://box/race", options)
