"""Writes the golden files of a format: pairs of checkpoints, a delta in each encoding. None is ever made anew.

    python tests/golden/make.py tests/golden/NAME

A new major format, or a feature that changes what is written, gets a folder of its own beside the old ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dcr_cli.delta.choice import ALLOWED
from dcr_cli.diff import diff
from receivers import write_rich_pair
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


def main(folder: Path) -> None:
    """Write two pairs, and their deltas."""
    folder.mkdir()
    for name, write in (("rich", write_rich_pair), ("dtypes", pair_of_dtypes)):
        (folder / name).mkdir()
        base, target = write(folder / name)
        for encoding in ALLOWED:
            diff(base, target, folder / name / f"delta-{encoding}", encoding=encoding, jobs=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
