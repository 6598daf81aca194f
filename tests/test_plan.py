"""Decisions alone: what becomes of shards and files, what must be ready together, and how much room that takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

import pytest

from dcr_cli.checkpoint.checkpoint import FileDigest, Shard
from dcr_cli.checkpoint.digest import files_digest, object_digest
from dcr_cli.checkpoint.header import Header, parse_header
from dcr_cli.delta.manifest import FileRow, Manifest, Piece, RemovedFile, Run, TensorRow
from dcr_cli.errors import DamagedError, UnsupportedError, WrongBaseError
from dcr_cli.receiver.base import Base, tensors_of
from dcr_cli.receiver.file_plan import check_files, match_files
from dcr_cli.receiver.plan import Action, Plan, check_tensors, make_plan, room_at_once, room_in_turn
from dcr_cli.receiver.reshard import own_layout, rewrite_weight_map
from strategies import shard_bytes

CONTEXT, WHOLE = 4, 1
SIZE = 64


def header(*names: str, size: int = SIZE) -> bytes:
    """The header of a shard with U8 tensors of these names."""
    raw = shard_bytes({name: ("U8", (size,), bytes(size)) for name in names})
    return raw[: 8 + int.from_bytes(raw[:8], "little")]


def shard(path: str, *names: str, size: int = SIZE) -> Shard:
    raw = header(*names, size=size)
    total = len(raw) + size * len(names)
    return Shard(path, parse_header(raw, total, path), total)


def base_of(*shards: Shard, alone: bool = True, files: tuple[FileDigest, ...] = ()) -> Base:
    records = [FileDigest(s.path, 1, len(s.header.raw), object_digest(s.header.raw)) for s in shards]
    paths = frozenset(s.path for s in shards) if alone else frozenset[str]()
    return Base(shards, tensors_of(shards), (*records, *files), paths)


def row(name: str, source: str | None = "", changed: int = 0, encoding: int = CONTEXT, size: int = SIZE) -> TensorRow:
    """A row; its source is its own name unless it is told otherwise."""
    pieces = (Piece(encoding, changed, None, (Run(0, 0, 10, 1),)),) if changed else ()
    return TensorRow(name, "U8", (size,), name if source == "" else source, pieces, bytes(16) if pieces else None)


def file_row(path: str, content: bytes, kind: int = 2, *, carried: bool = True) -> FileRow:
    return FileRow(path, kind, len(content), object_digest(content), (Run(0, 0, 10, 1),) if carried else ())


def plan_of(
    base: Base,
    rows: list[TensorRow],
    target: Mapping[str, tuple[str, ...]] | None = None,
    files: tuple[FileRow, ...] = (),
    *,
    removed: tuple[RemovedFile, ...] = (),
    in_place: bool = False,
) -> Plan:
    """Plan for target shards path -> names; without them, for the receiver's own."""
    rows = sorted(rows, key=lambda row: row.name)
    headers: dict[str, Header] = {}
    file_rows = list(files)
    for path, names in (target or {}).items():
        raw = header(*names)
        headers[path] = parse_header(raw, None, path)
        file_rows.append(file_row(path, raw, 1))
    manifest = Manifest(tuple(rows), (), tuple(sorted(file_rows, key=lambda file: file.path)), removed, (), ())
    read = (lambda file: headers[file.path]) if target is not None else None
    if read is None:
        check_files(base, manifest, "it")
    return make_plan(base, manifest, rows, read, in_place=in_place)


def actions(plan: Plan) -> dict[str, Action]:
    return {shard.path: shard.action for shard in plan.shards}


class TestActions:
    base = base_of(shard("x.safetensors", "a", "b"), shard("y.safetensors", "c"))
    target: ClassVar = {"x.safetensors": ("a", "b"), "y.safetensors": ("c",)}

    @pytest.mark.parametrize("in_place", [False, True])
    def test_unchanged_shards_are_kept(self, in_place: bool) -> None:
        plan = plan_of(self.base, [row("a"), row("b", changed=1), row("c")], self.target, in_place=in_place)
        changed = Action.PATCH if in_place else Action.REWRITE
        assert actions(plan) == {"x.safetensors": changed, "y.safetensors": Action.KEEP}

    def test_other_names_of_a_file_keep_it_from_being_patched(self) -> None:
        base = base_of(*self.base.shards, alone=False)
        plan = plan_of(base, [row("a"), row("b", changed=1), row("c")], self.target, in_place=True)
        assert actions(plan)["x.safetensors"] is Action.REWRITE

    def test_tensors_that_change_places_are_not_patched(self) -> None:
        rows = [row("a", source="b"), row("b", source="a"), row("c")]
        assert actions(plan_of(self.base, rows, self.target, in_place=True))["x.safetensors"] is Action.REWRITE

    def test_a_tensor_without_source_is_patched_whole(self) -> None:
        rows = [row("a", source=None, changed=SIZE, encoding=WHOLE), row("b"), row("c")]
        assert actions(plan_of(self.base, rows, self.target, in_place=True))["x.safetensors"] is Action.PATCH

    def test_another_order_is_another_file(self) -> None:
        target = {"x.safetensors": ("b", "a"), "y.safetensors": ("c",)}
        rows = [row("a"), row("b"), row("c")]
        assert actions(plan_of(self.base, rows, target, in_place=True))["x.safetensors"] is Action.REWRITE

    def test_places_are_where_the_header_says(self) -> None:
        (first, _) = plan_of(self.base, [row("a"), row("b"), row("c")], self.target).shards
        data = len(first.header)
        assert [(place.row, place.begin, place.size) for place in first.places] == [(0, data, 64), (1, data + 64, 64)]
        assert first.size == data + 128

    @pytest.mark.parametrize("target", [{"x.safetensors": ("a", "b")}, {"x.safetensors": ("a", "b", "c", "d")}])
    def test_headers_that_do_not_fit_the_rows(self, target: dict[str, tuple[str, ...]]) -> None:
        with pytest.raises(DamagedError, match=r"tensor [cd]"):
            plan_of(self.base, [row("a"), row("b"), row("c")], target)


class TestComponents:
    def test_shards_that_need_each_other_go_together(self) -> None:
        base = base_of(*(shard(f"{n}.safetensors", n) for n in "abcd"))
        target = {"a.safetensors": ("b",), "b.safetensors": ("a",), "c.safetensors": ("c",), "d.safetensors": ("d",)}
        rows = [row("a"), row("b"), row("c", changed=1), row("d", changed=1)]
        plan = plan_of(base, rows, target)
        assert [part.shards for part in plan.components] == [(0, 1), (2,), (3,)]

    def test_a_shard_that_goes_stays_until_its_readers_are_ready(self) -> None:
        base = base_of(shard("old1.safetensors", "a"), shard("old2.safetensors", "b"), shard("old3.safetensors", "c"))
        target = {"new1.safetensors": ("a",), "new2.safetensors": ("b",)}
        plan = plan_of(base, [row("a"), row("b")], target)
        assert [(part.shards, part.removed) for part in plan.components] == [
            ((0,), ("old1.safetensors",)),
            ((1,), ("old2.safetensors",)),
            ((), ("old3.safetensors",)),
        ]

    def test_a_kept_shard_joins_nobody(self) -> None:
        base = base_of(shard("a.safetensors", "a"), shard("b.safetensors", "b"), shard("c.safetensors", "c"))
        target = {"a.safetensors": ("a",), "b.safetensors": ("b", "d"), "c.safetensors": ("c", "e")}
        plan = plan_of(base, [row(n) for n in "abc"] + [row("d", "a"), row("e", "a")], target)
        assert [part.shards for part in plan.components] == [(1,), (2,)]

    def test_merging_joins_all(self) -> None:
        base = base_of(*(shard(f"{n}.safetensors", n) for n in "abc"))
        plan = plan_of(base, [row(n) for n in "abc"], {"one.safetensors": ("a", "b", "c")})
        (part,) = plan.components
        assert part.shards == (0,)
        assert sorted(part.removed) == ["a.safetensors", "b.safetensors", "c.safetensors"]


class TestRoom:
    def test_in_turn_takes_the_largest(self) -> None:
        base = base_of(*(shard(f"{n}.safetensors", n) for n in "abc"))
        target = {f"{n}.safetensors": (n,) for n in "abc"}
        plan = plan_of(base, [row(n, changed=1) for n in "abc"], target)
        size = plan.shards[0].size
        assert (room_at_once(plan), room_in_turn(plan)) == (3 * size, size)

    def test_what_grows_is_counted(self) -> None:
        base = base_of(shard("a.safetensors", "a"))
        target = {"a.safetensors": ("a",), "b.safetensors": ("b",), "c.safetensors": ("c",)}
        whole = [row(n, source=None, changed=SIZE, encoding=WHOLE) for n in "bc"]
        plan = plan_of(base, [row("a"), *whole], target)
        assert room_in_turn(plan) == room_at_once(plan) == 2 * plan.shards[1].size

    def test_a_journal_takes_what_changes(self) -> None:
        base = base_of(shard("a.safetensors", "a", size=10_000))
        rows = [row("a", changed=10, size=10_000)]
        own = plan_of(base, rows, in_place=True)
        assert 10 * 5 <= room_at_once(own) < 1000
        assert room_at_once(plan_of(base, rows)) > 10_000


class TestFiles:
    old = (FileDigest("kept.txt", 2, 1, object_digest(b"k")), FileDigest("old.txt", 2, 1, object_digest(b"o")))
    base = base_of(shard("a.safetensors", "a"), files=old)
    rows = (
        file_row("kept.txt", b"k", carried=False),
        file_row("new.txt", b"n"),
    )

    gone = RemovedFile("old.txt", object_digest(b"o"))

    def test_exact(self) -> None:
        plan = plan_of(self.base, [row("a")], {"a.safetensors": ("a",)}, self.rows, removed=(self.gone,))
        assert [file.path for file in plan.written_files] == ["new.txt"]
        assert plan.removed_files == ("old.txt",)
        assert plan.is_exact

    def test_own_files_stay(self) -> None:
        plan = plan_of(self.base, [row("a")], None, self.rows)
        assert [file.path for file in plan.written_files] == ["new.txt"]
        assert plan.removed_files == ()
        with pytest.raises(WrongBaseError, match=r"other\.txt"):
            plan_of(self.base, [row("a")], None, (*self.rows, file_row("other.txt", b"x", carried=False)))

    def test_own_files_go_if_they_are_the_bases(self) -> None:
        for removed in ((self.gone,), (self.gone, RemovedFile("zz.txt", bytes(32)))):
            plan = plan_of(self.base, [row("a")], None, self.rows, removed=removed)
            assert plan.removed_files == ("old.txt",)
        with pytest.raises(WrongBaseError, match=r"old\.txt is another than the base's"):
            plan_of(self.base, [row("a")], None, self.rows, removed=(RemovedFile("old.txt", bytes(32)),))

    def test_a_weight_map_of_ones_own_stays(self) -> None:
        own_map = FileDigest("a.json", 3, 1, object_digest(b"o"))
        base = base_of(shard("a.safetensors", "a"), files=(own_map,))
        plan = plan_of(base, [row("a")], None, removed=(RemovedFile("a.json", own_map.blake3),))
        assert plan.removed_files == ()

    def test_what_is_there_already_is_not_written(self) -> None:
        rows = (file_row("kept.txt", b"k"), file_row("old.txt", b"o"))
        assert plan_of(self.base, [row("a")], None, rows).written_files == ()

    def test_a_manifest_that_is_wrong_about_the_base(self) -> None:
        with pytest.raises(DamagedError, match=r"kept\.txt"):
            plan_of(self.base, [row("a")], {"a.safetensors": ("a",)}, (file_row("kept.txt", b"?", carried=False),))


class TestMatching:
    files = (
        FileDigest("a.safetensors", 1, 1, bytes(32)),
        FileDigest("b.txt", 2, 1, bytes(32)),
        FileDigest("c.txt", 2, 1, bytes(32)),
    )

    @pytest.mark.parametrize("names", [("a.safetensors", "b.txt", "c.txt"), ("a.safetensors", "b.txt")])
    def test_foreign_files_are_found(self, names: tuple[str, ...]) -> None:
        wanted = files_digest((f.path, f.kind, f.blake3) for f in self.files if f.path in names)
        found = match_files(self.files, wanted, [{"b.txt"}])
        assert found is not None
        assert tuple(file.path for file in found) == names

    def test_nothing_fits(self) -> None:
        assert match_files(self.files, bytes(32), [{"b.txt"}]) is None


class TestTensors:
    base = base_of(shard("a.safetensors", "a", "b"))

    @pytest.mark.parametrize(
        ("rows", "removed", "facts"),
        [
            ([row("a"), row("b"), row("c", "x")], (), "no tensor x, from which the delta makes c"),
            ([row("a", size=65), row("b")], (), "expected 65 elements of U8, found 64 of U8"),
            ([row("a")], (), "has tensor b, which the delta does not know"),
            ([row("a"), row("b")], ("c",), "no tensor c, which the delta removes"),
        ],
    )
    def test_what_cannot_be_the_base(self, rows: list[TensorRow], removed: tuple[str, ...], facts: str) -> None:
        with pytest.raises(WrongBaseError, match=facts):
            check_tensors(self.base, rows, removed, "it")

    def test_what_can(self) -> None:
        check_tensors(self.base, [row("a"), row("c", "a")], ("b",), "it")


class TestOwnShards:
    shards = (shard("x.safetensors", "a", "c"), shard("y.safetensors", "b", "d"))

    def layout(self, names: str) -> list[list[str]]:
        rows = [row(name) for name in sorted(names)]
        return [[rows[number].name for number, _, _ in places] for _, _, places in own_layout(self.shards, rows)]

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            ("abcd", [["a", "c"], ["b", "d"]]),
            ("abbcd", [["a", "c"], ["b", "d"]]),
            ("abcde", [["a", "c"], ["b", "d", "e"]]),
            ("ABabcd", [["a", "c", "A", "B"], ["b", "d"]]),
            ("bcd", [["c"], ["b", "d"]]),
            ("bd", [["d"], ["b"]]),
            ("acef", [["a", "c", "e"], ["f"]]),
        ],
    )
    def test_where_tensors_go(self, names: str, expected: list[list[str]]) -> None:
        assert self.layout("".join(sorted(set(names)))) == expected

    def test_more_shards_than_tensors(self) -> None:
        with pytest.raises(UnsupportedError, match="without a tensor"):
            self.layout("a")

    def test_headers_are_kept_or_rewritten(self) -> None:
        rows = [row("a"), row("b", size=10), row("c"), row("d")]
        (_, first, _), (_, second, places) = own_layout(self.shards, rows)
        assert first == self.shards[0].header.raw
        parsed = parse_header(second, None, "y")
        assert [(entry.name, entry.shape) for entry in parsed.tensors] == [("b", (10,)), ("d", (64,))]
        assert len(second) % 8 == 0
        assert places == [(1, len(second), 10), (3, len(second) + 10, 64)]

    def test_members_that_are_not_known_stay(self) -> None:
        raw = shard_bytes({"a": ("U8", (2,), b"ab")}, {"format": "pt"}, note="kept")
        raw = raw[: len(raw) - 2]
        old = Shard("x", parse_header(raw, len(raw) + 2, "x"), len(raw) + 2)
        ((_, new, _),) = own_layout([old], [row("a", size=3)])
        document = json.loads(new[8:])
        assert document["a"]["note"] == "kept"
        assert document["__metadata__"] == {"format": "pt"}


class TestWeightMap:
    text = json.dumps({"metadata": {"total_size": 100, "x": 1}, "weight_map": {"a": "1", "c": "2"}, "y": [2]}).encode()

    def test_kept_when_nothing_changes(self) -> None:
        assert rewrite_weight_map(self.text, {"c": "2", "a": "1"}, 0, "map") is None

    def test_unknown_keys_stay(self) -> None:
        new = rewrite_weight_map(self.text, {"a": "1", "b": "2"}, -30, "map")
        assert new is not None
        assert json.loads(new) == {
            "metadata": {"total_size": 70, "x": 1},
            "weight_map": {"a": "1", "b": "2"},
            "y": [2],
        }
        assert list(json.loads(new)["weight_map"]) == ["a", "b"]

    def test_a_size_that_is_not_there_is_not_made(self) -> None:
        text = b'{"weight_map": {"a": "1"}}'
        assert rewrite_weight_map(text, {"a": "1"}, 10, "map") is None
