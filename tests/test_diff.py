"""What diff says and writes: counts, matches, the same bytes whatever the threads; what it refuses."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli import durable
from dcr_cli.delta.encoder import PieceEncoder
from dcr_cli.delta.scan import Part, Scanner
from dcr_cli.diff import DiffResult, diff
from dcr_cli.errors import ConflictError, DamagedError, LocalError, NotFoundError, UsageError
from layouts import write_dcp
from second_reader import apply_delta, read_delta
from strategies import TensorData, Tensors, tensor_of, with_changes, write_checkpoint


def bf16(seed: int, elements: int) -> TensorData:
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal(elements, np.float32) * 0.02).view(np.uint32) >> 16
    return "BF16", (elements,), weights.astype("<u2").tobytes()


def step(tensor: TensorData, seed: int, share: float) -> TensorData:
    """A tensor of which a share of elements moved by one unit in the last place."""
    dtype, shape, data = tensor
    bits = np.frombuffer(data, "<u2").copy()
    rng = np.random.default_rng(seed)
    bits[rng.random(len(bits)) < share] += 1
    return dtype, shape, bits.tobytes()


def compare(tmp_path: Path, base: Tensors, target: Tensors, encoding: str = "auto") -> DiffResult:
    write_checkpoint(tmp_path / "base", base)
    write_checkpoint(tmp_path / "target", target)
    return diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", encoding=encoding)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_counts_are_exact(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = diff(*tiny_pair, tmp_path / "delta")
    assert (result.tensors, result.elements, result.changed_elements) == (4, 4 * 64 * 64, 5)
    assert result.dense_bytes == 2 * result.elements
    assert result.delta_bytes == sum(len(data) for data in folder_bytes(tmp_path / "delta").values())
    assert not result.same and not result.files_changed


def test_a_checkpoint_equals_itself(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = diff(tiny_pair[0], tiny_pair[0], tmp_path / "delta")
    assert result.same and result.changed_elements == 0 and result.encodings == {}
    assert folder_bytes(tmp_path / "delta").keys() == {"commit.json", "manifest.zst", "digests.zst"}


def test_values_that_compare_equal_but_differ_in_bits_are_changes(tmp_path: Path) -> None:
    base = {"w": ("F32", (5,), struct.pack("<5I", 0, 0x7FC00001, 0x7F800000, 0x3F800000, 5))}
    target = {"w": ("F32", (5,), struct.pack("<5I", 0x80000000, 0x7FC00002, 0x7F800001, 0x3F800000, 5))}
    assert compare(tmp_path, base, target).changed_elements == 3


def test_added_removed_replaced_and_renamed_are_told_apart(tmp_path: Path) -> None:
    big, other = bf16(1, 50_000), bf16(2, 50_000)
    base = {
        "gone": tensor_of("F32", (3,)),
        "old.name": big,
        "reshaped": tensor_of("I16", (4, 6)),
        "retyped": tensor_of("F16", (8,)),
        "grown": tensor_of("F32", (100, 8)),
        "same": other,
    }
    target = {
        "new": tensor_of("I64", (2, 2)),
        "new.name": step(big, 3, 0.01),
        "reshaped": ("I16", (6, 4), base["reshaped"][2]),
        "retyped": ("BF16", (8,), base["retyped"][2]),
        "grown": tensor_of("F32", (104, 8)),
        "same": other,
    }
    result = compare(tmp_path, base, target)
    assert result.added == ("new",)
    assert result.removed == ("gone",)
    assert result.replaced == ("grown", "reshaped", "retyped")
    assert result.renamed == (("old.name", "new.name"),)
    assert {row.name: row.kind for row in result.rows}["same"] == "same"
    changed = np.frombuffer(big[2], "<u2") != np.frombuffer(target["new.name"][2], "<u2")
    assert result.changed_elements == int(changed.sum())


def test_a_tied_tensor_that_comes_back_costs_next_to_nothing(tmp_path: Path) -> None:
    embedding = bf16(1, 400_000)
    new = step(embedding, 2, 0.05)
    once = compare(tmp_path / "once", {"embed": embedding}, {"embed": new})
    twice = compare(tmp_path / "twice", {"embed": embedding}, {"embed": new, "lm_head": new})
    both = compare(tmp_path / "both", {"embed": embedding, "lm_head": embedding}, {"embed": new, "lm_head": new})
    assert twice.delta_bytes < once.delta_bytes + 400
    assert both.delta_bytes < once.delta_bytes + 400


def test_moved_tensors_and_other_shards_cost_a_header(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": bf16(i, 20_000) for i in range(6)}
    write_checkpoint(tmp_path / "base", tensors, shards=3)
    write_checkpoint(tmp_path / "target", tensors, shards=2)
    result = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    assert result.changed_elements == 0
    assert len(result.moved) == 6
    assert result.delta_bytes < 4000


def test_only_a_sidecar_changed(tmp_path: Path) -> None:
    tensors = {"w": bf16(1, 1000)}
    write_checkpoint(tmp_path / "base", tensors, sidecars={"config.json": b"{}", "old.txt": b"x"})
    write_checkpoint(tmp_path / "target", tensors, sidecars={"config.json": b'{"a": 1}', "empty": b""})
    result = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    assert not result.same
    assert result.base.content == result.target.content
    assert result.files_changed == ("config.json", "empty", "old.txt")


@pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
def test_everything_changed_is_no_larger_than_a_copy(tmp_path: Path, encoding: str) -> None:
    rng = np.random.default_rng(0)
    base: Tensors = {"w": ("BF16", (600_000,), rng.bytes(1_200_000))}
    target: Tensors = {"w": ("BF16", (600_000,), rng.bytes(1_200_000))}
    result = compare(tmp_path, base, target, encoding=encoding)
    assert result.delta_bytes <= 1.01 * result.dense_bytes


@pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
def test_threads_do_not_change_a_byte(tmp_path: Path, encoding: str) -> None:
    base = {f"t{i:02}": bf16(i, 40_000 if i % 5 else 700_000) for i in range(20)} | {
        f"x{i}": tensor_of("F32", (3000,), i) for i in range(3)
    }
    target = {
        name: step(tensor, i, 0.02) if tensor[0] == "BF16" else with_changes(tensor, [5, 77])
        for i, (name, tensor) in enumerate(base.items())
    }
    write_checkpoint(tmp_path / "base", base, shards=3)
    write_checkpoint(tmp_path / "target", target, shards=3)
    written = []
    for jobs in (1, 2, 7):
        diff(tmp_path / "base", tmp_path / "target", tmp_path / f"delta{jobs}", encoding=encoding, jobs=jobs)
        written.append(folder_bytes(tmp_path / f"delta{jobs}"))
    assert written[0] == written[1] == written[2]


@dataclasses.dataclass
class HeldBack:
    """The most that ever waited for an encoding, and for starting states, after a block was added."""

    held: int = 0
    held_bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> HeldBack:
    most, add = HeldBack(), PieceEncoder.add

    def watch(encoder: PieceEncoder, *block: Any) -> None:
        add(encoder, *block)
        most.held = max(most.held, len(encoder._held))
        most.held_bytes = max(most.held_bytes, encoder._held_bytes if encoder._held else 0)
        most.waiting = max(most.waiting, len(encoder._waiting))
        most.waiting_bytes = max(most.waiting_bytes, encoder._waiting_bytes)

    monkeypatch.setattr(PieceEncoder, "add", watch)
    return most


@pytest.mark.parametrize("jobs", [1, 3])
def test_few_blocks_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_back: HeldBack, jobs: int
) -> None:
    """Neither a piece without an encoding nor a width without states may hold back all that comes after."""
    monkeypatch.setattr("dcr_cli.delta.encoder.HELD_BLOCKS", 3)
    base = {f"t{i}": bf16(i, 300_000) for i in range(6)} | {"u": tensor_of("U16", (2_000_000,))}
    target = {name: step(tensor, i, 0.01) for i, (name, tensor) in enumerate(base.items())}
    write_checkpoint(tmp_path / "base", base)
    write_checkpoint(tmp_path / "target", target)
    result = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", jobs=jobs)
    assert result.changed_tensors == 7
    assert held_back.held == 2
    assert 2 <= held_back.waiting <= 3
    tensors, _ = apply_delta(read_delta(tmp_path / "delta"), tmp_path / "base")
    assert {name: tensor[2] for name, tensor in tensors.items()} == {name: tensor[2] for name, tensor in target.items()}


def test_a_rare_width_does_not_hold_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_back: HeldBack
) -> None:
    """One small F32 tensor, early in order, never has 64 changed blocks; all BF16 ones come after it."""
    monkeypatch.setattr("dcr_cli.delta.encoder.HELD_BYTES", 15_000)
    rare = tensor_of("F32", (1000,))
    base = {"a": rare} | {f"t{i}": bf16(i, 300_000) for i in range(8)}
    target = {"a": with_changes(rare, [7])} | {f"t{i}": step(bf16(i, 300_000), i, 0.02) for i in range(8)}
    compare(tmp_path, base, target, encoding="context")
    assert 0 < held_back.held_bytes < 15_000
    # A decision for each width takes a block.
    assert 0 < held_back.waiting_bytes < 30_000
    tensors, _ = apply_delta(read_delta(tmp_path / "delta"), tmp_path / "base")
    assert {name: tensor[2] for name, tensor in tensors.items()} == {name: tensor[2] for name, tensor in target.items()}


def test_a_commit_is_there_whole_or_not_at_all(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Stopped at any step, the folder is a delta, or one without a commit, whose name the next diff takes."""

    class Stop(BaseException):
        pass

    for last in range(100):
        steps = 0

        def count(kind: str, path: str, other: str, last: int = last) -> None:
            nonlocal steps
            steps += 1
            if steps > last:
                raise Stop

        durable.hooks.append(count)
        try:
            diff(*tiny_pair, tmp_path / "delta")
        except Stop:
            commit = tmp_path / "delta" / "commit.json"
            assert not commit.exists() or json.loads(commit.read_bytes())["format"] == "dcr-1"
        finally:
            durable.hooks.remove(count)
        if steps <= last:
            break
        if not (tmp_path / "delta" / "commit.json").exists():
            diff(*tiny_pair, tmp_path / "delta")
        shutil.rmtree(tmp_path / "delta")
    assert steps > 8


def test_the_folder_that_one_is_in_can_be_the_output(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert diff(*tiny_pair, ".").output == "."
    assert (tmp_path / "here" / "commit.json").exists()


def test_planted_infinities_cost_nothing(tmp_path: Path) -> None:
    """One Inf per tensor, unchanged, must not move the classes of all other elements."""

    def planted(tensor: TensorData) -> TensorData:
        bits = np.frombuffer(tensor[2], "<u2").copy()
        bits[len(bits) // 2] = 0x7F80
        return tensor[0], tensor[1], bits.tobytes()

    base, target = {"w": bf16(1, 500_000)}, {"w": step(bf16(1, 500_000), 2, 0.01)}
    clean = compare(tmp_path / "clean", base, target)
    dirty = compare(tmp_path / "dirty", {"w": planted(base["w"])}, {"w": planted(target["w"])})
    assert abs(dirty.delta_bytes - clean.delta_bytes) < 40


def test_bytes_on_both_sides_of_four_gigabytes_are_found(tmp_path: Path) -> None:
    size = (1 << 32) + 16
    for name, changed in (("base", ()), ("target", (5, size - 11))):
        folder = tmp_path / name
        folder.mkdir()
        header = f'{{"w":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'.encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)
            for position in changed:
                file.seek(8 + len(header) + position)
                file.write(b"\x01")
    result = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    assert (result.changed_elements, result.elements) == (2, size)
    assert result.delta_bytes < 20_000


def test_the_output_must_be_free(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError, match="not empty"):
        diff(*tiny_pair, taken)
    assert (taken / "notes.txt").read_text() == "mine"
    diff(*tiny_pair, tmp_path / "delta")
    with pytest.raises(ConflictError):
        diff(*tiny_pair, tmp_path / "delta")
    os.remove(tmp_path / "delta" / "commit.json")
    diff(*tiny_pair, tmp_path / "delta")


def test_nothing_but_a_delta_is_ever_removed(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "delta" / "payloads").mkdir(parents=True)
    (tmp_path / "delta" / "payloads" / "thesis.txt").write_text("precious")
    with pytest.raises(ConflictError, match="not empty"):
        diff(*tiny_pair, tmp_path / "delta")
    assert (tmp_path / "delta" / "payloads" / "thesis.txt").read_text() == "precious"
    (tmp_path / "other" / "manifest.zst" / "notes").mkdir(parents=True)
    with pytest.raises(ConflictError, match="not empty"):
        diff(*tiny_pair, tmp_path / "other")
    assert (tmp_path / "other" / "manifest.zst" / "notes").exists()
    around = tmp_path / "around"
    around.mkdir()
    tiny_pair[0].rename(around / "payloads")
    before = folder_bytes(around)
    with pytest.raises(UsageError, match="around the checkpoint"):
        diff(around / "payloads", tiny_pair[1], around)
    assert folder_bytes(around) == before


@pytest.mark.parametrize("step", ["payloads/000000.safetensors", "manifest.zst", "digests.zst", "commit.json.new"])
def test_two_at_once_cannot_write_one_delta(tiny_pair: tuple[Path, Path], tmp_path: Path, step: str) -> None:
    base, target = tiny_pair
    refused = []

    def run_another(kind: str, path: str, other: str) -> None:
        if kind == "create" and path.endswith(step):
            with pytest.raises(ConflictError, match="another dcr holds it") as caught:
                diff(target, base, tmp_path / "delta")
            refused.append(caught.value.hint)

    durable.hooks.append(run_another)
    try:
        diff(base, target, tmp_path / "delta")
    finally:
        durable.hooks.remove(run_another)
    assert refused == ["try again later"]
    diff(base, target, tmp_path / "alone")
    assert folder_bytes(tmp_path / "delta") == folder_bytes(tmp_path / "alone")


def test_a_delta_that_is_finished_first_outlives_the_other(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Another run ends between the look at the folder and its lock."""
    base = tiny_pair[0]
    made: list[dict[str, bytes]] = []

    def be_faster(kind: str, path: str, other: str) -> None:
        if path.endswith(".dcr-lock") and not made:
            made.append({})
            diff(base, base, tmp_path / "delta")
            made[0] = {**folder_bytes(tmp_path / "delta")}

    (tmp_path / "delta").mkdir()
    durable.hooks.append(be_faster)
    try:
        with pytest.raises(ConflictError, match="not empty"):
            diff(*tiny_pair, tmp_path / "delta")
    finally:
        durable.hooks.remove(be_faster)
    assert folder_bytes(tmp_path / "delta") == made[0]
    assert (tmp_path / "delta" / "payloads").is_dir()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_mount_without_locks(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if is_there:
        (tmp_path / "delta").mkdir()
    with pytest.raises(LocalError, match="gives no locks"):
        diff(*tiny_pair, tmp_path / "delta")
    assert (tmp_path / "delta").exists() == is_there
    assert not folder_bytes(tmp_path / "delta")


@pytest.mark.parametrize("number", [0, 1])
def test_a_folder_that_comes_and_goes(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Another process removes the folder before one of the times that it is opened, and makes it again just after."""
    place, opened, real = tmp_path / "delta", [], os.open

    def come_and_go(path: Any, *arguments: Any, **options: Any) -> int:
        if path != place.name:
            return real(path, *arguments, **options)
        opened.append(path)
        if len(opened) != number + 1:
            return real(path, *arguments, **options)
        shutil.rmtree(place, ignore_errors=True)
        try:
            return real(path, *arguments, **options)
        finally:
            place.mkdir()

    monkeypatch.setattr(os, "open", come_and_go)
    diff(*tiny_pair, place)
    assert (place / "commit.json").exists() and len(opened) > number


def test_a_folder_that_goes_while_it_is_looked_at(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was writing there failed, and tidies up."""
    place, access = tmp_path / "delta", os.access

    def go(path: Path, mode: int, effective_ids: bool) -> bool:
        if path == place:
            place.rmdir()
        return access(path, mode, effective_ids=effective_ids)

    place.mkdir()
    monkeypatch.setattr(os, "access", go)
    diff(*tiny_pair, place)
    assert (place / "commit.json").exists()


def test_payloads_that_go_while_they_are_looked_at(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = tmp_path / "delta", os.open

    def go(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "payloads" and not (place / ".dcr-lock").exists():
            (place / "payloads").rmdir()
        return real(path, *arguments, **options)

    (place / "payloads").mkdir(parents=True)
    monkeypatch.setattr(os, "open", go)
    diff(*tiny_pair, place)
    assert (place / "commit.json").exists()


def test_what_a_run_did_not_write_outlives_its_failure(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    def fail(kind: str, path: str, other: str) -> None:
        if kind == "create" and path.endswith("manifest.zst"):
            (tmp_path / "delta" / "payloads" / "thesis.txt").write_text("precious")
            raise KeyboardInterrupt

    durable.hooks.append(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            diff(*tiny_pair, tmp_path / "delta")
    finally:
        durable.hooks.remove(fail)
    assert folder_bytes(tmp_path / "delta") == {"payloads/thesis.txt": b"precious"}


def test_the_output_is_a_folder_in_a_folder(
    tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for output in ("file", "file/delta"):
        with pytest.raises(UsageError, match="file is a file; a delta is a folder") as taken:
            diff(*tiny_pair, tmp_path / output)
        assert taken.value.hint == "choose another name for the delta"
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(LocalError, match=r"there is no folder .*a/b c") as missing:
        diff(*tiny_pair, tmp_path / "a" / "b c" / "delta")
    assert missing.value.hint == f"mkdir -p '{tmp_path}/a/b c'"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode, effective_ids: path != tmp_path)
        with pytest.raises(LocalError, match=f"this process may not write into {tmp_path}$"):
            diff(*tiny_pair, tmp_path / "delta")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    diff(*tiny_pair, tmp_path / "link")
    assert (tmp_path / "elsewhere" / "commit.json").exists()


@pytest.mark.parametrize("side", [0, 1])
def test_a_delta_inside_a_checkpoint_is_refused(tiny_pair: tuple[Path, Path], side: int) -> None:
    before = sorted(tiny_pair[side].rglob("*"))
    with pytest.raises(UsageError, match="inside the checkpoint"):
        diff(*tiny_pair, tiny_pair[side] / "delta")
    assert sorted(tiny_pair[side].rglob("*")) == before


def test_a_dry_run_says_the_same_and_writes_nothing(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    steps: list[str] = []
    durable.hooks.append(lambda kind, path, other: steps.append(kind))
    try:
        tried = diff(*tiny_pair, tmp_path / "delta", dry_run=True)
    finally:
        durable.hooks.pop()
    assert not steps and not (tmp_path / "delta").exists()
    made = diff(*tiny_pair, tmp_path / "delta")
    assert (tried.dry_run, made.dry_run) == (True, False)
    assert dataclasses.replace(tried, dry_run=False) == made
    assert sum(made.encoding_bytes.values()) == sum(row.delta_bytes for row in made.rows) > 0
    assert made.encoding_bytes.keys() == made.encodings.keys()
    with pytest.raises(ConflictError, match="not empty"):
        diff(*tiny_pair, tmp_path / "delta", dry_run=True)
    with pytest.raises(LocalError, match="there is no folder"):
        diff(*tiny_pair, tmp_path / "a" / "delta", dry_run=True)


def test_a_failed_diff_leaves_nothing(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    shard = next(tiny_pair[1].glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedError):
        diff(*tiny_pair, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_source_that_changes_while_it_is_read_is_a_conflict(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    shard = next(tiny_pair[1].glob("*.safetensors"))

    def touch(stage: str, done: int, total: int) -> None:
        os.utime(shard, ns=(1, done))

    with pytest.raises(ConflictError, match="changed while"):
        diff(*tiny_pair, tmp_path / "delta", progress=touch)
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize("is_shards", [False, True])
def test_what_cannot_be_coded_as_it_is_another_meanwhile_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shards: bool
) -> None:
    """A block of many changes is read a second time, and has none then."""
    old = {"w": tensor_of("BF16", (64, 64))}
    base = write_checkpoint(tmp_path / "base", old)
    new = {"w": with_changes(old["w"], range(4096))}
    target = write_checkpoint(tmp_path / "target", new) if not is_shards else tmp_path / "target"
    if is_shards:
        write_dcp(target, new, [[("w", (0, 0), (64, 64))]])
    (shard,) = target.glob("*.safetensors")
    first_load = Scanner.load

    def load(self: Scanner, part: Part) -> Any:
        shard.write_bytes(shard.read_bytes()[: -len(old["w"][2])] + old["w"][2])
        return first_load(self, part)

    monkeypatch.setattr(Scanner, "load", load)
    with pytest.raises(ConflictError, match=r"safetensors: changed while reading"):
        diff(base, target, tmp_path / "delta", encoding="gap")
    assert not (tmp_path / "delta").exists()


def test_what_is_not_there_or_unknown(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        diff(tmp_path / "nothing", tiny_pair[1])
    for patterns in (["x" * 16_385], ["xy"] * 8193):
        with pytest.raises(UsageError, match="at most 16384 are allowed"):
            diff(*tiny_pair, skip=patterns)
    with pytest.raises(UsageError, match="auto, context, gap, whole"):
        diff(*tiny_pair, encoding="zip")


@pytest.mark.parametrize("element_bytes", [32 << 10, 200_000, 1 << 20])
def test_where_everything_changed_a_delta_is_hardly_more_than_a_full_copy(tmp_path: Path, element_bytes: int) -> None:
    """2 kB that are in every delta, and 1 % at most."""
    dice = np.random.default_rng(element_bytes)
    for name in ("base", "target"):
        write_checkpoint(tmp_path / name, {"w": ("U8", (element_bytes,), dice.bytes(element_bytes))})
    full_bytes = sum(path.stat().st_size for path in (tmp_path / "target").iterdir())
    delta_bytes = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", jobs=1).delta_bytes
    assert delta_bytes is not None and delta_bytes <= full_bytes * 1.01 + 2000
    assert element_bytes < 200_000 or delta_bytes <= full_bytes * 1.01
