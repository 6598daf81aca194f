"""Relays of a tree are killed at any time, again and again: every receiver ends each round with the publisher's bytes.

    DCR_ROUNDS=200 scripts/test -s tests/slow/test_relay_kills.py

One publisher pushes into the root of 1 + 2 + 4 relays, 8 receivers follow at the leaves. In each of DCR_ROUNDS (20)
rounds one relay, by chance (DCR_SEED), is killed while a version is made, sent, or applied, and started again. All the
time somebody else asks relays for objects of committed versions: what is answered whole has to be what the root holds,
and no object that is there may be said to be absent.
"""

from __future__ import annotations

import http.client
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from dcr_cli.push import push
from dcr_cli.verify_remote import verify_remote
from models import new_model, write
from receivers import tree
from relay_trees import RELAYS, Receiver, Relay, free_listens, new_receivers, new_tree, running, until

ROUNDS, SEED = int(os.environ.get("DCR_ROUNDS", "20")), int(os.environ.get("DCR_SEED", "0"))
MODEL_BYTES, CHANGED = 2_000_000, 0.1
ARRIVE_SECONDS = 180.0


@dataclass
class Auditor:
    """Asks relays for what is in a remote, and compares."""

    remote: Path
    relays: Sequence[Relay]
    dice: random.Random
    keys: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def learn(self) -> None:
        """Take all that is there as committed: nothing is being published."""
        files = (path for place in ("commits", "versions", "anchors") for path in (self.remote / place).rglob("*"))
        # What begins with a dot is being written, and no object yet.
        objects = (path for path in files if path.is_file() and not path.name.startswith("."))
        self.keys = ["dcr.json", *sorted(str(path.relative_to(self.remote)) for path in objects)]

    def ask(self) -> None:
        key, relay = self.dice.choice(self.keys), self.dice.choice(self.relays)
        connection = http.client.HTTPConnection(urlsplit(relay.url).netloc, timeout=60)
        try:
            connection.request("GET", f"/{key}")
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self.answers["none, or cut"] += 1
            return
        finally:
            connection.close()
        self.answers[str(answer.status)] += 1
        if answer.status == 404 or (answer.status == 200 and data != (self.remote / key).read_bytes()):
            self.wrong.append(f"{relay.name} has answered {answer.status} with {len(data)} bytes to {key}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(0.05):
                self.ask()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def killed(relay: Relay, dice: random.Random, lives: list[float]) -> Iterator[None]:
    """Kill a relay at some time meanwhile, and start it again after another."""
    first, then = dice.random() * max(lives[-5:]), dice.choice([0.0, dice.random() * 4])

    def work() -> None:
        time.sleep(first)
        relay.end()
        time.sleep(then)
        relay.start()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_any_relay_is_killed_at_any_time(tmp_path: Path) -> None:
    dice, rng = random.Random(SEED), np.random.default_rng(SEED)
    model, checkpoint, remote = new_model(rng, MODEL_BYTES), tmp_path / "checkpoint", tmp_path / "remote"
    relays = new_tree(tmp_path, remote, free_listens(RELAYS))
    receivers = new_receivers(tmp_path, relays)
    auditor = Auditor(remote, relays, random.Random(f"{SEED} audit"))
    lives, kills = [2.0], Counter[str]()
    begun = time.monotonic()
    with running(relays):
        push(write(model, checkpoint), relays[0].url, baseline=tmp_path / "baseline")
        auditor.learn()
        with running(receivers), auditor.at_work():
            arrive(receivers, 1, checkpoint)
            for number in range(2, ROUNDS + 2):
                for tensor in model:
                    chosen = rng.random(len(tensor), np.float32) < CHANGED
                    tensor[chosen] = rng.integers(0, 1 << 16, int(chosen.sum()), np.uint16)
                write(model, checkpoint)
                relay = dice.choice(relays)
                kills[relay.name] += 1
                at = time.monotonic()
                with killed(relay, dice, lives):
                    assert push(checkpoint, relays[0].url, baseline=tmp_path / "baseline").version == number
                    arrive(receivers, number, checkpoint)
                    lives.append(time.monotonic() - at)
                auditor.learn()
                assert not auditor.wrong, auditor.wrong
    print(f"\n{ROUNDS} rounds in {time.monotonic() - begun:.0f} s; killed: {dict(sorted(kills.items()))}")
    print(
        f"a version took {sorted(lives)[len(lives) // 2]:.1f} s, at most {max(lives):.1f} s; audited: {auditor.answers}"
    )
    assert verify_remote(remote, deep=True).matches


def arrive(receivers: Sequence[Receiver], version: int, checkpoint: Path) -> None:
    """Wait until all are at a version; they have its bytes."""
    until(lambda: all(receiver.version() == version for receiver in receivers), *receivers, seconds=ARRIVE_SECONDS)
    expected = tree(checkpoint)
    for receiver in receivers:
        assert tree(receiver.root) == expected, receiver.name
