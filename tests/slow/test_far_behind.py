"""Receivers that are far behind, or far ahead: twenty versions in one pass, and a version before it is committed.

    DCR_MODEL_MB=200 scripts/test -s tests/slow/test_far_behind.py

DCR_MODEL_MB (16) is the size of the model. What is written is counted by the system, in all that this process writes.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.anchor import anchor
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.publisher import outgoing
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.store.backend import Backend
from receivers import tree
from store_wrappers import Records, start_dcr, wrapping
from strategies import TensorData, write_checkpoint

MODEL_BYTES = int(os.environ.get("DCR_MODEL_MB", "16")) * 1_000_000
TENSORS, SHARDS, BEHIND = 16, 4, 20
# How much more a pass may write than what it fetches and one copy of the model: in place, what changes is noted before.
MOST = {"replace": 1.05, "in-place": 1.4}
PAYLOADS, PUSH_SECONDS, ARRIVE_SECONDS = 24, 20, 120
EARLY = 0.8

Elements = list[NDArray[np.uint16]]


def new_model(rng: np.random.Generator) -> Elements:
    count = MODEL_BYTES // TENSORS // 2
    return [(rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype("<u2") for _ in range(TENSORS)]


def train(model: Elements, rng: np.random.Generator, share: float) -> None:
    for tensor in model:
        tensor += (rng.random(len(tensor), np.float32) < share).astype("<u2")


def write(model: Elements, folder: Path) -> Path:
    tensors: dict[str, TensorData] = {
        f"layers.{number}.weight": ("BF16", (len(tensor),), tensor.tobytes()) for number, tensor in enumerate(model)
    }
    return write_checkpoint(folder, tensors, shards=SHARDS, sidecars={"config.json": b"{}"})


def written_bytes() -> int:
    """What this process has written so far, to files above all."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize(("share", "is_by_anchor"), [(0.003, False), (0.5, True)], ids=["deltas", "anchor"])
def test_twenty_versions_in_one_pass(tmp_path: Path, mode: str, share: float, is_by_anchor: bool) -> None:
    rng = np.random.default_rng(0)
    model, remote, root = new_model(rng), tmp_path / "remote", tmp_path / "receiver"
    delta_bytes = 0
    for version in range(1, BEHIND + 2):
        checkpoint = write(model, tmp_path / "checkpoint")
        result = push(checkpoint, remote, baseline=tmp_path / "baseline")
        delta_bytes += result.delta_bytes if version > 1 else 0
        if version == 1:
            pull(remote, root)
        if version == BEHIND and is_by_anchor:
            anchor(checkpoint, remote, version=version)
        train(model, rng, share)
    records: list[Records] = []

    def record(backend: Backend) -> Backend:
        records.append(Records(backend))
        return records[-1]

    before, begun = written_bytes(), time.monotonic()
    with wrapping(record):
        pulled = pull(remote, root, mode=mode)
    written, seconds = written_bytes() - before, time.monotonic() - begun
    assert tree(root) == tree(checkpoint)
    assert pulled.way is not None
    requests = sum(len(each.calls) for each in records)
    print(f"\n{mode}, {'anchor' if is_by_anchor else 'deltas'}: {MODEL_BYTES:,} bytes, {BEHIND} versions behind, of")
    print(f"  {delta_bytes:,} bytes; fetched {pulled.downloaded_bytes:,} in {requests} requests, wrote {written:,}")
    print(f"  in {seconds:.1f} s, way {pulled.way}")
    assert (pulled.way.anchor is not None) == is_by_anchor
    assert pulled.downloaded_bytes < 1.05 * delta_bytes
    # Where an anchor's files come, they are what is fetched.
    assert written < MOST[mode] * (MODEL_BYTES + pulled.downloaded_bytes)


def test_most_of_a_version_is_there_before_its_commit(tmp_path: Path) -> None:
    """A publisher that is slow, as over a slow line, and a follower that has most of it before it exists."""
    rng = np.random.default_rng(0)
    model, remote, root = new_model(rng), tmp_path / "remote", tmp_path / "receiver"
    push(write(model, tmp_path / "checkpoint"), remote, baseline=tmp_path / "baseline")
    for tensor in model:
        tensor[:] = rng.integers(0, 1 << 16, len(tensor), np.uint16)
    checkpoint = write(model, tmp_path / "checkpoint")
    small = functools.partial(PayloadWriter, data_limit=MODEL_BYTES // PAYLOADS)
    log = tmp_path / "log"
    with log.open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        follower = start_dcr("BACKEND", "pull", "--follow", "--json", remote, root, stdout=out, stderr=errors)
        try:
            wait_for_arrivals(log, 1)
            with mock.patch.object(outgoing, "PayloadWriter", small):
                push(
                    checkpoint,
                    remote,
                    baseline=tmp_path / "baseline",
                    limit_bytes_per_second=MODEL_BYTES // PUSH_SECONDS,
                )
            arrivals = wait_for_arrivals(log, 2)
        finally:
            follower.send_signal(signal.SIGTERM)
            follower.wait()
    arrival = arrivals[1]
    early = arrival["result"]["fetched_before_commit_bytes"] / arrival["payload_bytes"]
    print(f"\n{arrival['payload_bytes']:,} bytes of payloads, {early:.1%} of them before the commit;", end=" ")
    print(f"arrived {arrival['at']}, {arrival['since_commit_seconds']:.1f} s after the push began")
    assert tree(root) == tree(checkpoint)
    assert early >= EARLY


def wait_for_arrivals(log: Path, count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + ARRIVE_SECONDS
    while True:
        lines = log.read_bytes().split(b"\n")[:-1]
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        assert time.monotonic() < end, log.with_name("errors").read_text()
        time.sleep(0.05)
