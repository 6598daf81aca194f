"""Deltas in order applied in one pass: what comes out is, byte for byte, what one after the other leaves."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from dcr_cli.apply import ApplyWay, apply, apply_chain
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import main
from dcr_cli.delta.chain import MOST_AT_ONCE, compose, compose_files, split
from dcr_cli.delta.delta import Delta, open_delta
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Box
from dcr_cli.durable import open_folder
from dcr_cli.errors import DamagedError, IncompleteError, LocalError, UnsupportedError, UsageError, WrongBaseError
from dcr_cli.inspect import inspect
from dcr_cli.receiver.apply_result import ApplyResult
from dcr_cli.receiver.fetched import FETCHED, deltas_to_finish
from dcr_cli.receiver.passes import passes
from dcr_cli.receiver.receiver import Receiver
from dcr_cli.verify import verify
from faults import failing_at, killed_at, stopped_at
from receivers import claim, fresh_copy, make_delta, names_below, put_into_boxes, tree
from strategies import TensorData, names, tensor_of, tensors, with_changes, write_checkpoint

WAYS = ("replace", "in-place", "aside", "to")
Tensors = dict[str, TensorData]
Sidecars = dict[str, bytes]
Version = tuple[Tensors, Sidecars, int]


def write_versions(folder: Path, versions: Sequence[Version]) -> list[Path]:
    """Write versions as folder/v0, folder/v1, ..., of so many shards each."""
    return [
        write_checkpoint(folder / f"v{number}", dict(sorted(held.items())), shards=shards, sidecars=sidecars)
        for number, (held, sidecars, shards) in enumerate(versions)
    ]


def deltas_between(roots: Sequence[Path], encodings: Sequence[str] = ("auto",)) -> list[Path]:
    return [
        make_delta(base, target, target.parent / f"delta-{number}", encodings[number % len(encodings)])
        for number, (base, target) in enumerate(pairwise(roots))
    ]


def apply_by(way: str, deltas: Sequence[Path], base: Path, work: Path) -> tuple[Path, ApplyResult]:
    """Apply deltas in one go to a copy of `base` below `work`: the folder with the result, and what was said."""
    shutil.rmtree(work, ignore_errors=True)
    receiver = fresh_copy(base, work / "receiver")
    if way == "to":
        before = names_below(receiver)
        result = apply(deltas, receiver, to=work / "out", jobs=1)
        assert names_below(receiver) == before
        return work / "out", result
    if way == "aside":
        (work / "link").symlink_to("receiver")
        return work / "link", apply(deltas, work / "link", mode="aside", jobs=1)
    return receiver, apply(deltas, receiver, mode=way, jobs=1)


def step_by_step(deltas: Sequence[Path], base: Path, work: Path) -> Path:
    """Apply deltas one after the other to a copy of `base`."""
    receiver = fresh_copy(base, work)
    for delta in deltas:
        apply(delta, receiver, jobs=1)
    return receiver


def own_shards_of(version: Version, folder: Path, shards: int) -> Path:
    """A receiver with a version's tensors and sidecars in shards of its own."""
    held, sidecars, _ = version
    return write_checkpoint(folder, dict(sorted(held.items())), shards=shards, sidecars=sidecars)


def check_equal_to_steps(deltas: Sequence[Path], base: Path, place: Path, ways: Sequence[str] = WAYS) -> None:
    expected = tree(step_by_step(deltas, base, place / "steps"))
    for way in ways:
        if way == "to" and expected == tree(base):
            # What is there already is not built again.
            continue
        found, _ = apply_by(way, deltas, base, place / "work")
        assert tree(found) == expected, way


def rich_versions() -> list[Version]:
    """Four versions between which every kind of thing happens to tensors and files, some of them twice."""
    big = tensor_of("BF16", (700, 500), 1)
    v0: Tensors = {
        "a.kept": tensor_of("BF16", (40, 8), 2),
        "b.often": big,
        "c.removed.and.back": tensor_of("F32", (7,), 3),
        "d.first": tensor_of("F16", (33, 3), 4),
        "e.whole": tensor_of("BF16", (16, 16), 5),
        "f.left": tensor_of("U8", (31,), 6),
        "f.right": tensor_of("U8", (31,), 7),
        "g.empty": tensor_of("I64", (0, 7)),
        "h.scalar": tensor_of("F64", (), 8),
        "i.shape": tensor_of("BF16", (64, 64), 9),
        "j.embed": tensor_of("BF16", (20, 4), 10),
        "k.gone": tensor_of("I32", (9,), 11),
    }
    v1 = dict(v0)
    v1["b.often"] = with_changes(big, [0, 5, 262143, 262144, 349999])
    del v1["c.removed.and.back"]
    v1["d.second"] = v1.pop("d.first")
    v1["e.whole"] = tensor_of("BF16", (16, 16), 12)
    v1["f.left"], v1["f.right"] = v0["f.right"], v0["f.left"]
    v1["i.shape"] = ("BF16", (4096,), with_changes(v0["i.shape"], [7])[2])
    v1["j.head"] = v0["j.embed"]
    v1["l.passing"] = tensor_of("I32", (5, 5), 13)
    v1["m.new"] = tensor_of("BF16", (100,), 14)
    del v1["k.gone"]
    v2 = dict(v1)
    v2["b.often"] = with_changes(v1["b.often"], [0, 6, 262143, 300000], 3)
    v2["c.removed.and.back"] = tensor_of("F32", (7,), 15)
    v2["d.third"] = with_changes(v2.pop("d.second"), [1, 2])
    v2["e.whole"] = with_changes(v1["e.whole"], [3])
    v2["f.left"] = with_changes(v1["f.left"], [30])
    v2["i.shape"] = ("BF16", (32, 128), with_changes(("BF16", (4096,), v1["i.shape"][2]), [7, 4095], 5)[2])
    v2["j.head"] = with_changes(v1["j.head"], [0])
    del v2["l.passing"]
    v2["m.new"] = with_changes(v1["m.new"], [99])
    v3 = dict(v2)
    v3["b.often"] = with_changes(v2["b.often"], [6, 349999])
    v3["d.last"] = v3.pop("d.third")
    v3["e.whole"] = with_changes(v2["e.whole"], [3, 4])
    v3["h.scalar"] = with_changes(v2["h.scalar"], [0], 255)
    v3["k.gone"] = tensor_of("I32", (9,), 11)
    config = [b'{"model_type": "tiny", "version": %d}\n' % number for number in range(4)]
    return [
        (v0, {"config.json": config[0], "always": b"a", "back": b"0", "changed/x": b"0", "brief": b"0"}, 3),
        (v1, {"config.json": config[0], "always": b"a", "changed/x": b"1", "passing": b"1", "brief": b"1"}, 3),
        (v2, {"config.json": config[2], "always": b"a", "changed/x": b"1", "back": b"2"}, 2),
        (v3, {"config.json": config[3], "always": b"a", "changed/x": b"0", "back": b"2", "new/y": b"3"}, 2),
    ]


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """Roots and deltas of the rich versions; not to be changed."""
    roots = write_versions(tmp_path_factory.mktemp("rich"), rich_versions())
    return roots, deltas_between(roots, ("auto", "gap", "context"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="dcr-test-", dir="/dev/shm") as folder:
        yield Path(folder)


class TestSteps:
    """A chain leaves what its deltas leave one after the other."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
    def test_everything_that_can_happen(self, place: Path, way: str, encoding: str) -> None:
        roots = write_versions(place, rich_versions())
        deltas = deltas_between(roots, (encoding,))
        for end in (2, 3):
            found, result = apply_by(way, deltas[:end], roots[0], place / "work")
            assert tree(found) == tree(roots[end])
            assert (result.exact, result.already, result.recovered) == (True, False, False)
            ends = open_delta(deltas[0]).commit.base, open_delta(deltas[end - 1]).commit.target
            assert (result.base, result.target) == ends
            assert verify(found, against=roots[end]).matches

    def test_other_encodings_in_each_delta(self, rich: tuple[list[Path], list[Path]], place: Path) -> None:
        roots, deltas = rich
        check_equal_to_steps(deltas, roots[0], place)
        assert tree(place / "steps") == tree(roots[-1])

    @pytest.mark.parametrize("shards", [1, 2, 4])
    def test_shards_of_its_own(self, rich: tuple[list[Path], list[Path]], place: Path, shards: int) -> None:
        roots, deltas = rich
        own = own_shards_of(rich_versions()[0], place / "own", shards)
        check_equal_to_steps(deltas, own, place)
        assert verify(place / "steps", against=roots[-1]).matches

    def test_tensors_that_come_in_an_order_of_their_own(self, place: Path) -> None:
        """Where shards are the receiver's own, a new tensor lies where the delta that brought it put it."""
        sides: Sidecars = {"config.json": b"{}"}
        a, b, c, d = (tensor_of("U8", (16,), seed) for seed in range(4))
        versions: list[Version] = [
            ({"a": a, "d": d}, sides, 1),
            ({"a": a, "c": c, "d": d}, sides, 1),
            ({"a": a, "b": b, "c": c, "d": d}, sides, 1),
            ({"b": b, "c": c, "d": d}, sides, 1),
            ({"a": c, "b": b, "c": c, "d": d}, sides, 1),
        ]
        deltas = deltas_between(write_versions(place, versions))
        check_equal_to_steps(deltas, own_shards_of(versions[0], place / "own", 2), place)

    def test_a_tensor_that_comes_and_goes_rewrites_a_weight_map_of_its_own(self, place: Path) -> None:
        sides: Sidecars = {"config.json": b"{}"}
        held = {"a": tensor_of("U8", (16,), 1), "d": tensor_of("U8", (16,), 2)}
        last = {**held, "d": with_changes(held["d"], [1])}
        versions: list[Version] = [(held, sides, 1), ({**held, "b": held["a"]}, sides, 1), (last, sides, 1)]
        deltas = deltas_between(write_versions(place, versions))
        check_equal_to_steps(deltas, own_shards_of(versions[0], place / "own", 2), place)

    def test_twenty_deltas(self, place: Path) -> None:
        dice = random.Random(20)
        held = {f"t{number}": tensor_of("BF16", (64, 64), number) for number in range(12)}
        versions: list[Version] = [(held, {"config.json": b"{}"}, 2)]
        for number in range(20):
            held = {
                name: with_changes(tensor, dice.sample(range(4096), 9)) if dice.random() < 0.7 else tensor
                for name, tensor in held.items()
            }
            versions.append((held, {"config.json": b"%d" % number}, 2))
        roots = write_versions(place, versions)
        deltas = deltas_between(roots, ("auto", "gap", "context"))
        for way in WAYS:
            found, result = apply_by(way, deltas, roots[0], place / "work")
            assert tree(found) == tree(roots[-1])
            once, direct = apply_by(
                way, [make_delta(roots[0], roots[-1], place / f"direct-{way}")], roots[0], place / "w"
            )
            assert tree(once) == tree(found)
            assert result.bytes_written == direct.bytes_written
            assert result.changed_tensors == direct.changed_tensors

    def test_the_same_tensors_in_other_shards_in_the_end(self, place: Path) -> None:
        """The base is not taken for a receiver that keeps shards of its own and is at the last version."""
        held = {name: tensor_of("BF16", (8,), number) for number, name in enumerate("pq")}
        versions: list[Version] = [(held, {"a": b"1"}, 1), (held, {}, 2), (held, {"a": b"1"}, 2)]
        roots = write_versions(place, versions)
        deltas = deltas_between(roots, ("auto",))
        check_equal_to_steps(deltas, roots[0], place)
        assert tree(place / "steps") == tree(roots[-1])

    @given(st.data())
    @settings(
        max_examples=12,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    def test_any_checkpoints(self, data: st.DataObject) -> None:
        with TemporaryDirectory(
            prefix="dcr-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        ) as folder:
            place = Path(folder)
            held = data.draw(st.dictionaries(names, tensors(), min_size=1, max_size=4))
            versions: list[Version] = []
            for number in range(data.draw(st.integers(3, 4))):
                if number:
                    held = data.draw(next_version(held))
                sidecars = data.draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from([b"0", b"1"]), max_size=3))
                versions.append((held, sidecars, data.draw(st.integers(1, min(2, len(held))))))
            roots = write_versions(place, versions)
            encodings = st.sampled_from(["auto", "context", "gap", "whole"])
            deltas = deltas_between(roots, data.draw(st.lists(encodings, min_size=3, max_size=3)))
            check_equal_to_steps(deltas, roots[0], place)
            assert tree(place / "steps") == tree(roots[-1])
            contents = [open_delta(delta).commit.target.content for delta in deltas]
            if open_delta(deltas[0]).commit.base.content in contents:
                # It is found to be at a later version, where the steps may have written a header anew.
                return
            own = own_shards_of(versions[0], place / "own", data.draw(st.integers(1, min(3, len(versions[0][0])))))
            try:
                steps = step_by_step(deltas, own, place / "steps")
            except UnsupportedError:
                # A shard that one of the deltas would leave empty.
                with pytest.raises(UnsupportedError):
                    apply_by("replace", deltas, own, place / "work")
                return
            # A step may happen to end with the target's own files, and the next one then goes on from these; the chain
            # keeps the receiver's headers and weight map. What they hold is the same.
            for way in ("in-place", "to"):
                assert verify(apply_by(way, deltas, own, place / "work")[0], against=steps).matches


@st.composite
def next_version(draw: st.DrawFn, held: Tensors) -> Tensors:
    """A version that follows: tensors kept, changed, replaced, reshaped, renamed, removed, added; never none."""
    found: Tensors = {}
    for name, tensor in held.items():
        match draw(st.sampled_from(["keep", "change", "change", "flat", "replace", "rename", "remove"])):
            case "change" if tensor[2] and tensor[0] not in ("F4", "F6_E2M3", "F6_E3M2"):
                elements = len(tensor[2]) // (len(tensor_of(tensor[0], (8,))[2]) // 8)
                positions = draw(st.lists(st.integers(0, elements - 1), max_size=9))
                found[name] = with_changes(tensor, positions, draw(st.integers(1, 255)))
            case "flat" if tensor[1]:
                size = 1
                for dimension in tensor[1]:
                    size *= dimension
                found[name] = tensor[0], (size,), tensor[2]
            case "replace":
                found[name] = draw(tensors())
            case "rename":
                found[draw(names)] = tensor
            case "remove":
                pass
            case _:
                found[name] = tensor
    return found | draw(st.dictionaries(names, tensors(), min_size=not found, max_size=1))


class TestStart:
    """A chain goes on from the version that a receiver is at."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("has_record", [False, True])
    def test_at_a_version_in_between(
        self, rich: tuple[list[Path], list[Path]], place: Path, way: str, has_record: bool
    ) -> None:
        roots, deltas = rich
        for number in (1, 2):
            base = step_by_step(deltas[:number], roots[0], place / "base") if has_record else roots[number]
            found, result = apply_by(way, deltas, base, place / "work")
            assert tree(found) == tree(roots[-1])
            assert result.base == open_delta(deltas[number]).commit.base

    @pytest.mark.parametrize("way", ["replace", "in-place", "aside"])
    def test_at_the_last_version(self, rich: tuple[list[Path], list[Path]], place: Path, way: str) -> None:
        roots, deltas = rich
        found, result = apply_by(way, deltas, roots[-1], place / "work")
        assert (result.already, result.bytes_written) == (True, 0)
        assert tree(found) == tree(roots[-1])
        with pytest.raises(WrongBaseError, match="nothing to build"):
            apply(deltas, roots[-1], to=place / "out")

    def test_shards_of_its_own_in_between(self, rich: tuple[list[Path], list[Path]], place: Path) -> None:
        deltas = rich[1]
        own = own_shards_of(rich_versions()[0], place / "own", 2)
        expected = tree(step_by_step(deltas, own, place / "steps"))
        for number in (1, 2, 3):
            middle = step_by_step(deltas[:number], own, place / "middle")
            shutil.rmtree(middle / ".dcr")
            for way in ("replace", "in-place"):
                found, result = apply_by(way, deltas, middle, place / "work")
                assert tree(found) == expected
                assert result.already == (number == 3)

    def test_values_that_come_back(self, place: Path) -> None:
        """The first and the last version look the same where the deltas change least."""
        small, large = tensor_of("U8", (8,), 1), tensor_of("U8", (4000,), 2)
        sides: Sidecars = {"config.json": b"{}"}
        versions: list[Version] = [
            ({"small": small, "large": large}, sides, 1),
            ({"small": with_changes(small, [0]), "large": with_changes(large, [5])}, sides, 1),
            ({"small": small, "large": with_changes(large, [5, 6])}, sides, 1),
        ]
        roots = write_versions(place, versions)
        check_equal_to_steps(deltas_between(roots), roots[0], place)
        assert tree(place / "steps") == tree(roots[2])

    def test_the_way_there_and_back(self, place: Path) -> None:
        small = tensor_of("U8", (8,), 1)
        sides: Sidecars = {"config.json": b"{}"}
        versions: list[Version] = [({"a": small}, sides, 1), ({"a": with_changes(small, [0])}, sides, 1)]
        roots = write_versions(place, versions)
        there, back = (make_delta(pair[0], pair[1], place / name) for name, pair in (("t", roots), ("b", roots[::-1])))
        found, result = apply_by("replace", [there, back, there], roots[0], place / "work")
        assert tree(found) == tree(roots[1])
        # It is there at once, before the last of them.
        assert result.base == open_delta(there).commit.base or result.already

    def test_a_file_that_goes_while_no_tensor_changes(self, place: Path) -> None:
        """The tensors do not tell the versions apart, the file does."""
        held = {"a": tensor_of("U8", (8,), 1)}
        for first, brings in ((b"0", False), (b"0", True)):
            versions: list[Version] = [
                (held, {"config.json": b"{}", "x": first}, 1),
                (held, {"config.json": b"{}"} | ({"x": b"1"} if brings else {}), 1),
                (held, {"config.json": b"{}"}, 1),
            ]
            folder = place / f"{brings}"
            roots = write_versions(folder, versions)
            deltas = deltas_between(roots)
            check_equal_to_steps(deltas, roots[0], folder)
            assert "x" not in tree(folder / "steps")
            check_equal_to_steps(deltas, own_shards_of(versions[0], folder / "own", 1), folder)


class TestRefused:
    def test_a_gap_and_a_wrong_order(self, rich: tuple[list[Path], list[Path]], place: Path) -> None:
        roots, deltas = rich
        receiver = fresh_copy(roots[0], place / "receiver")
        before = names_below(receiver)
        for wrong in ([deltas[0], deltas[2]], [deltas[1], deltas[0]], [deltas[0], deltas[0]]):
            with pytest.raises(WrongBaseError, match="does not start where") as error:
                apply(wrong, receiver)
            commits = [open_delta(folder).commit for folder in wrong]
            assert commits[0].target.content.hex() in str(error.value)
            assert commits[1].base.content.hex() in str(error.value)
        with pytest.raises(UsageError):
            apply([], receiver)
        assert names_below(receiver) == before

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("number", [0, 1, 2])
    def test_a_damaged_payload(self, rich: tuple[list[Path], list[Path]], place: Path, way: str, number: int) -> None:
        roots, deltas = rich
        given = [fresh_copy(delta, place / delta.name) for delta in deltas]
        payload = given[number] / "payloads/000000.safetensors"
        content = bytearray(payload.read_bytes())
        content[-1] ^= 1
        payload.write_bytes(content)
        with pytest.raises(DamagedError, match=str(payload)):
            apply_by(way, given, roots[0], place / "work")
        assert tree(place / "work/receiver") == tree(roots[0])
        assert not (place / "work/receiver/.dcr").exists()

    def test_another_base(self, rich: tuple[list[Path], list[Path]], place: Path) -> None:
        deltas = rich[1]
        held, sidecars, shards = rich_versions()[0]
        other = {**held, "a.kept": with_changes(held["a.kept"], [0])}
        base = write_checkpoint(place / "other", dict(sorted(other.items())), shards=shards, sidecars=sidecars)
        for way in WAYS:
            with pytest.raises(WrongBaseError):
                apply_by(way, deltas, base, place / "work")
            assert tree(place / "work/receiver") == tree(base)

    def test_a_file_that_only_the_first_delta_needs(self, rich: tuple[list[Path], list[Path]], place: Path) -> None:
        """A receiver with shards of its own has to have what the base has, though a later delta would bring it."""
        own = own_shards_of(rich_versions()[0], place / "own", 2)
        (own / "config.json").unlink()
        for way in ("replace", "to"):
            with pytest.raises(WrongBaseError, match=r"config\.json"):
                apply_by(way, rich[1], own, place / "work")


class TestDry:
    @pytest.mark.parametrize("way", WAYS)
    def test_it_says_what_would_be_done(self, rich: tuple[list[Path], list[Path]], place: Path, way: str) -> None:
        roots, deltas = rich
        done = apply_by(way, deltas, roots[0], place / "work")[1]
        receiver = fresh_copy(roots[0], place / "dry/receiver")
        (place / "dry/link").symlink_to("receiver")
        before = names_below(place / "dry")
        mode, to = ("replace", place / "dry/out") if way == "to" else (way, None)
        where = place / "dry/link" if way == "aside" else receiver
        found = apply(deltas, where, to=to, mode=mode, dry_run=True, jobs=1)
        assert names_below(place / "dry") == before
        assert (found.base, found.target, found.changed_tensors) == (done.base, done.target, done.changed_tensors)
        assert set(found.files_changed) == set(done.files_changed)


def boxed_versions(place: Path, *, also: Sequence[int] = (), reshaped: bool = False) -> tuple[list[Path], list[Path]]:
    """Three deltas of which the second has tensor `b` in boxes; those of the numbers in `also` change it too.

    `reshaped`: the third gives it another shape.
    """
    held = {"a": tensor_of("BF16", (64, 64), 1), "b": tensor_of("BF16", (64, 64), 2)}
    versions: list[Version] = [(held, {"config.json": b"0"}, 1)]
    for number in range(3):
        changed = {"a": with_changes(held["a"], [number, 4000])}
        if number == 1 or number in also:
            changed["b"] = with_changes(held["b"], [3 + number, 1000, 4095], number + 1)
        held = held | changed
        if reshaped and number == 2:
            held["b"] = "BF16", (32, 128), held["b"][2]
        versions.append((held, {"config.json": b"%d" % (number + 1)}, 1))
    roots = write_versions(place, versions)
    # Boxes are written into a delta that has no payloads otherwise.
    before = {**versions[1][0]}
    versions[2] = ({**before, "b": versions[2][0]["b"]}, versions[1][1], 1)
    shutil.rmtree(roots[2])
    write_checkpoint(roots[2], versions[2][0], sidecars=versions[2][1])
    deltas = [make_delta(roots[number], roots[number + 1], place / f"delta-{number}") for number in (0, 2)]
    empty = fresh_copy(roots[1], place / "empty")
    boxed = make_delta(empty, roots[1], place / "delta-1")
    halves = [
        (Box((0, 0), (1, 1), (64, 32)), Encoding.GAP_XOR),
        (Box((0, 32), (1, 1), (64, 32)), Encoding.GAP_XOR),
    ]
    put_into_boxes(boxed, "b", (before["b"], versions[2][0]["b"]), halves)
    return roots, [deltas[0], boxed, deltas[1]]


class TestBoxes:
    """Pieces with boxes go in the same pass, unless their tensor changes otherwise too."""

    def test_alone(self, place: Path) -> None:
        roots, deltas = boxed_versions(place)
        assert [len(group) for group in split([open_delta(delta) for delta in deltas])] == [3]
        check_equal_to_steps(deltas, roots[0], place)
        assert tree(place / "steps") == tree(roots[3])

    def test_a_shape_that_boxes_do_not_lie_in(self, place: Path) -> None:
        roots, deltas = boxed_versions(place, reshaped=True)
        assert [len(group) for group in split(opened(deltas))] == [2, 1]
        check_equal_to_steps(deltas, roots[0], place)
        assert tree(place / "steps") == tree(roots[3])

    @pytest.mark.parametrize(("also", "groups"), [((0,), [1, 2]), ((2,), [2, 1]), ((0, 2), [1, 1, 1])])
    def test_with_other_changes(self, place: Path, also: tuple[int, ...], groups: list[int]) -> None:
        roots, deltas = boxed_versions(place, also=also)
        assert [len(group) for group in split([open_delta(delta) for delta in deltas])] == groups
        check_equal_to_steps(deltas, roots[0], place)
        assert tree(place / "steps") == tree(roots[3])
        own = write_checkpoint(place / "own", _held(roots[0]), shards=2, sidecars={"config.json": b"0"})
        check_equal_to_steps(deltas, own, place)


def _held(root: Path) -> Tensors:
    checkpoint = open_checkpoint(root)
    held: Tensors = {}
    for tensor in checkpoint.tensors:
        data = (root / checkpoint.shards[tensor.shard].path).read_bytes()
        held[tensor.name] = tensor.dtype.name, tensor.shape, data[tensor.begin : tensor.begin + tensor.bytes]
    return held


class Case:
    """A chain of three deltas, and a way to apply it to a copy of its base."""

    def __init__(self, place: Path, way: str, *, boxes: bool = False) -> None:
        if boxes:
            self.roots, self.deltas = boxed_versions(place, also=(0,))
        else:
            self.roots = write_versions(place, small_versions())
            self.deltas = deltas_between(self.roots, ("auto", "gap"))
        self.states = [tree(root) for root in self.roots]
        self.work = place / "work"
        self.way = way

    @property
    def receiver(self) -> Path:
        return self.work / ("link" if self.way == "aside" else "receiver")

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        fresh_copy(self.roots[0], self.work / "receiver")
        if self.way == "aside":
            (self.work / "link").symlink_to("receiver")
            claim(self.work / "link")

    def run(self) -> ApplyResult:
        if self.way == "to":
            return apply(self.deltas, self.receiver, to=self.work / "out", jobs=1)
        return apply(self.deltas, self.receiver, mode=self.way, jobs=1)

    def check(self) -> int | None:
        """Say which version is there; None if it is marked as incomplete. Anything else is an error."""
        if self.way == "to":
            assert tree(self.receiver) == self.states[0]
            return self.states.index(tree(self.work / "out")) if (self.work / "out").exists() else 0
        try:
            open_checkpoint(self.receiver)
        except IncompleteError:
            return None
        return self.states.index(tree(self.receiver))

    def finish(self) -> None:
        if self.way != "to" or not (self.work / "out").exists():
            self.run()
        assert self.check() == len(self.deltas)
        root = self.work / "out" if self.way == "to" else self.receiver
        claims = {"link"} if self.way == "aside" else set()
        assert set(os.listdir(root / ".dcr")) == {"lock", "state.json", "state.zst"} | claims
        assert len(os.listdir(self.work)) == (1 if self.way in ("replace", "in-place") else 2)


def opened(deltas: Sequence[Path]) -> list[Delta]:
    return [open_delta(delta) for delta in deltas]


def small_versions() -> list[Version]:
    """Four versions of two shards: tensors changed, one replaced, one renamed; sidecars that come and go."""
    held = {f"t{number}": tensor_of("BF16", (64, 64), number) for number in range(4)}
    v1 = {**held, "t0": with_changes(held["t0"], [0, 63]), "t3": tensor_of("BF16", (32,), 9)}
    v2 = {**v1, "t0": with_changes(v1["t0"], [1, 63], 2), "t2": with_changes(v1["t2"], [7])}
    v3 = {**v2, "t1": with_changes(v2["t1"], [9]), "t3": with_changes(v2["t3"], [31])}
    return [
        (held, {"config.json": b"0", "old/x": b"x"}, 2),
        (v1, {"config.json": b"0", "passing": b"1"}, 2),
        (v2, {"config.json": b"2", "passing": b"1"}, 2),
        (v3, {"config.json": b"2", "new/y": b"y"}, 2),
    ]


class TestStopped:
    """The base, the target, or marked as incomplete; the same chain again finishes it."""

    @pytest.mark.parametrize(("way", "step"), [("replace", 1), ("in-place", 1), ("aside", 4), ("to", 4)])
    def test_stopped_at_every_step(self, place: Path, way: str, step: int) -> None:
        case = Case(place, way)
        seen = set()
        for number in count(0, step):
            case.reset()
            is_done = stopped_at(number, case.run)
            seen.add(case.check())
            case.finish()
            if is_done:
                break
        assert number > 20
        assert seen == ({0, 3} if way in ("aside", "to") else {0, None, 3})

    @pytest.mark.parametrize("way", ["replace", "in-place"])
    def test_stopped_while_it_recovers(self, place: Path, way: str) -> None:
        case = Case(place, way)
        for number in count(1, 17):
            case.reset()
            if stopped_at(number, case.run):
                break
            fresh_copy(case.work, place / "saved")
            for again in count(number % 5, 5):
                fresh_copy(place / "saved", case.work)
                is_done = stopped_at(again, case.run)
                case.check()
                case.finish()
                if is_done:
                    break

    @pytest.mark.parametrize("way", ["replace", "in-place"])
    def test_killed_and_failing(self, place: Path, way: str) -> None:
        case = Case(place, way)
        for number in count(0, 5):
            case.reset()
            if killed_at(number, case.run):
                break
            case.check()
            case.finish()
        for number in count(2, 5):
            case.reset()
            try:
                if failing_at(number, 5, case.run):
                    break
            except LocalError:
                pass
            case.check()
            case.finish()

    @pytest.mark.parametrize("way", WAYS)
    def test_stopped_in_any_of_several_passes(self, place: Path, way: str) -> None:
        case = Case(place, way, boxes=True)
        seen = set()
        for number in count(0, 5 if way in ("replace", "in-place") else 7):
            case.reset()
            is_done = stopped_at(number, case.run)
            seen.add(case.check())
            case.finish()
            if is_done:
                break
        assert seen - {None} == ({0, 3} if way == "to" else {0, 1, 3})

    def test_another_chain_meanwhile(self, place: Path) -> None:
        """What was begun is finished by deltas among which its own are, and by no others."""
        case = Case(place, "replace")
        stop_when_marked(case)
        whole = make_delta(case.roots[0], case.roots[3], place / "whole")
        middle = make_delta(case.roots[1], case.roots[2], place / "middle", "whole")
        for other in (
            [whole],
            case.deltas[:2],
            case.deltas[1:],
            case.deltas[2:],
            [case.deltas[0], middle, case.deltas[2]],
        ):
            with pytest.raises(IncompleteError) as error:
                apply(other, case.receiver)
            command = f"dcr apply {' '.join(map(str, case.deltas))} {case.receiver}"
            assert str(error.value.hint) == f"finish it first: {command}"
        case.finish()
        case.deltas = case.deltas[:2]
        stop_when_marked(case)
        case.deltas = [*case.deltas, place / "delta-2"]
        result = case.run()
        assert result.recovered and tree(case.receiver) == case.states[3]
        assert result.base == opened(case.deltas)[0].commit.base

    def test_a_chain_that_began_in_between(self, place: Path) -> None:
        """A receiver that was at the second version is finished by the deltas from there on, or by all."""
        case = Case(place, "in-place")
        every = list(case.deltas)
        for later in (every, every[1:]):
            case.deltas = every
            for number in count(25):
                case.reset()
                fresh_copy(case.roots[1], case.receiver)
                assert not stopped_at(number, case.run)
                if (case.receiver / ".dcr/in-progress").exists():
                    break
            case.deltas = later
            assert case.run().recovered
            assert tree(case.receiver) == case.states[3]


def stop_when_marked(case: Case) -> None:
    for number in count(30):
        case.reset()
        assert not stopped_at(number, case.run)
        if (case.receiver / ".dcr/in-progress").exists():
            return


class TestFetched:
    """Deltas that lie in the receiver's own folder stay there, and finish what they began."""

    @staticmethod
    def fetch(case: Case) -> list[Path]:
        case.reset()
        fetched = case.receiver / FETCHED
        return [fresh_copy(delta, fetched / f"{number:010d}-x") for number, delta in enumerate(case.deltas)]

    @pytest.mark.parametrize("way", ["replace", "in-place"])
    def test_stopped_at_every_step(self, place: Path, way: str) -> None:
        case = Case(place, way)
        marked = 0
        for number in count(0, 4):
            folders = self.fetch(case)

            def run(folders: Sequence[Path] = folders) -> ApplyResult:
                return apply_chain(
                    opened(folders), case.receiver, ApplyWay(mode=way), jobs=1, remote="s3://bucket/run 1"
                )

            is_done = stopped_at(number, run)
            assert [names_below(folder) for folder in folders] == [names_below(delta) for delta in case.deltas]
            found = deltas_to_finish(case.receiver)
            assert (found is not None) == (case.receiver / ".dcr/in-progress").exists()
            if found is not None:
                marked += 1
                # It names this process, which lives.
                (case.receiver / ".dcr/lock").unlink()
                with pytest.raises(IncompleteError) as error:
                    verify(case.receiver, against=case.roots[0])
                assert str(error.value.hint) == f"dcr pull 's3://bucket/run 1' {case.receiver} finishes it"
                assert found == tuple(folders)
                apply_chain(opened(found), case.receiver, ApplyWay(mode=way), jobs=1)
                assert tree(case.receiver) == case.states[3]
            if is_done:
                break
        assert marked > 5
        assert all(folder.is_dir() for folder in folders)
        # They are no part of the checkpoint.
        assert inspect(case.receiver).checkpoint == str(case.receiver)
        assert verify(case.receiver, against=case.roots[3]).matches

    def test_what_is_not_all_there(self, place: Path) -> None:
        case = Case(place, "replace")
        stop_when_marked(case)
        assert deltas_to_finish(case.receiver) is None
        for number, delta in enumerate(case.deltas[:2]):
            fresh_copy(delta, case.receiver / FETCHED / str(number))
        (case.receiver / FETCHED / "partial").mkdir()
        (case.receiver / FETCHED / "note").write_bytes(b"")
        assert deltas_to_finish(case.receiver) is None
        fresh_copy(case.deltas[2], case.receiver / FETCHED / "2")
        assert deltas_to_finish(case.receiver) == tuple(case.receiver / FETCHED / name for name in "012")


class TestCommand:
    def test_several_deltas(
        self, rich: tuple[list[Path], list[Path]], place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        roots, deltas = rich
        receiver = fresh_copy(roots[0], place / "receiver")
        assert main(["apply", *map(str, deltas), str(receiver), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["already"], found["checkpoint"]) == (False, str(receiver))
        assert tree(receiver) == tree(roots[-1])
        assert main(["apply", *map(str, deltas), str(receiver)]) == 0
        assert capsys.readouterr().out.startswith("already there")

    def test_what_is_missing_or_in_the_wrong_order(
        self, rich: tuple[list[Path], list[Path]], place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        roots, deltas = rich
        receiver = str(fresh_copy(roots[0], place / "receiver"))
        first, second, third = map(str, deltas)
        for words, code, said in (
            ([], 2, "missing argument 'DELTA'"),
            ([first], 2, "missing argument 'DELTA'"),
            ([first, "", receiver], 2, "an empty path"),
            ([first, receiver, second], 3, "the delta comes first"),
            ([second, first, receiver], 5, "in their order"),
            ([first, third, receiver], 5, f"does not start where {first} ends"),
            ([second, third, receiver], 5, "apply the deltas in their order"),
        ):
            assert main(["apply", *words]) == code
            assert said in capsys.readouterr().err
        assert tree(Path(receiver)) == tree(roots[0])


class TestCost:
    def test_every_block_is_read_and_written_once(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        roots = write_versions(place, small_versions())
        deltas = deltas_between(roots)
        read: list[tuple[str, int]] = []
        go_over = passes._Worker._go_over

        def count_reads(worker: passes._Worker, stretch: Any, task: Any, tally: Any) -> None:
            if stretch.source is not None:
                read.append(stretch.source)
            go_over(worker, stretch, task, tally)

        # A record says where the receiver is, so that nothing is read to find that out.
        base = step_by_step([make_delta(roots[1], roots[0], place / "back")], roots[1], place / "receiver")
        time.sleep(2.1)
        assert apply(place / "back", base).already
        monkeypatch.setattr(passes._Worker, "_go_over", count_reads)
        apply(deltas, base, jobs=1)
        assert tree(base) == tree(roots[3])
        assert len(read) == len(set(read)) > 0

    def test_memory_does_not_grow_with_the_checkpoint(self, place: Path) -> None:
        """Twenty deltas of 48 MB of tensors take what one does and a little for each."""
        held = {f"t{number}": tensor_of("BF16", (1 << 21,), number) for number in range(2)}
        roots, deltas = [write_checkpoint(place / "v0", held)], []
        for number in range(1, 13):
            held = {name: with_changes(tensor, range(number, 1 << 21, 5001)) for name, tensor in held.items()}
            roots.append(write_checkpoint(place / f"v{number}", held))
            deltas.append(make_delta(roots[-2], roots[-1], place / f"delta-{number}"))
            shutil.rmtree(roots[-2]) if number > 1 else None
        tracemalloc.start()
        try:
            apply(deltas, roots[0], mode="in-place", jobs=1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert tree(roots[0]) == tree(roots[-1])
        assert peak < 24 << 20


class TestChain:
    """What is put together from documents alone."""

    def test_a_whole_piece_needs_nothing_before_it(self, place: Path) -> None:
        first, second, third = (tensor_of("BF16", (64,), seed) for seed in range(3))
        sides: Sidecars = {"config.json": b"{}"}
        versions: list[Version] = [({"a": tensor}, sides, 1) for tensor in (first, second, third)]
        chain = compose(opened(deltas_between(write_versions(place, versions), ("gap", "whole"))))
        (row,) = chain.rows
        assert [Encoding(piece.encoding) for piece in row.pieces] == [Encoding.WHOLE]
        assert row.source == "a"

    def test_files_and_where_they_come_from(self, rich: tuple[list[Path], list[Path]]) -> None:
        chain = opened(rich[1])
        files, removed = compose_files(chain)
        carried = {file.path for file in files if file.kind == 2 and file.runs}
        assert carried == {"config.json", "changed/x", "back", "new/y"}
        # The base's own blake3 is known of none that a delta has brought, and of `brief` not either.
        assert {file.path: file.blake3 for file in removed} == {"brief": b"", "passing": b""}

    def test_more_deltas_than_go_at_once(self, place: Path) -> None:
        tensor = tensor_of("U8", (8,), 1)
        roots = write_versions(place, [({"a": tensor}, {}, 1), ({"a": with_changes(tensor, [0])}, {}, 1)])
        there, back = (
            open_delta(make_delta(pair[0], pair[1], place / name)) for name, pair in (("t", roots), ("b", roots[::-1]))
        )
        given = [there, back] * (MOST_AT_ONCE // 2) + [there]
        assert [len(group) for group in split(given)] in ([MOST_AT_ONCE, 1], [1, MOST_AT_ONCE])
        assert split([]) == []
        receiver = fresh_copy(roots[0], place / "receiver")
        with open_folder(receiver) as root, Receiver(root):
            pass
        apply_chain(given, receiver, ApplyWay(), jobs=1)
        assert tree(receiver) == tree(roots[1])
