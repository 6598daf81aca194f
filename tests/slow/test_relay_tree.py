"""What a tree of relays saves: one publisher, 1 + 2 + 4 relays, 8 receivers, and a first hop of 50 MB/s.

    DCR_MODEL_MB=200 scripts/test -s tests/slow/test_relay_tree.py

Two hosts are two network namespaces, joined by a link that tbf limits to DCR_HOP_MB (50) MB/s each way: the publisher's
is far, all receivers' is near. In turn the same versions are published

- into the tree, whose root is near: `dcr push` puts payloads at the root across the link, while it makes them;
- to a relay that is far, from which each receiver follows across the link.

The link's own counters say how many bytes crossed it. Needs root, ip and tc; elsewhere the test is skipped. Elements of
the model, DCR_CHANGED (0.2) of them, get random bits, so that a small model makes a delta of some tens of MB.
Everything runs on one machine: with few processors, applying at eight receivers is what takes most of the time, and so
times are printed, and only bytes and order are asserted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from models import Elements, new_model, write
from receivers import tree
from relay_trees import (
    RECEIVERS,
    RELAYS,
    Receiver,
    Relay,
    new_receiver,
    new_receivers,
    new_relay,
    new_tree,
    running,
    until,
)

MODEL_BYTES = int(os.environ.get("DCR_MODEL_MB", "200")) * 1_000_000
CHANGED = float(os.environ.get("DCR_CHANGED", "0.2"))
HOP_BYTES = int(float(os.environ.get("DCR_HOP_MB", "50")) * 1_000_000)
# Of what crosses the link, headers of packets, and documents and requests about payloads.
OVERHEAD, DOCUMENT_BYTES = 1.05, 2_000_000
ARRIVE_SECONDS = 600.0
FAR, NEAR = "198.18.0.1", "198.18.0.2"


@dataclass(frozen=True)
class Hosts:
    """The two namespaces: what runs a command in each."""

    far: tuple[str, ...]
    near: tuple[str, ...]

    def crossed(self) -> int:
        """Bytes that have come to the near end of the link."""
        found = subprocess.run([*self.near, "cat", "/sys/class/net/hop/statistics/rx_bytes"], capture_output=True)
        return int(found.stdout)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, and ip and tc: apt-get install iproute2")
    names = [f"dcr-{side}-{os.getpid()}" for side in ("far", "near")]
    try:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()}")
        call("ip", "-n", names[0], "link", "add", "hop", "type", "veth", "peer", "name", "hop", "netns", names[1])
        for name, address in zip(names, (FAR, NEAR), strict=True):
            call("ip", "-n", name, "address", "add", f"{address}/30", "dev", "hop")
            for device in ("lo", "hop"):
                call("ip", "-n", name, "link", "set", device, "up")
            limit = f"rate {8 * HOP_BYTES}bit burst 256kb latency 50ms".split()
            call("tc", "-n", name, "qdisc", "add", "dev", "hop", "root", "tbf", *limit)
        yield Hosts(*(("ip", "netns", "exec", name) for name in names))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@dataclass(frozen=True)
class Shown:
    """One version's way to all receivers; times are seconds after its first payload began to be put."""

    payload_bytes: int
    crossed_bytes: int
    first_at_leaves: float
    commit: float
    first_applied: float
    last_applied: float
    least_early: float


@dataclass(frozen=True)
class Set:
    """What is published into, and who receives from which relays."""

    hosts: Hosts
    root: Relay
    relays: Sequence[Relay]
    leaves: Sequence[Relay]
    receivers: Sequence[Receiver]


def test_a_payload_crosses_the_first_hop_once(hosts: Hosts, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model, checkpoint = new_model(rng, MODEL_BYTES), tmp_path / "checkpoint"
    shown: dict[str, Shown] = {}
    for name, made in (("tree", tree_of_relays), ("direct", far_relay)):
        write(model, checkpoint)
        with made(hosts, tmp_path / name) as those:
            publish(those, checkpoint)
            with followed(those, checkpoint):
                before = [received_bytes(hosts, relay) for relay in those.relays]
                change(model, rng)
                write(model, checkpoint)
                shown[name] = show(those, checkpoint)
                for relay, at in zip(those.relays, before, strict=True):
                    received = received_bytes(hosts, relay) - at
                    # The root is given what the publisher puts; to the others all comes once.
                    most = shown[name].payload_bytes + DOCUMENT_BYTES if relay is not those.root else 0
                    assert received <= most, relay.name
            for receiver in those.receivers:
                assert tree(receiver.root) == tree(checkpoint), receiver.name
        shutil.rmtree(tmp_path / name)
    tell(shown)
    once, direct = shown["tree"], shown["direct"]
    assert once.payload_bytes <= once.crossed_bytes <= OVERHEAD * once.payload_bytes + DOCUMENT_BYTES
    assert direct.crossed_bytes >= RECEIVERS * direct.payload_bytes
    assert once.first_at_leaves < once.commit


@contextmanager
def tree_of_relays(hosts: Hosts, folder: Path) -> Iterator[Set]:
    """All relays near; the root has a folder behind it."""
    folder.mkdir()
    listens = [f"{NEAR}:{8001 + number}" for number in range(RELAYS)]
    relays = new_tree(folder, folder / "remote", listens, *open_to_read(folder), prefix=hosts.near)
    with running(relays):
        yield Set(hosts, relays[0], relays, relays[-4:], new_receivers(folder, relays, prefix=hosts.near))


@contextmanager
def far_relay(hosts: Hosts, folder: Path) -> Iterator[Set]:
    """One relay far, with a folder behind it."""
    folder.mkdir()
    relay = new_relay("far", folder, [folder / "remote"], f"{FAR}:8001", *open_to_read(folder), prefix=hosts.far)
    receivers = [
        new_receiver(f"receiver-{number}", folder, [relay.url], prefix=hosts.near) for number in range(RECEIVERS)
    ]
    with running([relay]):
        yield Set(hosts, relay, [relay], [relay], receivers)


def open_to_read(folder: Path) -> tuple[str, ...]:
    """What lets anybody who reaches a relay read, and the publisher write."""
    (folder / "token").write_text(secrets.token_hex(16))
    return "--insecure", "--write-token-file", str(folder / "token")


@contextmanager
def followed(those: Set, checkpoint: Path) -> Iterator[None]:
    """Run the receivers, each of which begins with a copy of the first version."""
    for receiver in those.receivers:
        shutil.copytree(checkpoint, receiver.root)
    words = those.root.folder / "remote/acks"
    with running(those.receivers):
        until(lambda: len(list(words.rglob("*.applied"))) == RECEIVERS, *those.relays, *those.receivers)
        yield


def publish(those: Set, checkpoint: Path) -> None:
    """Push from the far host."""
    baseline = those.root.folder / "baseline"
    token = f"token_file={those.root.folder / 'token'}"
    command = ("push", checkpoint, those.root.url, "--baseline", baseline, "--storage-option", token, "-q", "-j", "1")
    subprocess.run([*those.hosts.far, sys.executable, "-m", "dcr_cli", *map(str, command)], check=True)


def show(those: Set, checkpoint: Path) -> Shown:
    """Publish the second version, and see how it comes to all receivers."""
    crossed = those.hosts.crossed()
    publish(those, checkpoint)
    until(
        lambda: all(receiver.version() == 2 for receiver in those.receivers),
        *those.relays,
        *those.receivers,
        seconds=ARRIVE_SECONDS,
    )
    crossed = those.hosts.crossed() - crossed
    begun = asked(those.root, "PUT", "versions/0000000002-*/payloads/000000.*")
    arrivals = [receiver.arrivals()[-1] for receiver in those.receivers]
    applied = [datetime.fromisoformat(arrival["at"]).timestamp() - begun.begin for arrival in arrivals]
    early = [arrival["result"]["fetched_before_commit_bytes"] / arrival["payload_bytes"] for arrival in arrivals]
    firsts = [asked(leaf, "GET", "versions/0000000002-*/payloads/000000.*").end for leaf in those.leaves]
    return Shown(
        payload_bytes=arrivals[0]["payload_bytes"],
        crossed_bytes=crossed,
        first_at_leaves=max(firsts) - begun.begin,
        commit=asked(those.root, "PUT", "commits/0000000002.json").end - begun.begin,
        first_applied=min(applied),
        last_applied=max(applied),
        least_early=min(early),
    )


@dataclass(frozen=True)
class Asked:
    """When a request came, and when it was answered."""

    begin: float
    end: float


def asked(relay: Relay, method: str, pattern: str) -> Asked:
    """The first request of its kind that a relay's log has."""
    for line in relay.requests():
        if line["method"] == method and line["status"] < 300 and fnmatchcase(line["path"], f"/{pattern}"):
            end = datetime.fromisoformat(line["time"]).timestamp()
            return Asked(end - line["seconds"], end)
    raise AssertionError(f"{relay.name} was asked for no {pattern}")


def received_bytes(hosts: Hosts, relay: Relay) -> int:
    """The bytes of bodies that a relay has from its parents."""
    read = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    command = [*hosts.near, sys.executable, "-c", read, f"{relay.url}/status"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(found["received_bytes"])


def change(model: Elements, rng: np.random.Generator) -> None:
    """Give some elements of a model other bits."""
    for tensor in model:
        chosen = rng.random(len(tensor), np.float32) < CHANGED
        tensor[chosen] = rng.integers(0, 1 << 16, int(chosen.sum()), np.uint16)


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def tell(shown: dict[str, Shown]) -> None:
    print(
        f"\na model of {MODEL_BYTES:,} bytes, {CHANGED:.0%} of it changed; a first hop of {HOP_BYTES:,} bytes a second"
    )
    heading = (
        "payload bytes",
        "crossed",
        "first at leaves",
        "commit",
        "first applied",
        "last applied",
        "before the commit",
    )
    print(f"{'':<8}" + "".join(f"{word:>18}" for word in heading))
    for name, one in shown.items():
        sizes = f"{one.payload_bytes:>18,}{one.crossed_bytes:>18,}"
        times = "".join(
            f"{seconds:>16.2f} s" for seconds in (one.first_at_leaves, one.commit, one.first_applied, one.last_applied)
        )
        print(f"{name:<8}{sizes}{times}{one.least_early:>18.0%}")
    rows = {name: asdict(one) for name, one in shown.items()}
    print(json.dumps({"model_bytes": MODEL_BYTES, "changed": CHANGED, "hop_bytes_per_second": HOP_BYTES, **rows}))
