"""How much of a version a follower has before its commit, and how soon after it the version is applied, in each mode.

    DCR_MODEL_MB=200 scripts/test -s tests/slow/test_follow_times.py

The remote is a folder, and then the one that DCR_TEST_REMOTE names, if it does, below a prefix that is removed again.
DCR_MODEL_MB (16) is the size of the model, of whose elements DCR_CHANGED (0.03) change with each version; follower and
publisher are two processes of one machine, and so both times are of one clock: when the answer came that the commit had
been created, and what the follower says of its arrival.

The pace: on its own, a push of so small a model is over before a follower looks for the second time. So all transfers
of a push are held, with its own --limit-rate, to what sends the delta in DCR_PUSH_SECONDS (10), and the delta goes out
in 12 payloads or more, each of which holds some blocks; nothing else is slowed, and a slower line slows it further. A
follower looks every half second at the most, and what it has not seen by the commit it fetches after it: of ten seconds
that leaves room for more than the 80 % that have to be there.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.diff import diff
from dcr_cli.publisher import outgoing
from dcr_cli.push import push
from dcr_cli.store.backend import Backend
from dcr_cli.store.opening import open_store
from models import MODEL_BYTES, new_model, train, write
from real_servers import named_remote
from receivers import tree
from store_wrappers import Wrapped, start_dcr, wrapping

CHANGED = float(os.environ.get("DCR_CHANGED", "0.03"))
PUSH_SECONDS = float(os.environ.get("DCR_PUSH_SECONDS", "10"))
PAYLOADS, ARRIVE_SECONDS = 12, 300.0
EARLY = 0.8
MODES = {"replace": (), "in-place": ("--in-place",), "aside": ("--aside",)}


class NotesCommits(Wrapped):
    """Notes when commits have been created."""

    times: list[float]

    def done(self, name: str, key: str) -> None:
        if name == "create" and key.startswith("commits/"):
            self.times.append(time.time())


@pytest.fixture(params=["folder", "named"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "remote")
        return
    root = f"{named_remote()}/dcr-test-{secrets.token_hex(8)}"
    yield root
    with open_store(root) as store:
        for entry in store.list():
            store.delete(entry.key)


def test_most_is_there_before_the_commit(remote: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    model, checkpoint, baseline = new_model(rng), tmp_path / "checkpoint", tmp_path / "baseline"
    push(write(model, checkpoint), remote, baseline=baseline)
    rows = []
    for mode, options in MODES.items():
        train(model, rng, CHANGED)
        write(model, checkpoint)
        delta_bytes = diff(baseline, checkpoint).delta_bytes
        with following(remote, tmp_path / mode, options) as log:
            wait_for_arrivals(log, 1)
            begun = time.monotonic()
            committed_at = paced_push(checkpoint, remote, baseline, delta_bytes)
            seconds = time.monotonic() - begun
            arrival = wait_for_arrivals(log, 2)[1]
        assert tree((tmp_path / mode).resolve()) == tree(checkpoint)
        early = arrival["result"]["fetched_before_commit_bytes"] / arrival["payload_bytes"]
        after = datetime.fromisoformat(arrival["at"]).timestamp() - committed_at
        rows.append((mode, arrival["payload_bytes"], seconds, early, after, arrival["within_seconds"]))
    print(f"\n{remote}: a model of {MODEL_BYTES:,} bytes, {CHANGED:.1%} of it changed")
    heading = "mode", "payload bytes", "push s", "before the commit", "applied after s", "said at most s"
    print("{:<10}{:>15}{:>8}{:>19}{:>17}{:>16}".format(*heading))
    for name, payload_bytes, seconds, early, after, within in rows:
        print(f"{name:<10}{payload_bytes:>15,}{seconds:>8.1f}{early:>19.1%}{after:>17.2f}{within:>16.2f}")
    print(json.dumps({"remote": remote.partition(":")[0], "model_bytes": MODEL_BYTES, "rows": rows}))
    for name, _, _, early, after, within in rows:
        assert early >= EARLY, name
        assert after <= within, name


def paced_push(checkpoint: Path, remote: str, baseline: Path, delta_bytes: int) -> float:
    """Push at the pace that the module tells of: when the commit had been created."""
    small = functools.partial(PayloadWriter, data_limit=delta_bytes // PAYLOADS)
    times: list[float] = []

    def noting(backend: Backend) -> Backend:
        wrapped = NotesCommits(backend)
        wrapped.times = times
        return wrapped

    with wrapping(noting), mock.patch.object(outgoing, "PayloadWriter", small):
        push(checkpoint, remote, baseline=baseline, limit_bytes_per_second=int(delta_bytes / PUSH_SECONDS))
    return times[-1]


@contextmanager
def following(remote: str, root: Path, options: tuple[str, ...]) -> Iterator[Path]:
    """A follower in a process of its own: the file that it tells of its arrivals in."""
    log = root.with_name(f"{root.name}.log")
    with log.open("wb") as out, log.with_suffix(".errors").open("wb") as errors:
        follower = start_dcr("BACKEND", "pull", "--follow", "--json", *options, remote, root, stdout=out, stderr=errors)
        try:
            yield log
        finally:
            follower.send_signal(signal.SIGTERM)
            follower.wait()


def wait_for_arrivals(log: Path, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + ARRIVE_SECONDS
    while True:
        lines = log.read_bytes().split(b"\n")[:-1]
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        assert time.monotonic() < end, log.with_suffix(".errors").read_text()
        time.sleep(0.05)
