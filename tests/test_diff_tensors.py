"""diff_tensors without a device: what it takes, and what it refuses. What deltas hold is tested where devices are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dcr_cli
from dcr_cli.delta import device_scan
from dcr_cli.device import finding
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.publisher import devices
from receivers import tree
from strategies import write_checkpoint

OLD: dict[str, NDArray[Any]] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(0, np.int8)}
OBJECTS = {"a": np.zeros(2, "O")}


def test_arrays_and_tensors_are_one(tmp_path: Path) -> None:
    new = OLD | {"a": OLD["a"] + np.float32(1)}
    result = dcr_cli.diff_tensors(OLD, new, tmp_path / "arrays")
    assert (result.tensors, result.elements, result.changed_tensors, result.changed_elements) == (2, 6, 1, 6)
    assert (result.dense_bytes, result.device, result.same) == (24, "cpu", False)
    assert result.account.why == "no tensor that is long enough lies on a CUDA device"
    old, torches = ({name: torch.from_numpy(each) for name, each in side.items()} for side in (OLD, new))
    assert dcr_cli.diff_tensors(old, torches, tmp_path / "torches") != result
    assert tree(tmp_path / "arrays") == tree(tmp_path / "torches")


def test_a_receiver_keeps_its_shards_and_files(tmp_path: Path) -> None:
    tensors = {"a": ("F32", (2, 3), OLD["a"].tobytes()), "b": ("I8", (0,), b"")}
    receiver = write_checkpoint(tmp_path / "receiver", tensors, shards=2, sidecars={"config.json": b"{}"})
    before = set(tree(receiver))
    dcr_cli.diff_tensors(OLD, OLD | {"a": -OLD["a"]}, tmp_path / "delta")
    dcr_cli.apply(tmp_path / "delta", receiver)
    tensors["a"] = ("F32", (2, 3), (-OLD["a"]).tobytes())
    expected = write_checkpoint(tmp_path / "expected", tensors, shards=2, sidecars={"config.json": b"{}"})
    assert tree(receiver) == tree(expected) and set(tree(receiver)) == before


def test_nothing_changed_and_nothing_is_written(tmp_path: Path) -> None:
    result = dcr_cli.diff_tensors(OLD, OLD)
    assert result.same and result.output is None and result.delta_bytes > 0


@pytest.mark.parametrize(
    ("base", "target", "error", "message"),
    [
        (OLD, {"a": OLD["a"]}, UsageError, r"^target: has not the names of the base: b$"),
        (OLD, OLD | {"c": OLD["a"]}, UsageError, r"^target: has not the names of the base: c$"),
        (OLD, OLD | {"b": 5}, UsageError, r"^tensor b: a NumPy array or a torch tensor expected, found int$"),
        (OBJECTS, OBJECTS, UnsupportedError, r"^tensor a: no checkpoint has elements of object$"),
        (
            OLD,
            OLD | {"a": OLD["a"].T},
            UnsupportedError,
            r"^tensor a: was F32 of shape \[2, 3\] and is F32 of shape \[3, 2\]$",
        ),
        (OLD, OLD | {"b": np.zeros(0, np.uint8)}, UnsupportedError, r"^tensor b: was I8 of shape \[0\] and is U8"),
    ],
)
def test_what_is_no_pair_is_refused(
    base: dict[str, Any], target: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        dcr_cli.diff_tensors(base, target, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^encoding: "):
        dcr_cli.diff_tensors(OLD, OLD, encoding="zip")
    with pytest.raises(UsageError, match=r"^--device: "):
        dcr_cli.diff_tensors(OLD, OLD, device="gpu")
    with pytest.raises(UsageError, match=r"^jobs: "):
        dcr_cli.diff_tensors(OLD, OLD, jobs=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError):
        dcr_cli.diff_tensors(OLD, OLD, tmp_path / "file")


def test_where_tensors_are_compared_is_chosen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device cannot be had that tensors lie on, the CPU compares them, and that is said; one that was asked for
    is an error."""

    def find(index: int) -> Any:
        raise UnsupportedError(f"--device cuda:{index}", "Triton is not installed")

    def there(given: Any, tensor: Any) -> tuple[int, Any]:
        return 2, torch.from_numpy(given).reshape(-1).view(torch.uint8)

    monkeypatch.setattr(finding, "find", find)
    monkeypatch.setattr(devices, "bytes_there", there)
    monkeypatch.setattr(device_scan, "RUN_BYTES", 20)
    result = dcr_cli.diff_tensors(OLD, OLD | {"a": -OLD["a"]})
    assert (result.device, result.account.why, result.changed_elements) == ("cpu", "Triton is not installed", 6)
    assert dcr_cli.diff_tensors(OLD, OLD, device="cpu").account.why == "as asked for"
    for wish in ("cuda", "cuda:2"):
        with pytest.raises(UnsupportedError, match="Triton is not installed"):
            dcr_cli.diff_tensors(OLD, OLD, device=wish)
