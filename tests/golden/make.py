"""Writes the golden files of a format. None is ever made anew.

    python tests/golden/make.py deltas tests/golden/NAME    pairs of checkpoints, a delta in each encoding
    python tests/golden/make.py remote tests/golden/NAME    a remote

A new major format, or a feature that changes what is written, gets a folder of its own beside the old ones.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dcr_cli.delta.choice import ALLOWED
from dcr_cli.diff import diff
from dcr_cli.store.opening import open_store
from receivers import write_rich_pair
from remotes import Remote, signing_key
from strategies import TensorData, every_dtype, with_changes, write_checkpoint


def weights(count: int, rate: float) -> tuple[bytes, bytes]:
    """BF16 weights as an optimiser leaves them, of which the small ones change most, before and after."""
    rng = np.random.default_rng(0)
    masters = (rng.standard_normal(count) * 0.02).astype("<f4")
    stepped = (masters.astype(np.float64) + rng.choice((-1, 1), count) * rate * 1e-3).astype("<f4")
    before, after = ((side.view("<u4") >> 16).astype("<u2").tobytes() for side in (masters, stepped))
    return before, after


def pair_of_dtypes(folder: Path) -> tuple[Path, Path]:
    """Tensors of every dtype that change here and there, and one with weights of a real distribution."""
    before: dict[str, TensorData] = every_dtype()
    after = {
        name: with_changes(tensor, range(0, len(tensor[2]) // 8, 5)) if len(tensor[2]) >= 64 else tensor
        for name, tensor in before.items()
    }
    old, new = weights(24_000, 0.02)
    before["w"], after["w"] = ("BF16", (240, 100), old), ("BF16", (240, 100), new)
    return write_checkpoint(folder / "base", before), write_checkpoint(folder / "target", after)


def write_deltas(folder: Path) -> None:
    """Write two pairs, and their deltas."""
    for name, write in (("rich", write_rich_pair), ("dtypes", pair_of_dtypes)):
        (folder / name).mkdir()
        base, target = write(folder / name)
        for encoding in ALLOWED:
            diff(base, target, folder / name / f"delta-{encoding}", encoding=encoding, jobs=1)


def write_remote(folder: Path) -> None:
    """Write an anchor, two deltas, one of which has an anchor too, and a break, all signed; and what else there is."""
    with open_store(folder) as store, tempfile.TemporaryDirectory() as scratch:
        base, target = write_rich_pair(Path(scratch))
        remote = Remote(store, Path(scratch), signing_key())
        remote.publish(base)
        second = remote.publish(target, base)
        remote.acknowledge(second, "host-1", "staged", is_built=True)
        remote.acknowledge(second, "host-1", "applied")
        remote.put_anchor(target, second.version.place)
        remote.publish(base, target)
        remote.publish(target)
        remote.hint(5, "streaming")


WRITERS = {"deltas": write_deltas, "remote": write_remote}

if __name__ == "__main__":
    Path(sys.argv[2]).mkdir()
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
