"""What has to hold of any device: a delta that is made by way of it is byte for byte that of the CPU.

Every run of blocks goes there, however short.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import dcr_cli
from dcr_cli.delta import device_scan
from dcr_cli.device import finding
from dcr_cli.publisher import given_base
from kernel_cases import BLOCK_BYTES, Spec, pair
from part_ranks import all_ranks, results
from ranks import canonical, write_canonical, write_layout, write_ranks
from receivers import tree
from strategies import TensorData, Tensors, raw_file, write_checkpoint

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


def tensors_of(checkpoint: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, on a device."""
    return {
        name: tensor.to(device)
        for shard in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }


class DeviceDeltas:
    """The tests; `lanes`, a device, is a fixture of the modules that have one, and `memory` its name in torch."""

    @pytest.fixture(autouse=True)
    def device(self, lanes: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
        """Have the device found as cuda:0, and count the batches that go there, by width."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(finding, "find", lambda index: lanes)
        monkeypatch.setattr(device_scan, "RUN_BYTES", 1)
        monkeypatch.setattr(device_scan, "LEAST_BYTES", 1)
        batches: Counter[int] = Counter()
        compare = comparing.Device.compare

        def counted(device: Any, batch: Any, base: Any, target: Any) -> Any:
            batches[batch.width] += 1
            return compare(device, batch, base, target)

        monkeypatch.setattr(comparing.Device, "compare", counted)
        return batches

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
        assert device == {2: 1, 4: 1}
        names = [stage.name for stage in result.account.stages]
        assert {"read", "copy there", "compare", "copy back", "draft", "code", "write"} <= set(names)
        compared = next(stage for stage in result.account.stages if stage.name == "compare")
        assert compared.bytes == result.dense_bytes and compared.seconds > 0

    def test_tasks_and_what_comes_back_in_parts(
        self, tmp_path: Path, device: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tensor larger than a slot goes there in batches; changes that do not fit come back block by block."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(comparing, "BATCH_BYTES", 2 * BLOCK_BYTES)
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

    @pytest.mark.parametrize("is_laid", [False, True])
    def test_parts(self, tmp_path: Path, device: Counter[int], is_laid: bool) -> None:
        """Of shards of ranks, too, of which what lies scattered in its tensor stays on the CPU."""
        layout = write_layout(tmp_path)
        dense = [write_canonical(tmp_path / f"dense {step}", canonical(step), step) for step in range(2)]
        target = write_ranks(tmp_path / "ranks", canonical(1), 1) if is_laid else dense[1]
        found = []
        for wish in ("cuda", "cpu"):
            remote = tmp_path / wish
            dcr_cli.push(dense[0], remote)
            options: dict[str, Any] = {"layout": layout} if is_laid else {}
            ranks = results(all_ranks(target, remote, 2, device=wish, **options))
            assert {each.device for each in ranks} == {"cpu" if wish == "cpu" else ranks[0].device}
            found.append(coded_blocks(remote, 2))
            dcr_cli.pull(remote, tmp_path / f"receiver {wish}")
            assert tree(tmp_path / f"receiver {wish}") == tree(dense[1])
            if wish == "cuda":
                assert device.total() and ranks[0].device != "cpu"
                device.clear()
        assert found[0] == found[1] and found[0] and not device

    # Tensors that are there already

    @pytest.mark.parametrize("encoding", ENCODINGS)
    def test_tensors_where_they_lie(self, tmp_path: Path, device: Counter[int], memory: str, encoding: str) -> None:
        """Wherever they lie, the delta is the same: that between checkpoints which have them in one shard."""
        pairs = {"w": sides("BF16", 5000, 0.02), "all": sides("F32", 700, 1.0), "same": sides("U8", 900, 0.0)}
        base, target = write_pair(tmp_path, pairs | {"none": sides("F64", 0, 0.0), "one": sides("I32", 1, 1.0)})
        old, new = (tensors_of(checkpoint, memory) for checkpoint in (base, target))
        there = dcr_cli.diff_tensors(old, new, tmp_path / "there", encoding=encoding)
        assert bool(device) == (encoding != "whole")
        old, new = (tensors_of(checkpoint, "cpu") for checkpoint in (base, target))
        mixed = dcr_cli.diff_tensors(old, tensors_of(target, memory), tmp_path / "mixed", encoding=encoding)
        here = dcr_cli.diff_tensors(old, new, tmp_path / "here", encoding=encoding, device="cpu")
        assert tree(tmp_path / "there") == tree(tmp_path / "mixed") == tree(tmp_path / "here")
        for name, tensors in (("old", tensors_of(base, "cpu")), ("new", tensors_of(target, "cpu"))):
            write_shard(tmp_path / name, tensors)
        dcr_cli.diff(tmp_path / "old", tmp_path / "new", tmp_path / "files", encoding=encoding, device="cpu")
        assert tree(tmp_path / "files") == tree(tmp_path / "here")
        assert here == replace(there, output=here.output, device="cpu", account=here.account)
        assert here.changed_elements == mixed.changed_elements and (here.tensors, here.device) == (5, "cpu")
        dcr_cli.apply(tmp_path / "there", base)
        assert dcr_cli.verify(base, against=target).matches

    def test_a_tensor_that_lies_in_pieces(self, tmp_path: Path, device: Counter[int], memory: str) -> None:
        old = torch.arange(600, dtype=torch.int32).reshape(20, 30).to(memory)
        new = old + (old % 7 == 0)
        strided = dcr_cli.diff_tensors({"a": old.T}, {"a": new.T}, tmp_path / "strided")
        plain = dcr_cli.diff_tensors({"a": old.T.contiguous()}, {"a": new.T.contiguous()}, tmp_path / "plain")
        assert tree(tmp_path / "strided") == tree(tmp_path / "plain")
        assert strided.changed_elements == plain.changed_elements == 86

    @pytest.mark.parametrize(("changed", "fetched"), [(125, 0), (126, 2000)])
    def test_what_leaves_the_device(
        self, tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, changed: int, fetched: int
    ) -> None:
        """Changes, and all of a block of which more than an eighth changed; a base's block then, too."""
        from dcr_cli.device import comparing

        sizes: Counter[str] = Counter()
        fetch, read = comparing.Device.fetch, given_base.GivenBase.read_into

        def counted(device: Any, data: torch.Tensor) -> Any:
            sizes["target"] += data.nbytes
            return fetch(device, data)

        def counted_read(base: Any, tensor: Any, begin: int, buffer: memoryview) -> None:
            sizes["base"] = max(sizes["base"], begin + len(buffer))
            read(base, tensor, begin, buffer)

        monkeypatch.setattr(comparing.Device, "fetch", counted)
        monkeypatch.setattr(given_base.GivenBase, "read_into", counted_read)
        old = torch.arange(1000, dtype=torch.int16)
        new = old + (old < changed).to(torch.int16)
        dcr_cli.diff_tensors({"a": old.to(memory)}, {"a": new.to(memory)}, tmp_path / "delta")
        assert sizes == ({"target": fetched, "base": fetched} if fetched else {})

    def test_bytes_at_an_odd_place(self, tmp_path: Path, device: Counter[int], memory: str) -> None:
        """Bits that are given as bytes lie wherever their bucket has them."""
        old, new = pair(SPECS["BF16"], 1000, 0.02)
        found = []
        for name, place in (("there", memory), ("here", "cpu")):
            base = write_checkpoint(tmp_path / f"base {name}", {"a": ("BF16", (1000,), old.tobytes())})
            remote = tmp_path / f"remote {name}"
            dcr_cli.push(base, remote, baseline=tmp_path / name)
            bucket = torch.zeros(2001, dtype=torch.uint8, device=place)
            bucket[1:].copy_(torch.from_numpy(new.view(np.uint8)))
            wish = "auto" if name == "there" else "cpu"
            with dcr_cli.Publisher(remote, tmp_path / name, device=wish) as publisher:
                publisher.begin()
                publisher.add("a", bucket[1:])
                publisher.commit()
            found.append(coded_blocks(remote, 2))
        assert device[2] == 1 and found[0] == found[1] and found[0]

    def test_tensors_that_are_longer_than_a_batch(
        self, tmp_path: Path, device: Counter[int], memory: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the block in the second one all is kept, as much of it changed."""
        from dcr_cli.device import comparing

        monkeypatch.setattr(comparing, "BATCH_BYTES", 2 * BLOCK_BYTES)
        n = BLOCK_BYTES // 8
        old, new = pair(SPECS["F64"], n + 9, 0.01)
        new[n:] = old[n:] ^ np.uint64(3 << 40)
        before, after = ({"a": torch.from_numpy(side.view(np.float64)).to(memory)} for side in (old, new))
        there = dcr_cli.diff_tensors(before, after, tmp_path / "there", encoding="gap")
        before, after = ({"a": side["a"].cpu()} for side in (before, after))
        here = dcr_cli.diff_tensors(before, after, tmp_path / "here", encoding="gap", device="cpu")
        assert device[8] == 2 and there.changed_elements == here.changed_elements
        assert tree(tmp_path / "there") == tree(tmp_path / "here")

    @pytest.mark.parametrize("encoding", ["auto", "gap"])
    @pytest.mark.parametrize("is_in_memory", [False, True])
    def test_a_publisher(
        self, tmp_path: Path, device: Counter[int], memory: str, encoding: str, is_in_memory: bool
    ) -> None:
        """Versions of tensors that lie there, against a folder and against the host's memory, are those of the CPU."""
        tensors = {"w": sides("BF16", 3000, 0.02), "all": sides("F32", 700, 1.0), "b": sides("U8", 90, 0.5)}
        base, target = write_pair(tmp_path, tensors | {"twin": tensors["w"]})
        found = []
        for name, where in (("cpu", "cpu"), ("auto", memory), ("cuda", "cpu")):
            remote, place, device_before = tmp_path / name, tmp_path / f"baseline {name}", device.total()
            dcr_cli.push(base, remote, baseline=place)
            arrays = {key: flat_bytes(tensor) for key, tensor in tensors_of(base, "cpu").items()}
            baseline: Any = arrays if is_in_memory else place
            home = tmp_path / f"home {name}" if is_in_memory else None
            with dcr_cli.Publisher(remote, baseline, home=home, encoding=encoding, device=name) as publisher:
                results = []
                for checkpoint in (target, base):
                    publisher.begin()
                    given = tensors_of(checkpoint, where)
                    for key, tensor in given.items():
                        publisher.add(key, tensor)
                        tensor.zero_()
                    results.append(publisher.commit())
            assert (device.total() > device_before) == (name != "cpu")
            assert [result.kind for result in results] == ["delta"] * 2 and results[0].device != "auto"
            assert (results[0].device == "cpu") == (name == "cpu")
            found.append([coded_blocks(remote, version) for version in (2, 3)])
            dcr_cli.pull(remote, tmp_path / f"receiver {name}")
            assert tree(tmp_path / f"receiver {name}") == tree(base)
            if is_in_memory:
                assert {k: a.tobytes() for k, a in arrays.items()} == {
                    key: flat_bytes(tensor).tobytes() for key, tensor in tensors_of(base, "cpu").items()
                }
        assert found[0] == found[1] == found[2] and found[0][0]


def write_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A checkpoint of one shard that has tensors in canonical order."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.uint8: "U8"}
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in sorted(tensors.items()):
        own = flat_bytes(tensor).tobytes()
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    folder.mkdir()
    text = json.dumps(header, separators=(",", ":"))
    (folder / "model.safetensors").write_bytes(raw_file(text + " " * (-len(text) % 8), data))


def flat_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor, in memory of their own."""
    return np.array(tensor.reshape(-1).view(torch.uint8).numpy())


def coded_blocks(remote: Path, version: int) -> list[bytes]:
    """What the payloads of a version hold but for their headers, which name the history."""
    payloads = [path.read_bytes() for path in sorted(remote.glob(f"versions/{version:010}-*/payloads/*"))]
    return [data[8 + int.from_bytes(data[:8], "little") :] for data in payloads]
