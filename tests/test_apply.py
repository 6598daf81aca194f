"""What apply leaves: exactly the target's bits, or exactly what was there before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcr_cli.apply import ApplyResult, apply
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Box, TensorRow
from dcr_cli.diff import diff
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    LocalError,
    NotFoundError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.receiver import places
from dcr_cli.verify import verify
from faults import watching
from receivers import (
    fresh_copy,
    make_delta,
    names_below,
    put_into_boxes,
    rewrite_delta,
    rich_tensors,
    tree,
    write_rich_pair,
    write_turned_pair,
)
from strategies import (
    INDEX,
    TensorData,
    every_dtype,
    shard_bytes,
    tensor_of,
    tensor_set_pairs,
    tiny_tensors,
    with_changes,
    write_checkpoint,
    write_tiny_pair,
    write_weight_map,
)

WAYS = ("replace", "in-place", "aside", "to")


@pytest.fixture
def rich_pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Base, target and their delta, with all kinds of changes."""
    base, target = write_rich_pair(tmp_path)
    return base, target, make_delta(base, target, tmp_path / "delta")


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Base, target and delta of the tiny pair."""
    base, target = write_tiny_pair(tmp_path)
    return base, target, make_delta(base, target, tmp_path / "delta")


def apply_by(way: str, delta: Path, base: Path, work: Path, jobs: int = 1) -> tuple[Path, ApplyResult]:
    """Apply to a copy of `base` below `work`: the folder with the result, and what was said."""
    shutil.rmtree(work, ignore_errors=True)
    receiver = fresh_copy(base, work / "receiver")
    if way == "to":
        before = names_below(receiver)
        result = apply(delta, receiver, to=work / "out", jobs=jobs)
        assert names_below(receiver) == before
        return work / "out", result
    if way == "aside":
        (work / "link").symlink_to("receiver")
        return work / "link", apply(delta, work / "link", mode="aside", jobs=jobs)
    return receiver, apply(delta, receiver, mode=way, jobs=jobs)


def check_untouched(root: Path, before: dict[str, bytes], names: list[str]) -> None:
    assert tree(root) == before
    assert names_below(root) == names


class TestExact:
    """A receiver with the base's files ends with the target's files, byte for byte."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
    def test_all_kinds_of_changes(self, tmp_path: Path, way: str, encoding: str) -> None:
        base, target = write_rich_pair(tmp_path)
        delta = make_delta(base, target, tmp_path / "delta", encoding)
        found, result = apply_by(way, delta, base, tmp_path / "work")
        assert tree(found) == tree(target)
        assert (result.exact, result.already, result.recovered) == (True, False, False)
        assert result.changed_tensors == 9
        assert not (found / "old").exists()

    @pytest.mark.parametrize("way", ["replace", "in-place"])
    @pytest.mark.parametrize("kind", ["file", "link", "dangling", "folder", "link to a folder", "fifo"])
    def test_a_config_of_somebody_else(self, tmp_path: Path, way: str, kind: str) -> None:
        """Neither side has one; whatever the receiver has, it still has in the end."""
        old, new = tiny_tensors()
        sides = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
        delta = make_delta(*sides, tmp_path / "delta")
        config = fresh_copy(sides[0], tmp_path / "receiver") / "config.json"
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "c.json").write_bytes(b"mine")
        links = {"link": "../other/c.json", "dangling": "nowhere", "link to a folder": "../other"}
        if kind == "file":
            config.write_bytes(b"mine")
        elif kind == "folder":
            config.mkdir()
        elif kind == "fifo":
            os.mkfifo(config)
        else:
            config.symlink_to(links[kind])
        before = config.lstat()
        apply(delta, config.parent, mode=way)
        after = config.lstat()
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
        config.unlink() if kind != "folder" else config.rmdir()
        assert tree(config.parent) == tree(sides[1])

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("skip", [("config.json",), ("*.json",), ("link",), ()], ids=str)
    @pytest.mark.parametrize("other_name", [os.link, os.symlink])
    def test_other_names_of_the_config(
        self, tmp_path: Path, way: str, skip: tuple[str, ...], other_name: Callable[[str, str], None]
    ) -> None:
        """It is put away meanwhile, and back."""
        sides = write_tiny_pair(tmp_path)
        for root in sides:
            (root / "config.json").write_bytes(b"{}")
            other_name("config.json" if other_name is os.symlink else str(root / "config.json"), str(root / "link"))
        diff(*sides, tmp_path / "delta", skip=skip)
        found, _ = apply_by(way, tmp_path / "delta", sides[0], tmp_path / "work")
        assert verify(found, against=sides[1], skip=skip).matches
        assert tree(found) == tree(sides[1]) or way in ("aside", "to")
        assert apply(tmp_path / "delta", found).already

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("shards", [(1, 3), (3, 1), (2, 3), (3, 3)])
    def test_other_shards(self, tmp_path: Path, way: str, shards: tuple[int, int]) -> None:
        base, target = write_rich_pair(tmp_path, base_shards=shards[0], target_shards=shards[1])
        found, _ = apply_by(way, make_delta(base, target, tmp_path / "delta"), base, tmp_path / "work", jobs=3)
        assert tree(found) == tree(target)

    @pytest.mark.parametrize("way", WAYS)
    def test_every_dtype(self, tmp_path: Path, way: str) -> None:
        tensors = every_dtype()
        changed = {name: with_changes(tensor, [0], 129) for name, tensor in tensors.items()}
        base = write_checkpoint(tmp_path / "base", tensors, shards=2)
        target = write_checkpoint(tmp_path / "target", changed, shards=2)
        found, _ = apply_by(way, make_delta(base, target, tmp_path / "delta"), base, tmp_path / "work")
        assert tree(found) == tree(target)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("elements", [1, 63, 64, 65, 1000, 262143, 262144, 262145, 800_000])
    def test_sizes_around_a_block(self, tmp_path: Path, way: str, elements: int) -> None:
        old = {"a": tensor_of("U8", (3,)), "w": tensor_of("BF16", (elements,)), "z": tensor_of("F32", (2,))}
        new = old | {"w": with_changes(old["w"], range(0, elements, 97))}
        base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
        found, _ = apply_by(way, make_delta(base, target, tmp_path / "delta"), base, tmp_path / "work", jobs=3)
        assert tree(found) == tree(target)

    @settings(max_examples=40)
    @given(pair=tensor_set_pairs(), shards=st.tuples(st.integers(1, 3), st.integers(1, 3)), way=st.sampled_from(WAYS))
    def test_any_two_checkpoints(
        self,
        tmp_path: Path,
        pair: tuple[dict[str, TensorData], dict[str, TensorData]],
        shards: tuple[int, int],
        way: str,
    ) -> None:
        for name in ("base", "target", "delta", "work"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        folders = []
        for name, tensors, count in zip(("base", "target"), pair, shards, strict=True):
            folders.append(write_checkpoint(tmp_path / name, tensors, shards=min(count, max(len(tensors), 1))))
        delta = make_delta(folders[0], folders[1], tmp_path / "delta")
        if tree(folders[0]) == tree(folders[1]) and way == "to":
            return
        found, _ = apply_by(way, delta, folders[0], tmp_path / "work")
        assert tree(found) == tree(folders[1])

    @pytest.mark.parametrize("way", WAYS)
    def test_files_alone(self, tmp_path: Path, way: str) -> None:
        """Only sidecars change, or only one goes: the base, without what goes, has all the files of the target."""
        tensors = {"w": tensor_of("F32", (4,))}
        sides = [{"config.json": b"{}", "a.txt": b"a"}, {"config.json": b"{}"}, {"config.json": b"{ }", "b.txt": b"b"}]
        folders = [
            write_checkpoint(tmp_path / str(number), tensors, sidecars=side) for number, side in enumerate(sides)
        ]
        for old, new in ((0, 1), (1, 2), (2, 0), (1, 0)):
            delta = make_delta(folders[old], folders[new], tmp_path / f"delta-{old}-{new}")
            found, result = apply_by(way, delta, folders[old], tmp_path / "work")
            assert tree(found) == tree(folders[new])
            assert not result.already

    def test_what_was_there_says_what_was_done(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        found, result = apply_by("in-place", delta, base, tmp_path / "work")
        assert (result.changed_tensors, result.patched_shards, result.rewritten_shards) == (3, 2, 0)
        assert result.files_changed == tuple(sorted(path for path in tree(base) if path.endswith(".safetensors")))
        assert verify(found, against=target).matches

    def test_new_bits_that_memory_holds_already(self, tmp_path: Path) -> None:
        """Tensors that come from nowhere are journalled whole: they are not compared with what a buffer holds."""
        old = {f"{name}{number}": tensor_of("U8", (4096,), number) for name in "ab" for number in range(8)}
        new = {f"{name}{number}": tensor_of("U8", (4096,), 8 + number) for name in "ab" for number in range(8)}
        base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
        delta = make_delta(base, target, tmp_path / "delta", "whole")
        rewrite_delta(delta, rows=lambda row: replace(row, source=None) if row.name.startswith("b") else row)
        found, _ = apply_by("in-place", delta, base, tmp_path / "work")
        assert tree(found) == tree(target)


class TestAgain:
    """A receiver at the target is left alone."""

    @pytest.mark.parametrize("way", ["replace", "in-place", "aside"])
    @pytest.mark.parametrize("keep_record", [True, False])
    def test_a_second_apply_does_nothing(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, way: str, keep_record: bool
    ) -> None:
        base, target, delta = rich_pair
        found, _ = apply_by(way, delta, base, tmp_path / "work")
        if not keep_record:
            shutil.rmtree(found / ".dcr")
        before = [name for name in names_below(tmp_path / "work") if ".dcr" not in Path(name).parts]
        times = {path: path.stat().st_mtime_ns for path in found.rglob("*.safetensors")}
        result = apply(delta, found, mode=way)
        assert (result.already, result.bytes_written, result.files_changed) == (True, 0, ())
        assert [name for name in names_below(tmp_path / "work") if ".dcr" not in Path(name).parts] == before
        assert times == {path: path.stat().st_mtime_ns for path in found.rglob("*.safetensors")}
        assert tree(found) == tree(target)

    def test_with_a_file_that_is_left_out(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        assert not apply(delta, receiver, skip=["new/"]).already
        assert apply(delta, receiver, skip=["new/"]).already

    def test_an_empty_delta(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, _ = tiny
        delta = make_delta(base, base, tmp_path / "nothing")
        assert apply(delta, base).already
        assert verify(base).matches

    def test_back_and_forth(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, forth = rich_pair
        back = make_delta(target, base, tmp_path / "back")
        receiver = fresh_copy(base, tmp_path / "receiver")
        for mode in ("replace", "in-place", "replace"):
            apply(forth, receiver, mode=mode)
            assert tree(receiver) == tree(target)
            apply(back, receiver, mode=mode)
            assert tree(receiver) == tree(base)

    def test_in_the_wrong_order(self, tmp_path: Path) -> None:
        tensors = [{"w": tensor_of("BF16", (64,), seed)} for seed in range(3)]
        folders = [write_checkpoint(tmp_path / str(number), part) for number, part in enumerate(tensors)]
        second = make_delta(folders[1], folders[2], tmp_path / "second")
        before, names = tree(folders[0]), names_below(folders[0])
        with pytest.raises(WrongBaseError):
            apply(second, folders[0])
        check_untouched(folders[0], before, names)


class TestOwnShards:
    """A receiver with the base's tensors in other files keeps its own shards."""

    @pytest.fixture
    def receiver(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> Path:
        sidecars = {"config.json": b'{"of": "mine"}', "mine.txt": b"mine", "kept/merges.txt": b"m"}
        root = write_checkpoint(tmp_path / "own", rich_tensors()[0], shards=4, sidecars=sidecars, metadata={"by": "me"})
        index = json.loads((root / INDEX).read_text())
        index["unknown"] = ["kept"]
        (root / INDEX).write_text(json.dumps(index))
        return root

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_it_ends_with_the_targets_tensors(
        self, rich_pair: tuple[Path, Path, Path], receiver: Path, mode: str
    ) -> None:
        _, target, delta = rich_pair
        before = open_checkpoint(receiver)
        result = apply(delta, receiver, mode=mode)
        assert not result.exact
        after = open_checkpoint(receiver)
        assert [shard.path for shard in after.shards] == [shard.path for shard in before.shards]
        assert all(shard.header.metadata == {"by": "me"} for shard in after.shards)
        outcome = verify(receiver, against=target)
        assert not outcome.differences
        assert not outcome.extra
        assert not outcome.missing
        assert apply(delta, receiver, mode=mode).already

    def test_where_tensors_are(self, rich_pair: tuple[Path, Path, Path], receiver: Path) -> None:
        before = open_checkpoint(receiver).by_name
        apply(rich_pair[2], receiver)
        after = open_checkpoint(receiver)
        for name, tensor in after.by_name.items():
            if name in before:
                assert tensor.shard == before[name].shard
        # The one before it in canonical order is j.embed's neighbour, and it stands at the end.
        assert after.by_name["j.head"].shard == before["j.embed"].shard
        assert after.shards[after.by_name["j.head"].shard].header.tensors[-1].name in ("j.head", "k.added")

    def test_its_files(self, rich_pair: tuple[Path, Path, Path], receiver: Path) -> None:
        _, target, delta = rich_pair
        result = apply(delta, receiver)
        found, expected = tree(receiver), tree(target)
        # What the delta carries, it has; what is only its own stays.
        assert found["config.json"] == expected["config.json"]
        assert found["vocab.txt"] == expected["vocab.txt"]
        assert found["mine.txt"] == b"mine"
        assert result.foreign == ("mine.txt",)

    @pytest.mark.parametrize("found", [None, b"other"])
    def test_a_file_that_the_delta_does_not_carry_has_to_be_there(
        self, rich_pair: tuple[Path, Path, Path], receiver: Path, found: bytes | None
    ) -> None:
        (receiver / "kept/merges.txt").unlink()
        if found is not None:
            (receiver / "kept/merges.txt").write_bytes(found)
        before, names = tree(receiver), names_below(receiver)
        with pytest.raises(WrongBaseError, match=r"kept/merges\.txt"):
            apply(rich_pair[2], receiver)
        check_untouched(receiver, before, names)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_file_that_the_target_has_not_goes(
        self, rich_pair: tuple[Path, Path, Path], receiver: Path, tmp_path: Path, way: str
    ) -> None:
        (receiver / "old").mkdir()
        (receiver / "old/notes.txt").write_bytes(b"old")
        found, _ = apply_by(way, rich_pair[2], receiver, tmp_path / "work")
        assert "mine.txt" in tree(found)
        assert "old" not in os.listdir(found)
        assert verify(found, against=rich_pair[1], skip=["mine.txt"]).matches
        assert apply(rich_pair[2], found).foreign == ("mine.txt",)

    def test_a_file_that_goes_has_to_be_the_bases(self, rich_pair: tuple[Path, Path, Path], receiver: Path) -> None:
        (receiver / "old").mkdir()
        (receiver / "old/notes.txt").write_bytes(b"my own notes")
        before, names = tree(receiver), names_below(receiver)
        with pytest.raises(WrongBaseError, match=r"old/notes\.txt is another than the base's"):
            apply(rich_pair[2], receiver)
        check_untouched(receiver, before, names)

    def test_nothing_but_a_file_goes(self, tmp_path: Path) -> None:
        tensors = tiny_tensors()[0]
        base = write_checkpoint(tmp_path / "base", tensors, sidecars={"old.txt": b"old", "kept.txt": b""})
        target = write_checkpoint(tmp_path / "target", tensors, sidecars={"kept.txt": b""})
        own = write_checkpoint(tmp_path / "own", tensors, shards=3, sidecars={"old.txt": b"old", "kept.txt": b""})
        delta = make_delta(base, target, tmp_path / "delta")
        result = apply(delta, own)
        assert (result.already, result.files_changed, result.foreign) == (False, ("old.txt",), ())
        assert verify(own).matches and verify(own, against=target).matches
        (own / "old.txt").write_bytes(b"another one")
        assert apply(delta, own).foreign == ("old.txt",)

    @pytest.mark.parametrize("way", WAYS)
    def test_what_goes_makes_way(self, tmp_path: Path, way: str) -> None:
        """A file for a folder of its name, and a folder for a file."""
        old, new = tiny_tensors()
        before, after = {"a": b"a", "b/c": b"c"}, {"a/b": b"b", "b": b"b"}
        base = write_checkpoint(tmp_path / "base", old, sidecars=before)
        target = write_checkpoint(tmp_path / "target", new, sidecars=after)
        delta = make_delta(base, target, tmp_path / "delta")
        own = write_checkpoint(tmp_path / "own", old, shards=3, sidecars=before)
        found, _ = apply_by(way, delta, own, tmp_path / "work")
        assert verify(found, against=target).matches
        assert len(open_checkpoint(found).shards) == 3

    def test_the_targets_tensors_with_a_file_that_goes(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path
    ) -> None:
        _, target, delta = rich_pair
        sidecars = {path: data for path, data in tree(target).items() if ".safetensors" not in path}
        sidecars["old/notes.txt"] = b"old"
        own = write_checkpoint(tmp_path / "own", rich_tensors()[1], shards=3, sidecars=sidecars)
        with pytest.raises(WrongBaseError, match=r"not its files, the delta removes old/notes\.txt"):
            apply(delta, own)
        shutil.rmtree(own / "old")
        assert apply(delta, own).already

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_several_shards_need_a_weight_map(
        self, rich_pair: tuple[Path, Path, Path], receiver: Path, tmp_path: Path, *, dry_run: bool
    ) -> None:
        _, target, delta = rich_pair
        (receiver / INDEX).unlink()
        before, names = tree(receiver), names_below(receiver)
        with pytest.raises(WrongBaseError, match=rf"own: has 4 shards and no weight map {INDEX}"):
            apply(delta, receiver, dry_run=dry_run)
        with pytest.raises(WrongBaseError, match="no weight map"):
            apply(delta, receiver, to=tmp_path / "out", dry_run=dry_run)
        check_untouched(receiver, before, names)
        sidecars = {path: data for path, data in tree(target).items() if ".safetensors" not in path}
        at_target = write_checkpoint(tmp_path / "done", rich_tensors()[1], shards=3, sidecars=sidecars, index=False)
        with pytest.raises(WrongBaseError, match=rf"not its files, {INDEX} is missing"):
            apply(delta, at_target, dry_run=dry_run)

    def test_one_shard_needs_none(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        sidecars = {"config.json": b"{}", "kept/merges.txt": b"m"}
        own = write_checkpoint(tmp_path / "one", rich_tensors()[0], index=False, sidecars=sidecars)
        assert not apply(rich_pair[2], own).exact
        assert verify(own, against=rich_pair[1]).matches
        assert apply(rich_pair[2], own).already

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("config", [None, b"mine"])
    def test_with_the_bases_shards_it_is_the_target(self, tmp_path: Path, config: bytes | None, way: str) -> None:
        """A sidecar that the delta carries may be another one, or missing."""
        old, new = tiny_tensors()
        base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars={"config.json": b"{}", "a.txt": b"a"})
        target = write_checkpoint(tmp_path / "target", new, shards=2, sidecars={"config.json": b"[]", "a.txt": b"a"})
        delta = make_delta(base, target, tmp_path / "delta")
        (base / "config.json").unlink()
        if config is not None:
            (base / "config.json").write_bytes(config)
        assert apply(delta, base, dry_run=True).exact
        found, result = apply_by(way, delta, base, tmp_path / "work")
        assert result.exact
        assert tree(found) == tree(target)
        again = apply(delta, found)
        assert (again.already, again.exact) == (True, True)

    def test_it_is_not_exact_later_either(self, rich_pair: tuple[Path, Path, Path], receiver: Path) -> None:
        assert not apply(rich_pair[2], receiver).exact
        again = apply(rich_pair[2], receiver)
        assert (again.already, again.exact) == (True, False)
        copy = apply(rich_pair[2], rich_pair[1])
        assert (copy.already, copy.exact) == (True, True)

    def test_its_weight_map(self, rich_pair: tuple[Path, Path, Path], receiver: Path) -> None:
        apply(rich_pair[2], receiver)
        index = json.loads((receiver / INDEX).read_text())
        target = rich_tensors()[1]
        assert index["unknown"] == ["kept"]
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in target.values())
        assert index["weight_map"].keys() == target.keys()

    def test_texts_that_need_not_change_do_not(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, delta = tiny
        sidecars = {name: (base / name).read_bytes() for name in ("config.json", "tokenizer/vocab.txt")}
        own = write_checkpoint(tmp_path / "own", tiny_tensors()[0], shards=3, sidecars=sidecars)
        before = open_checkpoint(own)
        index = (own / INDEX).read_bytes()
        apply(delta, own)
        assert [shard.header.raw for shard in open_checkpoint(own).shards] == [s.header.raw for s in before.shards]
        assert (own / INDEX).read_bytes() == index

    def test_a_shard_that_would_be_left_empty(self, tmp_path: Path) -> None:
        old = {name: tensor_of("F32", (8,), seed) for seed, name in enumerate("abcdef")}
        new = {name: tensor for name, tensor in old.items() if name not in "ad"}
        base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
        # The first of three shards holds a and d.
        own = write_checkpoint(tmp_path / "own", old, shards=3)
        apply(make_delta(base, target, tmp_path / "delta"), own)
        assert verify(own, against=target).matches
        assert len(open_checkpoint(own).shards) == 3

    def test_a_file_that_is_a_shard_here(self, tmp_path: Path) -> None:
        tensors = {"w": tensor_of("BF16", (64,))}
        base = write_checkpoint(tmp_path / "base", tensors)
        target = write_checkpoint(tmp_path / "target", tensors, sidecars={"sub/lora.safetensors": b"any bytes"})
        delta = make_delta(base, target, tmp_path / "delta")
        own = write_checkpoint(tmp_path / "own", tensors, sidecars={"sub/lora.safetensors": shard_bytes(tensors)})
        (own / "model.safetensors").unlink()
        write_weight_map(own, {"w": "sub/lora.safetensors"})
        before, names = tree(own), names_below(own)
        with pytest.raises(WrongBaseError, match=r"sub/lora\.safetensors .* but a shard here"):
            apply(delta, own)
        check_untouched(own, before, names)
        assert apply(delta, base).exact
        assert tree(base) == tree(target)
        apply(make_delta(base, write_checkpoint(tmp_path / "back", tensors), tmp_path / "second"), base)
        assert tree(base) == tree(tmp_path / "back")

    def test_a_file_of_the_users_beside_one_that_goes(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        (receiver / "notes.txt").write_text("mine")
        result = apply(delta, receiver)
        assert (result.exact, result.foreign) == (True, ("notes.txt",))
        assert tree(receiver) == {**tree(target), "notes.txt": b"mine"}

    def test_a_file_of_the_users_does_not_make_other_shards(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path
    ) -> None:
        """A receiver that has the record of its last apply knows which files are its checkpoint's."""
        base, target, delta = rich_pair
        receiver = fresh_copy(target, tmp_path / "receiver")
        apply(make_delta(target, base, tmp_path / "back"), receiver)
        (receiver / "notes.txt").write_text("mine")
        (receiver / "huge.bin").write_text("mine")
        result = apply(delta, receiver)
        assert result.exact
        assert result.foreign == ("huge.bin", "notes.txt")
        assert tree(receiver) == {**tree(target), "notes.txt": b"mine", "huge.bin": b"mine"}


class TestWrongBase:
    """A receiver that is not the base is refused, and nothing in it changes."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", ["layers.0.weight", "layers.1.weight"])
    def test_other_bits(self, tiny: tuple[Path, Path, Path], tmp_path: Path, way: str, name: str) -> None:
        base, _, delta = tiny
        tensors = tiny_tensors()[0]
        tensors[name] = with_changes(tensors[name], [100])
        other = write_checkpoint(tmp_path / "other", tensors, shards=2, metadata={"format": "pt"})
        for path in ("config.json", "tokenizer/vocab.txt"):
            (other / path).parent.mkdir(exist_ok=True)
            shutil.copy(base / path, other / path)
        work = tmp_path / "work"
        with pytest.raises(WrongBaseError) as error:
            apply_by(way, delta, other, work)
        if name == "layers.1.weight":
            # Only of a tensor that the delta copies is it known what it was.
            assert "layers.1.weight" in str(error.value)
        assert "expected content blake3:" in str(error.value)
        check_untouched(work / "receiver", tree(other), names_below(other))
        assert sorted(os.listdir(work)) == sorted(["receiver", *(["link"] if way == "aside" else [])])

    @pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
    def test_other_tensors(self, tiny: tuple[Path, Path, Path], tmp_path: Path, change: str) -> None:
        tensors = tiny_tensors()[0]
        dtype, _, data = tensors["layers.2.weight"]
        match change:
            case "missing":
                del tensors["layers.2.weight"]
            case "extra":
                tensors["layers.9.weight"] = tensors["layers.0.weight"]
            case "shape":
                tensors["layers.2.weight"] = (dtype, (32, 128), data)
            case "dtype":
                tensors["layers.2.weight"] = ("F16", (64, 64), data)
        other = write_checkpoint(tmp_path / "other", tensors, shards=2)
        before, names = tree(other), names_below(other)
        with pytest.raises(WrongBaseError) as error:
            apply(tiny[2], other)
        if change != "shape":
            assert "layers.9.weight" in str(error.value) or "layers.2.weight" in str(error.value)
        check_untouched(other, before, names)

    def test_a_shard_that_is_nobodys(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        receiver = fresh_copy(tiny[0], tmp_path / "receiver")
        shutil.copy(receiver / "model-00001-of-00002.safetensors", receiver / "lora.safetensors")
        before, names = tree(receiver), names_below(receiver)
        with pytest.raises(WrongBaseError, match=r"lora\.safetensors"):
            apply(tiny[2], receiver)
        check_untouched(receiver, before, names)

    def test_the_targets_tensors_with_another_config(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        _, target, delta = rich_pair
        receiver = fresh_copy(target, tmp_path / "receiver")
        (receiver / "config.json").write_text("{}")
        with pytest.raises(WrongBaseError, match="not its files"):
            apply(delta, receiver)
        assert (receiver / "config.json").read_text() == "{}"

    @pytest.mark.parametrize("found", [None, b"other"])
    @pytest.mark.parametrize("shards", [2, 3])
    @pytest.mark.parametrize("way", WAYS)
    def test_the_targets_tensors_without_a_file_that_stays(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, way: str, shards: int, found: bytes | None
    ) -> None:
        """The delta does not carry the file, and the target has it."""
        _, target, delta = rich_pair
        sidecars = {path: data for path, data in tree(target).items() if ".safetensors" not in path}
        root = write_checkpoint(tmp_path / "own", rich_tensors()[1], shards=shards, sidecars=sidecars)
        assert apply(delta, root).already
        (root / "kept/merges.txt").unlink()
        if found is not None:
            (root / "kept/merges.txt").write_bytes(found)
        with pytest.raises(WrongBaseError, match=r"not its files, kept/merges\.txt is missing or was changed"):
            apply_by(way, delta, root, tmp_path / "work")

    def test_the_clock_and_times_prove_nothing(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _target, delta = tiny
        receiver = fresh_copy(base, tmp_path / "receiver")
        apply(delta, receiver)
        shard = receiver / "model-00001-of-00002.safetensors"
        before = shard.stat()
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(WrongBaseError):
            apply(delta, receiver)


class TestDamaged:
    """A delta that is damaged or forged changes nothing."""

    @pytest.mark.parametrize("way", WAYS)
    def test_any_flipped_byte(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, way: str) -> None:
        base, _, delta = rich_pair
        files = sorted(path for path in delta.rglob("*") if path.is_file())
        work = tmp_path / "work"
        for number, path in enumerate(files):
            content = path.read_bytes()
            for at in {0, 7, len(content) // 3, len(content) // 2, len(content) - 1}:
                path.write_bytes(content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :])
                with pytest.raises(DcrError) as error:
                    apply_by(way, delta, base, work)
                assert error.value.exit_code in (4, 8), (path, at)
                check_untouched(work / "receiver", tree(base), names_below(base))
            path.write_bytes(content)

    @pytest.mark.parametrize("name", ["commit.json", "manifest.zst", "digests.zst", "payloads/000000.safetensors"])
    def test_a_missing_part(self, tiny: tuple[Path, Path, Path], name: str) -> None:
        base, _, delta = tiny
        (delta / name).unlink()
        names = names_below(base)
        with pytest.raises(DamagedError):
            apply(delta, base)
        assert names_below(base) == names

    @pytest.mark.parametrize("way", WAYS)
    def test_a_forged_digest(self, tiny: tuple[Path, Path, Path], tmp_path: Path, way: str) -> None:
        base, _, delta = tiny
        rewrite_delta(delta, digests={"layers.3.weight": bytes(16)})
        with pytest.raises(DamagedError, match=r"tensor layers\.3\.weight: would not become"):
            apply_by(way, delta, base, tmp_path / "work")
        check_untouched(tmp_path / "work/receiver", tree(base), names_below(base))

    @pytest.mark.parametrize("way", WAYS)
    def test_another_tensors_changes(self, tiny: tuple[Path, Path, Path], tmp_path: Path, way: str) -> None:
        """Payload and manifest are whole, but the last tensor gets the changes of the first."""
        base, _, delta = tiny
        pieces: list[TensorRow] = []

        def swap(row: TensorRow) -> TensorRow:
            if row.pieces:
                pieces.append(row)
            return replace(row, pieces=pieces[0].pieces) if row.name == "layers.3.weight" else row

        rewrite_delta(delta, rows=swap)
        with pytest.raises(DamagedError, match=r"layers\.3\.weight"):
            apply_by(way, delta, base, tmp_path / "work")
        check_untouched(tmp_path / "work/receiver", tree(base), names_below(base))

    @pytest.mark.parametrize("room", ["for all", "for one"])
    def test_a_malformed_block_of_the_last_shard(
        self, tiny: tuple[Path, Path, Path], tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, _, delta = tiny
        if room == "for one":
            monkeypatch.setattr(places, "has_room", lambda folder, needed, files: False)

        def shift(row: TensorRow) -> TensorRow:
            if row.name != "layers.3.weight":
                return row
            (piece,) = row.pieces
            (run,) = piece.runs
            return replace(row, pieces=(replace(piece, runs=(replace(run, offset=run.offset - 1),)),))

        rewrite_delta(delta, rows=shift)
        receiver = fresh_copy(base, tmp_path / "receiver")
        with pytest.raises(DamagedError, match=r"tensor layers\.3\.weight"):
            apply(delta, receiver)
        check_untouched(receiver, tree(base), names_below(base))

    def test_after_repair_it_works(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        payload = delta / "payloads/000000.safetensors"
        content = payload.read_bytes()
        payload.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DamagedError):
            apply(delta, base)
        payload.write_bytes(content)
        apply(delta, base)
        assert tree(base) == tree(target)


class TestBoxes:
    """Pieces with boxes: slices that ranks hold, side by side or interleaved."""

    SHAPE = (900, 700)
    BOXES = (
        (Box((0, 0), (1, 1), (900, 350)), Encoding.CONTEXT),
        (Box((0, 350), (2, 1), (450, 350)), Encoding.GAP_XOR),
        (Box((1, 351), (2, 2), (450, 175)), Encoding.GAP_OVERWRITE),
        (Box((1, 350), (2, 2), (450, 175)), Encoding.WHOLE),
    )

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
    def test_slices(self, tmp_path: Path, way: str, dtype: str) -> None:
        old = {"a": tensor_of("U8", (3,)), "w": tensor_of(dtype, self.SHAPE), "z": tensor_of("F32", (5,))}
        new = old | {"w": with_changes(old["w"], range(0, 630_000, 101))}
        base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
        delta = make_delta(base, base, tmp_path / "delta")
        put_into_boxes(delta, "w", (old["w"], new["w"]), self.BOXES)
        found, result = apply_by(way, delta, base, tmp_path / "work", jobs=3)
        assert tree(found) == tree(target)
        assert result.patched_shards == (way == "in-place")

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_a_malformed_box_changes_nothing(self, tmp_path: Path, mode: str) -> None:
        old = {"w": tensor_of("BF16", self.SHAPE)}
        new = {"w": with_changes(old["w"], range(0, 630_000, 101))}
        base = write_checkpoint(tmp_path / "base", old)
        delta = make_delta(base, base, tmp_path / "delta")
        put_into_boxes(delta, "w", (old["w"], new["w"]), self.BOXES)

        def shift(row: TensorRow) -> TensorRow:
            piece = row.pieces[1]
            run = replace(piece.runs[0], offset=piece.runs[0].offset + 1)
            return replace(row, pieces=(row.pieces[0], replace(piece, runs=(run,)), *row.pieces[2:]))

        rewrite_delta(delta, rows=shift)
        before, names = tree(base), names_below(base)
        with pytest.raises(DamagedError, match="tensor w in payload 0"):
            apply(delta, base, mode=mode)
        check_untouched(base, before, names)


class TestPlaces:
    """What stands where a file has to be."""

    def test_links_to_shards_are_not_written_through(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        blobs = fresh_copy(base, tmp_path / "blobs")
        for mode in ("replace", "in-place"):
            receiver = fresh_copy(base, tmp_path / mode)
            for name in os.listdir(blobs):
                if (blobs / name).is_file():
                    (receiver / name).unlink()
                    (receiver / name).symlink_to(f"../blobs/{name}")
            apply(delta, receiver, mode=mode)
            assert tree(receiver) == tree(target)
            assert tree(blobs) == tree(base)
            assert not (receiver / "model-00001-of-00002.safetensors").is_symlink()

    def test_other_names_of_a_shard_keep_their_bytes(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        receiver = fresh_copy(base, tmp_path / "receiver")
        name = "model-00001-of-00002.safetensors"
        os.link(receiver / name, tmp_path / "other")
        result = apply(delta, receiver, mode="in-place")
        assert (result.patched_shards, result.rewritten_shards) == (1, 1)
        assert tree(receiver) == tree(target)
        assert (tmp_path / "other").read_bytes() == (base / name).read_bytes()

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_a_mapping_keeps_the_old_bytes(self, tiny: tuple[Path, Path, Path], tmp_path: Path, mode: str) -> None:
        base, _, delta = tiny
        receiver = fresh_copy(base, tmp_path / "receiver")
        name = "model-00001-of-00002.safetensors"
        with open(receiver / name, "rb") as file:
            apply(delta, receiver, mode=mode)
            is_old = file.read() == (base / name).read_bytes()
        assert is_old == (mode == "replace")

    @pytest.mark.parametrize("kind", ["fifo", "folder", "socket"])
    def test_no_file_where_a_shard_has_to_be(self, tiny: tuple[Path, Path, Path], tmp_path: Path, kind: str) -> None:
        receiver = fresh_copy(tiny[0], tmp_path / "receiver")
        shard = receiver / "model-00001-of-00002.safetensors"
        shard.unlink()
        match kind:
            case "fifo":
                os.mkfifo(shard)
            case "folder":
                shard.mkdir()
            case "socket":
                os.mknod(shard, 0o140600)
        with pytest.raises(DamagedError, match=f"(?i){kind}|directory"):
            apply(tiny[2], receiver)

    @pytest.mark.parametrize("kind", ["fifo", "folder"])
    def test_no_file_where_a_sidecar_has_to_be(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, kind: str
    ) -> None:
        base, _, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        (receiver / "new").mkdir()
        if kind == "fifo":
            os.mkfifo(receiver / "new/deep")
        else:
            (receiver / "new/deep/template.txt").mkdir(parents=True)
        before = tree(receiver)
        with pytest.raises(DamagedError if kind == "fifo" else WrongBaseError, match=r"new/deep"):
            apply(delta, receiver)
        assert tree(receiver) == before
        assert not (receiver / ".dcr").exists()

    def test_a_state_folder_that_is_a_link(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        receiver = fresh_copy(tiny[0], tmp_path / "receiver")
        (tmp_path / "elsewhere").mkdir()
        (receiver / ".dcr").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DamagedError, match=r"\.dcr: is a link"):
            apply(tiny[2], receiver)
        assert os.listdir(tmp_path / "elsewhere") == []

    @pytest.mark.parametrize("name", ["lock", "stage", "journal", "in-progress"])
    def test_links_inside_the_state_folder(self, tiny: tuple[Path, Path, Path], tmp_path: Path, name: str) -> None:
        base, target, delta = tiny
        receiver = fresh_copy(base, tmp_path / "receiver")
        (receiver / ".dcr").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere/precious").write_text("precious")
        (receiver / ".dcr" / name).symlink_to(tmp_path / "elsewhere")
        if name in ("stage", "journal"):
            apply(delta, receiver)
            assert tree(receiver) == tree(target)
        else:
            with pytest.raises(DcrError):
                apply(delta, receiver)
            assert tree(receiver) == tree(base)
        assert (tmp_path / "elsewhere/precious").read_text() == "precious"

    def test_modes_stay(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = rich_pair
        for way in WAYS:
            receiver = fresh_copy(base, tmp_path / "work/receiver")
            for path in receiver.rglob("*"):
                if path.is_file():
                    path.chmod(0o440)
            copy = fresh_copy(receiver, tmp_path / "copy")
            found, _ = apply_by(way, delta, copy, tmp_path / "work")
            assert tree(found) == tree(target)
            modes = {path: (found / path).stat().st_mode & 0o777 for path in tree(target)}
            old = tree(base)
            assert {modes[path] for path in modes if path in old} == {0o440}, way

    def test_foreign_files_are_carried_along(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = rich_pair
        for way in ("replace", "in-place", "aside"):
            copy = fresh_copy(base, tmp_path / "copy")
            (copy / ".git").mkdir()
            (copy / ".git/HEAD").write_text("x")
            (copy / "pytorch_model.bin").write_text("second copy")
            if way == "aside":
                (copy / ".hidden").symlink_to("nowhere")
            found, result = apply_by(way, delta, copy, tmp_path / "work")
            extra = {".git/HEAD": b"x", "pytorch_model.bin": b"second copy"}
            assert tree(found) == {**tree(target), **extra}
            assert result.exact
            if way == "aside":
                assert os.readlink(found / ".hidden") == "nowhere"

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_strangers_are_left_and_listed(
        self, tiny: tuple[Path, Path, Path], tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also those that no checkpoint could hold, and more of them than a checkpoint may have."""
        base, target, delta = tiny
        receiver = fresh_copy(base, tmp_path / "receiver")
        (tmp_path / "elsewhere").mkdir()
        (receiver / "optimizer.pt").write_bytes(b"x")
        (receiver / "runs").symlink_to(tmp_path / "elsewhere")
        (receiver / "nowhere").symlink_to(tmp_path / "gone")
        os.mkfifo(receiver / "fifo")
        (receiver / "logs").mkdir()
        for number in range(3):
            (receiver / f"logs/{number}.txt").write_bytes(bytes(1000))
        monkeypatch.setattr("dcr_cli.checkpoint.checkpoint.MAX_SIDECARS_BYTES", 2500)
        result = apply(delta, receiver, mode=mode)
        assert result.exact
        logs = tuple(f"logs/{number}.txt" for number in range(3))
        assert result.foreign == ("fifo", *logs, "nowhere", "optimizer.pt", "runs")
        again = apply(delta, receiver, mode=mode)
        assert (again.already, again.foreign) == (True, result.foreign)
        found = {path: data for path, data in tree(receiver).items() if path not in result.foreign}
        assert found == tree(target)
        assert os.readlink(receiver / "runs") == str(tmp_path / "elsewhere")

    @pytest.mark.parametrize("way", WAYS)
    def test_files_that_become_folders(self, tmp_path: Path, way: str) -> None:
        """And folders that become files, there and back."""
        base, target = write_turned_pair(tmp_path)
        for before, after in ((base, target), (target, base)):
            delta = make_delta(before, after, tmp_path / f"delta-{after.name}")
            found, _ = apply_by(way, delta, before, tmp_path / "work")
            assert tree(found) == tree(after)

    @pytest.mark.parametrize("what", ["file", "deep file", "empty folder", "link"])
    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_what_is_nobodys_where_a_folder_becomes_a_file(self, tmp_path: Path, mode: str, what: str) -> None:
        base, target = write_turned_pair(tmp_path)
        delta = make_delta(base, target, tmp_path / "delta")
        if what == "link":
            (base / "e/link").symlink_to("nowhere")
        elif what == "file":
            (base / "e/mine").write_text("mine")
        else:
            (base / "e/mine").mkdir()
            if what == "deep file":
                (base / "e/mine/deep").write_text("mine")
        before, names = tree(base), names_below(base)
        for dry_run in (True, False):
            with pytest.raises(WrongBaseError, match="stands where the target has a file"):
                apply(delta, base, mode=mode, dry_run=dry_run)
        check_untouched(base, before, names)

    def test_a_file_that_is_nobodys_where_a_folder_is_needed(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path
    ) -> None:
        base, _, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        (receiver / "new").write_text("mine")
        with pytest.raises(WrongBaseError, match="new: is not the base's, and stands where the target has a folder"):
            apply(delta, receiver)
        assert tree(receiver) == {**tree(base), "new": b"mine"}

    def test_a_foreign_file_in_the_way(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = rich_pair
        receiver = fresh_copy(target, tmp_path / "receiver")
        apply(make_delta(target, base, tmp_path / "back"), receiver)
        (receiver / "new/deep").mkdir(parents=True)
        (receiver / "new/deep/template.txt").write_text("mine")
        with pytest.raises(WrongBaseError, match=r"new/deep/template\.txt: is not the base's"):
            apply(delta, receiver)
        assert tree(receiver) == {**tree(base), "new/deep/template.txt": b"mine"}

    def test_names_that_differ_in_case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = {"w": tensor_of("F32", (4,))}
        base = write_checkpoint(tmp_path / "base", tensors)
        target = write_checkpoint(tmp_path / "target", tensors, sidecars={"notes.txt": b"1", "NOTES.txt": b"2"})
        delta = make_delta(base, target, tmp_path / "delta")
        before, names = tree(base), names_below(base)
        with monkeypatch.context() as patch:
            patch.setattr(places, "_folds_names", lambda root: True)
            for way in WAYS:
                with pytest.raises(DamagedError, match="takes them for one name"):
                    apply_by(way, delta, base, tmp_path / "work")
                check_untouched(tmp_path / "work/receiver", before, names)
        apply(delta, base)
        assert tree(base) == tree(target)

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_a_base_that_cannot_be_read(
        self, tiny: tuple[Path, Path, Path], mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, _, delta = tiny
        before, names = tree(base), names_below(base)
        preadv = os.preadv

        def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset and os.readlink(f"/proc/self/fd/{fd}").startswith(str(base)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            for jobs in (1, 3):
                with pytest.raises(LocalError, match="cannot be read"):
                    apply(delta, base, mode=mode, jobs=jobs)
        check_untouched(base, before, names)


class TestArguments:
    def test_nothing_inside_another(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, delta = tiny
        inside = base / "delta"
        shutil.copytree(delta, inside)
        (tmp_path / "around").mkdir()
        shutil.copytree(base, delta / "receiver")
        for source, checkpoint, to in (
            (inside, base, None),
            (delta, delta / "receiver", None),
            (delta, base, base / "out"),
            (delta, base, base),
            (delta, base, delta / "out"),
            (delta, base, tmp_path),
        ):
            with pytest.raises(UsageError, match="inside"):
                apply(source, checkpoint, to=to)

    def test_what_excludes_each_other(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, delta = tiny
        for options in (
            {"mode": "sideways"},
            {"mode": "aside", "to": tmp_path / "out"},
            {"keep_previous": True},
            {"jobs": 0},
        ):
            with pytest.raises(UsageError):
                apply(delta, base, **options)

    def test_what_is_not_there(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, _, delta = tiny
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("")
        for arguments in (
            (tmp_path / "none", base),
            (delta, tmp_path / "none"),
            (delta, tmp_path / "file"),
            (delta, tmp_path / "empty"),
            (base, tmp_path / "empty"),
        ):
            with pytest.raises(NotFoundError):
                apply(*arguments)
        assert os.listdir(tmp_path / "empty") == []


class TestDry:
    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_nothing_is_written(self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, mode: str) -> None:
        base, _, delta = rich_pair
        names = names_below(base)

        def refuse(kind: str, path: str, other: str) -> None:
            raise AssertionError(f"{kind} {path}")

        with watching(refuse):
            result = apply(delta, base, dry_run=True, mode=mode)
        assert result.dry_run
        assert not result.already
        assert result.files_changed
        assert result.room_bytes > 0
        assert names_below(base) == names

    def test_it_refuses_what_an_apply_would(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        assert apply(delta, target, dry_run=True).already
        rewrite_delta(delta, digests={"layers.3.weight": bytes(16)})
        with pytest.raises(DamagedError):
            apply(delta, base, dry_run=True)


class TestRoom:
    def test_needed_and_free_are_told(
        self, tiny: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, _, delta = tiny
        monkeypatch.setattr(places, "free_bytes", lambda folder: 1000)
        for way in WAYS:
            with pytest.raises(
                LocalError, match=r"needs \S+ MB of room \([\d,]+ bytes\), 1 kB are free \(1,000 bytes\)"
            ):
                apply_by(way, delta, base, tmp_path / "work")
            check_untouched(tmp_path / "work/receiver", tree(base), names_below(base))

    @pytest.mark.parametrize("way", WAYS)
    def test_a_dry_run_says_what_a_run_demands(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base, target, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        (tmp_path / "link").symlink_to("receiver")
        checkpoint = tmp_path / "link" if way == "aside" else receiver
        to, mode = (tmp_path / "out", "replace") if way == "to" else (None, way)
        needed = apply(delta, checkpoint, to=to, mode=mode, dry_run=True).room_bytes
        for free in (needed - 1, needed):
            monkeypatch.setattr(places, "free_bytes", lambda folder, free=free: free)
            for dry_run in (True, False):
                if free < needed:
                    with pytest.raises(LocalError, match=rf"\({needed:,} bytes\)"):
                        apply(delta, checkpoint, to=to, mode=mode, dry_run=dry_run)
                else:
                    result = apply(delta, checkpoint, to=to, mode=mode, dry_run=dry_run)
        assert result.room_bytes == needed
        assert tree(Path(result.checkpoint)) == tree(target)

    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_one_shard_after_the_other(self, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without room for all, shards are staged in turn; what a pass over all would refuse is refused before."""
        old = {f"w{number}": tensor_of("BF16", (64, 64), number) for number in range(5)}
        new = {name: with_changes(tensor, [number]) for number, (name, tensor) in enumerate(old.items())}
        base = write_checkpoint(tmp_path / "base", old, shards=5)
        target = write_checkpoint(tmp_path / "target", new, shards=5)
        delta = make_delta(base, target, tmp_path / "delta")
        monkeypatch.setattr(places, "has_room", lambda folder, needed, files: False)
        monkeypatch.setattr("dcr_cli.receiver.change.has_room", lambda folder, needed, files: False)
        staged: list[int] = []

        def count(kind: str, path: str, other: str) -> None:
            if kind == "rename" and "/stage/" in path:
                staged.append(len(os.listdir(os.path.dirname(path))))

        with watching(count):
            apply(delta, base, mode=mode)
        assert tree(base) == tree(target)
        assert set(staged) <= {1}

    def test_a_link_is_needed_for_aside(self, tiny: tuple[Path, Path, Path]) -> None:
        with pytest.raises(UsageError) as error:
            apply(tiny[2], tiny[0], mode="aside")
        assert "ln -s" in str(error.value.hint)


class TestConfig:
    @pytest.mark.parametrize("mode", ["replace", "in-place"])
    def test_it_is_away_while_shards_change(
        self, rich_pair: tuple[Path, Path, Path], tmp_path: Path, mode: str
    ) -> None:
        base, target, delta = rich_pair
        receiver = fresh_copy(base, tmp_path / "receiver")
        changed = 0

        def look(kind: str, path: str, other: str) -> None:
            nonlocal changed
            place = other if kind == "rename" else path
            is_change = kind in ("rename", "write", "unlink") and Path(place).parent == receiver
            if is_change and not place.endswith("config.json"):
                changed += 1
                assert not (receiver / "config.json").exists()
                assert (receiver / ".dcr/in-progress").exists()

        with watching(look):
            apply(delta, receiver, mode=mode)
        assert changed
        assert tree(receiver) == tree(target)


class TestAside:
    def test_the_link_is_turned(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        (tmp_path / "models").mkdir()
        fresh_copy(base, tmp_path / "models/v1")
        for text in ("models/v1", "models/v1/", str(tmp_path / "models/v1"), "./models/../models/v1"):
            fresh_copy(base, tmp_path / "models/v1")
            link = tmp_path / "current"
            link.unlink(missing_ok=True)
            link.symlink_to(text)
            result = apply(delta, link, mode="aside", keep_previous=True)
            assert tree(link) == tree(target)
            assert os.path.isabs(os.readlink(link)) == text.startswith("/")
            assert result.previous == str(tmp_path / "models/v1")
            assert tree(tmp_path / "models/v1") == tree(base)
            assert os.path.realpath(link).startswith(str(tmp_path / "models/current.dcr-"))
            shutil.rmtree(os.path.realpath(link))

    def test_the_folder_before_goes(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        """Which a run made for the link; what somebody else made stays."""
        base, target, delta = tiny
        back = make_delta(target, base, tmp_path / "back")
        link, result = apply_by("aside", delta, base, tmp_path / "work")
        assert result.previous == str(tmp_path / "work/receiver")
        assert apply(back, link, mode="aside").previous is None
        assert sorted(os.listdir(tmp_path / "work")) == sorted(["link", "receiver", os.readlink(link)])

    def test_a_folder_with_other_names_stays(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        (tmp_path / "other").symlink_to("base")
        (tmp_path / "link").symlink_to("other")
        result = apply(delta, tmp_path / "link", mode="aside")
        assert tree(tmp_path / "link") == tree(target)
        assert tree(tmp_path / "other") == tree(base)
        assert result.previous == str(base)

    def test_going_back_and_again(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        """What --keep-previous left is used again, not built again."""
        _base, target, delta = tiny
        (tmp_path / "link").symlink_to("base")
        apply(delta, tmp_path / "link", mode="aside", keep_previous=True)
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("base")
        result = apply(delta, tmp_path / "link", mode="aside", keep_previous=True)
        assert result.bytes_written == 0
        assert tree(tmp_path / "link") == tree(target)

    def test_unchanged_files_are_shared(self, tmp_path: Path) -> None:
        old = {"a": tensor_of("F32", (8,), 1), "b": tensor_of("F32", (8,), 2)}
        new = old | {"b": with_changes(old["b"], [3])}
        base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars={"config.json": b"{}"})
        target = write_checkpoint(tmp_path / "target", new, shards=2, sidecars={"config.json": b"{}"})
        (tmp_path / "link").symlink_to("base")
        apply(make_delta(base, target, tmp_path / "delta"), tmp_path / "link", mode="aside", keep_previous=True)
        for name in ("model-00001-of-00002.safetensors", "config.json"):
            assert (tmp_path / "link" / name).stat().st_ino == (base / name).stat().st_ino
        assert tree(base) != tree(target) == tree(tmp_path / "link")

    def test_a_name_that_is_taken(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        _base, target, delta = tiny
        (tmp_path / "link").symlink_to("base")
        apply(delta, tmp_path / "link", mode="aside", keep_previous=True)
        taken = Path(os.path.realpath(tmp_path / "link"))
        shutil.rmtree(taken)
        taken.mkdir()
        (taken / "mine").write_text("mine")
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("base")
        apply(delta, tmp_path / "link", mode="aside")
        assert tree(tmp_path / "link") == tree(target)
        assert (taken / "mine").read_text() == "mine"


class TestTo:
    def test_where_something_is(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        (tmp_path / "full").mkdir()
        (tmp_path / "full/x").write_text("x")
        (tmp_path / "file").write_text("x")
        for place in ("full", "file"):
            with pytest.raises(ConflictError):
                apply(delta, base, to=tmp_path / place)
        (tmp_path / "empty").mkdir()
        apply(delta, base, to=tmp_path / "empty")
        assert tree(tmp_path / "empty") == tree(target)
        assert not list(tmp_path.glob(".*"))

    def test_what_a_stopped_run_left_is_no_hindrance(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        base, target, delta = tiny
        (tmp_path / ".out.dcr-partial").mkdir()
        (tmp_path / ".out.dcr-partial/model-00001-of-00002.safetensors").write_text("half")
        apply(delta, base, to=tmp_path / "out")
        assert tree(tmp_path / "out") == tree(target)

    def test_a_second_run_does_nothing(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        """Whoever was stopped when all was done runs it again."""
        base, target, delta = tiny
        out = tmp_path / "out"
        assert not apply(delta, base, to=out).already
        before = os.stat(out / ".dcr/state.json")
        for dry_run in (True, False):
            result = apply(delta, base, to=out, dry_run=dry_run)
            assert (result.already, result.exact, result.checkpoint) == (True, True, str(out))
        assert tree(out) == tree(target) and os.stat(out / ".dcr/state.json") == before
        assert not list(tmp_path.glob(".out*"))

    def test_a_second_run_through_several_deltas(self, tmp_path: Path) -> None:
        versions = [
            write_checkpoint(tmp_path / f"v{number}", {"a": tensor_of("BF16", (64,), number)}) for number in range(3)
        ]
        for number in (1, 2):
            diff(versions[number - 1], versions[number], tmp_path / f"d{number}", skip=[f"none-{number}"])
        deltas = [tmp_path / "d1", tmp_path / "d2"]
        assert not apply(deltas, versions[0], to=tmp_path / "out").already
        for dry_run in (True, False):
            assert apply(deltas, versions[0], to=tmp_path / "out", dry_run=dry_run).already
        assert tree(tmp_path / "out") == tree(versions[2])

    @pytest.mark.parametrize("what", ["byte", "file", "record", "base"])
    def test_what_is_not_at_the_target_is_something_else(
        self, tiny: tuple[Path, Path, Path], tmp_path: Path, what: str
    ) -> None:
        base, _, delta = tiny
        out = tmp_path / "out"
        apply(delta, base, to=out)
        shard = next(iter(sorted(out.glob("*.safetensors"))))
        if what == "byte":
            shard.write_bytes(shard.read_bytes()[:-1] + b"\xa5")
        elif what == "file":
            (out / "config.json").write_text("other")
        elif what == "record":
            (out / ".dcr/state.json").unlink()
        else:
            shutil.rmtree(out)
            shutil.copytree(base, out)
        before = tree(out)
        with pytest.raises(ConflictError, match="exists and is no empty folder"):
            apply(delta, base, to=out)
        assert tree(out) == before

    def test_a_receiver_at_the_target(self, tiny: tuple[Path, Path, Path], tmp_path: Path) -> None:
        with pytest.raises(WrongBaseError, match="nothing to build"):
            apply(tiny[2], tiny[1], to=tmp_path / "out")


def test_threads_make_no_difference(tmp_path: Path) -> None:
    """One large tensor and many tiny ones, by one thread and by many."""
    rng = np.random.default_rng(1)
    old = {"large": tensor_of("BF16", (1_500_000,), 1)} | {
        f"tiny.{number:04}": tensor_of("F32" if number % 3 else "U8", (number % 5,), number) for number in range(3000)
    }
    new = dict(old)
    new["large"] = with_changes(old["large"], rng.choice(1_500_000, 9000, replace=False).tolist())
    for number in range(0, 3000, 7):
        name = f"tiny.{number:04}"
        if old[name][1][0]:
            new[name] = with_changes(old[name], [0], 77)
    base = write_checkpoint(tmp_path / "base", old, shards=3)
    target = write_checkpoint(tmp_path / "target", new, shards=3)
    delta = make_delta(base, target, tmp_path / "delta")
    for jobs in (1, 2, 9):
        for way in WAYS:
            found, _ = apply_by(way, delta, base, tmp_path / "work", jobs)
            assert tree(found) == tree(target), (jobs, way)
