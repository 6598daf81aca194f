"""What has to hold of any device: a delta that is made by way of it is byte for byte that of the CPU.

Every run of blocks goes there, however short; whatever it has to do, the device is asked for by name.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dcr_cli
from dcr_cli.delta import device_scan
from dcr_cli.device import finding
from kernel_cases import BLOCK_BYTES, Spec, pair
from receivers import tree
from strategies import TensorData, Tensors, write_checkpoint

SPECS = {
    "BF16": Spec(2, 8, 7),
    "F16": Spec(2, 5, 10),
    "F32": Spec(4, 8, 23),
    "F64": Spec(8, 11, 52),
    "F8_E4M3": Spec(1, 4, 3),
    "F8_E5M2": Spec(1, 5, 2),
    "I32": Spec(4, 0, 0),
    "U8": Spec(1, 0, 0),
}
SIZES = (0, 1, 63, 64, 65, 1000)
ENCODINGS = ("auto", "context", "gap", "whole")


def sides(dtype: str, elements: int, rate: float, seed: int = 0) -> tuple[TensorData, TensorData]:
    """A tensor, and what it became."""
    old, new = pair(SPECS[dtype], elements, rate, seed)
    return (dtype, (elements,), old.tobytes()), (dtype, (elements,), new.tobytes())


def write_pair(root: Path, tensors: dict[str, tuple[TensorData, TensorData]], **target: Tensors) -> tuple[Path, Path]:
    """Two checkpoints of two shards of these tensors, the target's with more of its own."""
    base = write_checkpoint(root / "base", {name: old for name, (old, _) in tensors.items()}, shards=2)
    new = {name: new for name, (_, new) in tensors.items()}
    return base, write_checkpoint(root / "target", new | dict(target.get("more", {})), shards=2)


class DeviceDeltas:
    """The tests; `lanes`, a device, is a fixture of the modules that have one."""

    @pytest.fixture(autouse=True)
    def device(self, lanes: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
        """Have the device found as cuda:0, and count the pieces that go there, by width."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(finding, "find", lambda index: lanes)
        monkeypatch.setattr(device_scan, "RUN_BYTES", 1)
        pieces: Counter[int] = Counter()
        compare = comparing.Device.compare

        def counted(device: Any, piece: Any, base: Any, target: Any) -> Any:
            pieces[piece.width] += 1
            return compare(device, piece, base, target)

        monkeypatch.setattr(comparing.Device, "compare", counted)
        return pieces

    def check(self, base: Path, target: Path, out: Path, encoding: str = "auto", *, jobs: int = 1) -> Any:
        """Compare the two deltas; the device's is applied, too."""
        there = dcr_cli.diff(base, target, out / "there", encoding=encoding, jobs=jobs, device="cuda")
        here = dcr_cli.diff(base, target, out / "here", encoding=encoding, jobs=jobs, device="cpu")
        assert tree(out / "there") == tree(out / "here")
        assert (there.base, there.target, there.changed_elements) == (here.base, here.target, here.changed_elements)
        assert here.device == "cpu" and there.device == there.account.device != "cpu"
        return there

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_all_dtypes_and_sizes(self, tmp_path: Path, device: Counter[int], encoding: str) -> None:
        tensors = {f"{dtype}.{n}": sides(dtype, n, 0.3, n) for dtype in SPECS for n in SIZES}
        self.check(*write_pair(tmp_path, tensors), tmp_path, encoding, jobs=2)
        assert set(device) == (set() if encoding == "whole" else {1, 2, 4, 8})

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_several_blocks(self, tmp_path: Path, device: Counter[int], jobs: int) -> None:
        """One of them one element past a block; in one tensor nothing changed, in one all did."""
        n = BLOCK_BYTES // 2
        tensors = {
            "one past": sides("BF16", n + 1, 0.01),
            "same": (sides("BF16", 5000, 0.0)[0],) * 2,
            "other": sides("F32", 1000, 1.0),
        }
        base, target = write_pair(tmp_path, tensors)
        result = self.check(base, target, tmp_path, jobs=jobs)
        assert device == {2: 2, 4: 1}
        names = [stage.name for stage in result.account.stages]
        assert {"read", "copy there", "compare", "copy back", "draft", "code", "write"} <= set(names)
        compared = next(stage for stage in result.account.stages if stage.name == "compare")
        assert compared.bytes == result.dense_bytes and compared.seconds > 0

    def test_tasks_and_what_comes_back_in_parts(
        self, tmp_path: Path, device: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tensor larger than a slot goes there in pieces; changes that do not fit come back block by block."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(comparing, "PIECE_BYTES", 2 * BLOCK_BYTES)
        # So many changes of F64 take 64 KiB: those of a block, and not of two.
        monkeypatch.setattr(comparing, "_BACK_BYTES", 64 << 10)
        n = BLOCK_BYTES // 8
        base, target = write_pair(tmp_path, {"a": sides("F64", 2 * n + 5, 0.02), "b": sides("F64", 2000, 1.0)})
        self.check(base, target, tmp_path, jobs=2)
        assert device[8] > 2

    def test_what_has_no_two_sides_stays_where_it_is(self, tmp_path: Path, device: Counter[int]) -> None:
        """Added, removed, renamed, tied and moved tensors, and those of another form."""
        n = 3000
        old, new = sides("BF16", n, 0.1)
        tied = sides("F16", n, 0.2)
        base = {"changed": old, "gone": sides("I32", n, 0.0)[0], "old name": tied[0], "wide": sides("F32", n, 0.1)[0]}
        target = {"changed": new, "twin": new, "new name": tied[0], "wide": sides("F64", n, 0.1)[1]}
        self.check(
            write_checkpoint(tmp_path / "base", base, shards=2),
            write_checkpoint(tmp_path / "target", target, shards=3),
            tmp_path,
        )
        assert device[8] == 0

    def test_the_delta_leads_to_the_target(self, tmp_path: Path, device: Counter[int]) -> None:
        base, target = write_pair(tmp_path, {"a": sides("BF16", 5000, 0.1), "b": sides("F8_E4M3", 70, 1.0)})
        self.check(base, target, tmp_path)
        dcr_cli.apply(tmp_path / "there", base)
        assert tree(base) == tree(target)

    def test_a_push_and_its_parts(self, tmp_path: Path, device: Counter[int]) -> None:
        """The version of a push, and of parts, leads to the target; the baseline is compared where it was asked for."""
        base, target = write_pair(tmp_path, {"a": sides("BF16", 5000, 0.1), "b": sides("I32", 900, 0.1)})
        remote = tmp_path / "remote"
        assert dcr_cli.push(base, remote, baseline=tmp_path / "baseline").device is None
        result = dcr_cli.push(target, remote, baseline=tmp_path / "baseline", device="cuda:0")
        assert result.device not in (None, "cpu") and device[2] and device[4]
        dcr_cli.pull(remote, tmp_path / "receiver")
        assert tree(tmp_path / "receiver") == tree(target)
