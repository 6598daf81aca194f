"""What verify says: it finds every changed bit, tensors wherever they lie, and sidecars; and it never errs to yes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dcr_cli.apply import apply
from dcr_cli.checkpoint.folder import Files
from dcr_cli.diff import diff
from dcr_cli.errors import ConflictError, DamagedError, IncompleteError, NotFoundError, UsageError
from dcr_cli.verify import SidecarDifference, TensorDifference, VerifyResult, verify
from strategies import (
    TensorData,
    Tensors,
    every_dtype,
    tensor_of,
    tensor_set_pairs,
    tiny_tensors,
    with_changes,
    write_checkpoint,
    write_tiny_steps,
)


def compare(tmp_path: Path, found: dict[str, TensorData], expected: dict[str, TensorData]) -> VerifyResult:
    write_checkpoint(tmp_path / "found", found)
    write_checkpoint(tmp_path / "expected", expected)
    return verify(tmp_path / "found", against=tmp_path / "expected")


def test_equal_checkpoints_match(tiny_pair: tuple[Path, Path]) -> None:
    result = verify(tiny_pair[0], against=tiny_pair[0])
    assert result.matches
    assert (result.checked_tensors, result.checked_bytes, result.checked_sidecars) == (4, 4 * 64 * 64 * 2, 2)


def test_the_place_count_and_bits_of_a_difference_are_told(tiny_pair: tuple[Path, Path]) -> None:
    result = verify(tiny_pair[1], against=tiny_pair[0])
    base = tiny_tensors()[0]["layers.2.weight"][2]
    bits = int.from_bytes(base[128:130], "little")
    assert not result.matches
    assert [(d.tensor, d.count, d.first_flat) for d in result.differences] == [
        ("layers.0.weight", 3, 0),
        ("layers.2.weight", 1, 64),
        ("layers.3.weight", 1, 1000),
    ]
    expected = TensorDifference("layers.2.weight", "bits", 1, 64, (1, 0), f"0x{bits:04x}", f"0x{bits ^ 1:04x}")
    assert result.differences[1] == expected


def test_the_division_into_shards_does_not_matter(tmp_path: Path) -> None:
    tensors = every_dtype()
    write_checkpoint(tmp_path / "one", tensors, sidecars={"config.json": b"{}"})
    write_checkpoint(tmp_path / "other", dict(reversed(tensors.items())), shards=3, sidecars={"config.json": b"{}"})
    assert verify(tmp_path / "one", against=tmp_path / "other").matches


@pytest.mark.parametrize("dtype", sorted(every_dtype()))
@pytest.mark.parametrize("position", [0, 5, -1])
def test_one_bit_of_any_dtype_is_seen(tmp_path: Path, dtype: str, position: int) -> None:
    tensors = every_dtype()
    elements = len(tensors[dtype][2])
    data = bytearray(tensors[dtype][2])
    data[position % elements] ^= 0x80
    changed = tensors | {dtype: (*tensors[dtype][:2], bytes(data))}
    result = compare(tmp_path, changed, tensors)
    assert [(d.tensor, d.kind, d.count) for d in result.differences] == [(dtype, "bits", 1)]


def test_a_change_at_every_edge_of_a_block_is_seen(tmp_path: Path) -> None:
    elements = 3 * 262144 + 5
    base = tensor_of("BF16", (elements,))
    for number, position in enumerate([0, 262143, 262144, 524288, 3 * 262144, elements - 1]):
        result = compare(tmp_path / str(number), {"w": with_changes(base, [position])}, {"w": base})
        assert [(d.count, d.first_flat, d.first_index) for d in result.differences] == [(1, position, (position,))]


def test_the_first_of_many_changes_is_told_whatever_the_jobs(tmp_path: Path) -> None:
    base = tensor_of("F32", (1000, 700))
    write_checkpoint(tmp_path / "base", {"w": base})
    write_checkpoint(tmp_path / "target", {"w": with_changes(base, range(701, 700000, 1000))})
    results = [verify(tmp_path / "target", against=tmp_path / "base", jobs=jobs) for jobs in (1, 2, 7)]
    assert results[0].differences[0].count == 700
    assert results[0].differences[0].first_index == (1, 1)
    assert results[0] == results[1] == results[2]


def test_tensors_at_odd_bytes_are_compared(tmp_path: Path) -> None:
    base = {"a": tensor_of("U8", (3,)), "b": tensor_of("F64", (5,)), "c": tensor_of("U8", (0,))}
    result = compare(tmp_path, base | {"b": with_changes(base["b"], [4])}, base)
    assert [(d.tensor, d.count, d.first_flat) for d in result.differences] == [("b", 1, 4)]


def test_missing_extra_and_reshaped_tensors_are_a_no(tmp_path: Path) -> None:
    base = {
        "a": tensor_of("F32", (2, 3)),
        "b": tensor_of("F32", (6,)),
        "c": tensor_of("I8", (4,)),
        "gone": tensor_of("U8", (1,)),
    }
    found = {
        "a": ("F32", (3, 2), base["a"][2]),
        "b": ("I32", (6,), base["b"][2]),
        "c": base["c"],
        "new": tensor_of("U8", (1,)),
    }
    result = compare(tmp_path, found, base)
    assert not result.matches
    assert (result.missing, result.extra, result.checked_tensors) == (("gone",), ("new",), 1)
    assert [(d.tensor, d.kind, d.expected, d.found) for d in result.differences] == [
        ("a", "shape", "[2, 3]", "[3, 2]"),
        ("b", "dtype", "F32", "I32"),
    ]


@pytest.mark.parametrize("lost", ["missing", "extra"])
def test_a_tensor_too_few_or_too_many_alone_is_a_no(tmp_path: Path, lost: str) -> None:
    tensors = [{"a": tensor_of("U8", (4,))}, {"a": tensor_of("U8", (4,)), "b": tensor_of("U8", (0,))}]
    result = compare(tmp_path, tensors[lost == "extra"], tensors[lost == "missing"])
    assert not result.matches and getattr(result, lost) == ("b",)


def test_sidecars_are_compared(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("U8", (4,))}
    write_checkpoint(tmp_path / "found", tensors, sidecars={"a.json": b"1", "same": b"", "sub/new": b""})
    write_checkpoint(tmp_path / "expected", tensors, sidecars={"a.json": b"2", "same": b"", "old": b""})
    result = verify(tmp_path / "found", against=tmp_path / "expected")
    assert not result.matches and not result.differences
    assert result.sidecars == (
        SidecarDifference("a.json", "bytes"),
        SidecarDifference("old", "missing"),
        SidecarDifference("sub/new", "extra"),
    )
    assert verify(tmp_path / "found", against=tmp_path / "expected", skip=["a.json", "old", "sub/*"]).matches


def test_nothing_compared_is_no_match(tmp_path: Path) -> None:
    result = compare(tmp_path, {}, {})
    assert not result.matches and result.checked_tensors == 0


def test_a_delta_tells_its_target(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    assert verify(tiny_pair[1], delta=tmp_path / "delta").matches
    result = verify(tiny_pair[0], delta=tmp_path / "delta")
    assert not result.matches
    assert [(d.tensor, d.kind) for d in result.differences] == [
        (f"layers.{number}.weight", "digest") for number in (0, 2, 3)
    ]


def test_a_delta_knows_sidecars_and_what_was_skipped(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("U8", (4,))}
    write_checkpoint(tmp_path / "base", tensors, sidecars={"a.json": b"1"})
    write_checkpoint(tmp_path / "target", tensors, sidecars={"a.json": b"2", "weights.bin": b"copy"})
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", skip=["*.bin"])
    assert verify(tmp_path / "target", delta=tmp_path / "delta").matches
    assert verify(tmp_path / "base", delta=tmp_path / "delta").sidecars == (SidecarDifference("a.json", "bytes"),)


@given(tensor_set_pairs(), st.integers(1, 3))
def test_a_match_means_equal_tensors(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[Tensors, Tensors], jobs: int
) -> None:
    folder = tmp_path_factory.mktemp("pair")
    base, target = pair
    write_checkpoint(folder / "base", base, shards=min(2, max(1, len(base))), index=len(base) > 1)
    write_checkpoint(folder / "target", target)
    diff(folder / "base", folder / "target", folder / "delta")
    is_same = {n: (d, tuple(s), b) for n, (d, s, b) in base.items()} == {
        n: (d, tuple(s), b) for n, (d, s, b) in target.items()
    }
    assert verify(folder / "base", against=folder / "target", jobs=jobs).matches == (is_same and bool(base))
    assert verify(folder / "base", delta=folder / "delta", jobs=jobs).matches == (is_same and bool(base))
    assert verify(folder / "target", delta=folder / "delta", jobs=jobs).matches == bool(target)


def test_alone_it_compares_with_the_record_of_the_last_apply(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    apply(tmp_path / "delta", tiny_pair[0])
    assert verify(tiny_pair[0]).matches
    shard = sorted(tiny_pair[0].glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    before = shard.stat()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = verify(tiny_pair[0])
    assert not result.matches
    assert [(d.tensor, d.kind) for d in result.differences] == [("layers.3.weight", "digest")]
    shard.write_bytes(whole)
    assert verify(tiny_pair[0]).matches
    (tiny_pair[0] / "config.json").write_bytes(b"{}")
    (tiny_pair[0] / "notes.txt").write_bytes(b"new")
    sidecars = SidecarDifference("config.json", "bytes"), SidecarDifference("notes.txt", "extra")
    assert verify(tiny_pair[0]).sidecars == sidecars


@pytest.mark.parametrize("name", ["state.json", "state.zst"])
def test_a_torn_record_is_no_record(name: str, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    apply(tmp_path / "delta", tiny_pair[0])
    record = tiny_pair[0] / ".dcr" / name
    record.write_bytes(record.read_bytes()[:-3])
    with pytest.raises(NotFoundError, match="no record"):
        verify(tiny_pair[0])


def test_without_anything_to_compare_with_it_says_so(tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(NotFoundError, match="no record") as caught:
        verify(tiny_pair[0])
    assert caught.value.hint is not None and "--against" in caught.value.hint


def test_two_references_are_refused(tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError):
        verify(tiny_pair[0], against=tiny_pair[1], delta=tiny_pair[1])


def test_a_checkpoint_that_is_not_there_is_not_found(tmp_path: Path, tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        verify(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="nowhere"):
        verify(tiny_pair[0], against=tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="nowhere"):
        verify(tiny_pair[0], delta=tmp_path / "nowhere")


def test_a_stopped_apply_is_incomplete(tiny_pair: tuple[Path, Path]) -> None:
    (tiny_pair[0] / ".dcr").mkdir()
    (tiny_pair[0] / ".dcr/in-progress").write_bytes(b"")
    for against in (tiny_pair[1], None):
        with pytest.raises(IncompleteError):
            verify(tiny_pair[0], against=against)


def test_a_file_that_changes_is_a_conflict(tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shard = sorted(tiny_pair[0].glob("*.safetensors"))[0]
    read = Files.read_path_into

    def read_and_touch(self: Files, path: str, offset: int, buffer: bytearray) -> None:
        read(self, path, offset, buffer)
        os.utime(shard, ns=(1, 1))

    monkeypatch.setattr(Files, "read_path_into", read_and_touch)
    with pytest.raises(ConflictError, match="changed while reading"):
        verify(tiny_pair[0], against=tiny_pair[1])


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_comes_while_reading_is_a_conflict(
    which: int, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Files.read_path_into

    def read_and_add(self: Files, path: str, offset: int, buffer: bytearray) -> None:
        read(self, path, offset, buffer)
        (tiny_pair[which] / "late.txt").write_bytes(b"")

    monkeypatch.setattr(Files, "read_path_into", read_and_add)
    with pytest.raises(ConflictError, match=r"late\.txt"):
        verify(tiny_pair[0], against=tiny_pair[1])


def test_tensors_that_lie_together_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number:04}": tensor_of("BF16", (4,), number) for number in range(2000)}
    write_checkpoint(tmp_path / "a", tensors)
    write_checkpoint(tmp_path / "b", tensors)
    reads: list[str] = []
    read = Files.read_path_into

    def read_and_count(self: Files, path: str, offset: int, buffer: bytearray) -> None:
        reads.append(path)
        read(self, path, offset, buffer)

    monkeypatch.setattr(Files, "read_path_into", read_and_count)
    assert verify(tmp_path / "a", against=tmp_path / "b").matches
    assert len([path for path in reads if path.endswith(".safetensors")]) <= 20


def test_an_incomplete_delta_is_damaged(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    (tmp_path / "delta/commit.json").unlink()
    with pytest.raises(DamagedError, match="incomplete"):
        verify(tiny_pair[1], delta=tmp_path / "delta")


def test_a_delta_whose_digests_are_not_its_targets_is_damaged(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    commit = json.loads((tmp_path / "delta/commit.json").read_text())
    commit["target"]["content"] = commit["base"]["content"]
    text = json.dumps(commit, sort_keys=True, separators=(",", ":")) + "\n"
    (tmp_path / "delta/commit.json").write_text(text)
    with pytest.raises(DamagedError, match="content digest"):
        verify(tiny_pair[1], delta=tmp_path / "delta")


def test_progress_ends_at_the_whole(tiny_pair: tuple[Path, Path]) -> None:
    calls: list[tuple[str, int, int]] = []
    verify(tiny_pair[0], against=tiny_pair[1], progress=lambda *call: calls.append(call))
    assert calls[-1] == ("verify", 4 * 64 * 64 * 2, 4 * 64 * 64 * 2)


def test_it_writes_nothing(tiny_pair: tuple[Path, Path]) -> None:
    before = sorted(path for root in tiny_pair for path in root.rglob("*"))
    verify(tiny_pair[0], against=tiny_pair[1])
    assert sorted(path for root in tiny_pair for path in root.rglob("*")) == before


def test_without_a_record_the_hint_names_all_ways(tmp_path: Path) -> None:
    root = write_tiny_steps(tmp_path, 1)[0]
    with pytest.raises(NotFoundError, match="only an apply or a pull leaves one") as caught:
        verify(root)
    assert caught.value.hint == f"dcr verify {root} --remote REMOTE, --delta DELTA or --against CHECKPOINT"
