"""A model of twice the memory that the commands may have, one tensor of it as large as that memory."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from strategies import raw_file, shard_name, write_weight_map

LIMIT_BYTES = 512 << 20
SHARD_ELEMENTS = LIMIT_BYTES // 2
SHARDS = 2
CHANGED = 0.003


def limited(*arguments: str | Path) -> None:
    """Run the command with all its memory limited: what it maps, allocates and needs for threads."""
    subprocess.run(
        [sys.executable, "-m", "dcr_cli", *map(str, arguments), "-q"],
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Two checkpoints of SHARDS shards of one tensor each, written in parts."""
    sides = folder / "base", folder / "target"
    rng = np.random.default_rng(0)
    for root in sides:
        root.mkdir()
        write_weight_map(root, {f"w{number}": shard_name(number, SHARDS) for number in range(SHARDS)})
    for number in range(SHARDS):
        entry = {"dtype": "BF16", "shape": [SHARD_ELEMENTS], "data_offsets": [0, 2 * SHARD_ELEMENTS]}
        header = raw_file(json.dumps({f"w{number}": entry}))
        files = [(root / shard_name(number, SHARDS)).open("wb") for root in sides]
        for file in files:
            file.write(header)
        for _ in range(0, SHARD_ELEMENTS, 1 << 22):
            old = (rng.standard_normal(1 << 22, np.float32).view(np.uint32) >> 16).astype("<u2")
            step = (rng.random(1 << 22, np.float32) < CHANGED).astype("<u2")
            files[0].write(old.tobytes())
            files[1].write((old + step).tobytes())
        for file in files:
            file.close()
    return sides


@pytest.mark.parametrize("options", [(), ("--in-place",)], ids=["replace", "in-place"])
def test_a_model_larger_than_memory(tmp_path: Path, options: tuple[str, ...]) -> None:
    base, target = write_pair(tmp_path)
    limited("diff", base, target, "-o", tmp_path / "delta")
    shutil.copytree(base, tmp_path / "receiver")
    limited("apply", tmp_path / "delta", tmp_path / "receiver", *options)
    limited("verify", tmp_path / "receiver", "--against", target)
    for path in sorted(target.iterdir()):
        subprocess.run(["cmp", str(path), str(tmp_path / "receiver" / path.name)], check=True)
