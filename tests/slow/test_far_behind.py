"""Receivers that are far behind: twenty versions in one pass.

    DCR_MODEL_MB=200 scripts/test -s tests/slow/test_far_behind.py

DCR_MODEL_MB (16) is the size of the model. What is written is counted by the system, in all that this process writes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from dcr_cli.anchor import anchor
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.store.backend import Backend
from models import MODEL_BYTES, new_model, train, write
from receivers import tree
from store_wrappers import Records, wrapping

BEHIND = 20
# How much more a pass may write than what it fetches and one copy of the model: in place, what changes is noted before.
MOST = {"replace": 1.05, "in-place": 1.4}


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
