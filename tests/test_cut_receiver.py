"""Receivers with a layout that come to a version by an anchor: new, damaged, too old, stopped anywhere, against NumPy's
cuts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcr_cli import PullResult, anchor, apply, diff, pull, push, verify
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.durable import NoRoomError, open_folder
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    IncompleteError,
    LocalError,
    NotFoundError,
    UnsupportedError,
    WrongBaseError,
)
from dcr_cli.layout.box import whole_box
from dcr_cli.layout.layout import KEEP, Form, Layout, LocalTensor, Placement, Rule
from dcr_cli.receiver.cut import cutter
from dcr_cli.receiver.cut.cutter import Cutter
from dcr_cli.receiver.cut.shards import find_shards
from dcr_cli.receiver.marker import LAID_FORMAT
from dcr_cli.receiver.record import SETTLE_NS, Record, read_record
from dcr_cli.receiver.view import View, layout_blake3
from faults import StoppedError, failing_at, in_child, killed_at, steps, stopped_at, watching
from ranks import RANKS, canonical, make_layout, path_of, rank_tensors, write_canonical, write_layout, write_ranks
from receivers import claim, fresh_copy, tree

MODES = ("replace", "in-place")
NOTES = {"lock", "state.json", "state.zst", "layout.json", "remote.json"}


def without_buffer(layout: Layout) -> Layout:
    """The layout of shards that hold nothing but tensors of the checkpoint."""
    shards = {
        path: {name: tensor for name, tensor in tensors.items() if name != "buffer"}
        for path, tensors in layout.shards.items()
    }
    return replace(layout, shards=shards)


@dataclass(frozen=True)
class Site:
    """A remote whose version 2 has an anchor and no delta any more, and what lies around it."""

    folder: Path

    @property
    def remote(self) -> Path:
        return self.folder / "remote"

    @property
    def receiver(self) -> Path:
        return self.folder / "work/receiver"

    def dense(self, number: int) -> Path:
        return self.folder / f"dense-{number}"

    def ranks(self, number: int) -> Path:
        return self.folder / f"ranks-{number}"

    @property
    def layout(self) -> Path:
        return self.folder / "layout.json"

    @property
    def full_layout(self) -> Path:
        """Of shards that hold nothing but tensors of the checkpoint."""
        return self.folder / "full/layout.json"

    def begin(self, number: int = 0) -> Path:
        """A receiver at version `number` + 1, of which nobody has said so."""
        (self.folder / "work").mkdir(exist_ok=True)
        return fresh_copy(self.ranks(number), self.receiver)

    def pull(self, **options: object) -> PullResult:
        return pull(self.remote, self.receiver, **{"layout": self.layout, "jobs": 1, **options})  # type: ignore[arg-type]


def make_site(folder: Path) -> Site:
    site = Site(folder)
    for number in range(2):
        write_canonical(site.dense(number), canonical(number), number)
        write_ranks(site.ranks(number), canonical(number), number)
        push(site.dense(number), site.remote)
    lose_delta(site, 2)
    anchor(site.dense(1), site.remote)
    write_layout(folder)
    (folder / "full").mkdir()
    write_layout(folder / "full", without_buffer(make_layout()))
    return site


def lose_delta(site: Site, version: int) -> None:
    shutil.rmtree(next((site.remote / "versions").glob(f"{version:010d}-*")))


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one."""
    with TemporaryDirectory(prefix="dcr-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def site(place: Path) -> Site:
    return make_site(place)


def check_new(receiver: Path, number: int) -> None:
    """Its shards have the tensors of the layout, in its order, and nothing else, as NumPy cuts them."""
    assert {path.name for path in receiver.iterdir()} == {".dcr", "config.json", *map(path_of, range(RANKS))}
    for rank in range(RANKS):
        wanted = rank_tensors(canonical(number), rank)
        del wanted["buffer"]
        found = load_file(receiver / path_of(rank))
        assert found.keys() == wanted.keys()
        assert all(found[name].dtype == wanted[name].dtype for name in wanted)
        assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
        header = find_shards(receiver, View(), (), None).shards[path_of(rank)].header
        order = list(without_buffer(make_layout()).shards[path_of(rank)])
        assert [entry.name for entry in header.tensors] == order and not header.metadata


# Behind, where deltas do not lead on.


@pytest.mark.parametrize("mode", MODES)
def test_too_old_for_the_deltas(site: Site, mode: str) -> None:
    receiver = site.begin()
    result = site.pull(mode=mode)
    assert (result.from_version, result.applied) == (1, (2,)) and result.way is not None and result.way.anchor == 2
    assert tree(receiver) == tree(site.ranks(1)) and set(os.listdir(receiver / ".dcr")) == NOTES
    assert verify(receiver).matches and verify(receiver, remote=site.remote).matches
    site.layout.unlink()
    assert pull(site.remote, receiver).already
    # From there it goes on by deltas, which cost it less than an anchor.
    write_canonical(site.dense(2), canonical(2), 2)
    push(site.dense(2), site.remote, anchor_every=1)
    result = pull(site.remote, receiver, mode=mode)
    assert result.applied == (3,) and result.way is not None and result.way.anchor is None
    assert tree(receiver) == tree(write_ranks(site.ranks(2), canonical(2), 2))


def test_by_an_anchor_and_the_deltas_after_it(site: Site) -> None:
    write_canonical(site.dense(2), canonical(2), 2)
    push(site.dense(2), site.remote)
    receiver = site.begin()
    assert site.pull().applied == (2, 3)
    assert tree(receiver) == tree(write_ranks(site.ranks(2), canonical(2), 2))


def test_deltas_come_before_a_smaller_anchor(site: Site) -> None:
    """What an anchor takes besides is more than what is fetched."""
    receiver = site.begin(1)
    site.pull()
    for number in (2, 3):
        dice = np.random.default_rng(number)
        made = {
            name: np.frombuffer(dice.bytes(each.nbytes), each.dtype).reshape(each.shape)
            for name, each in canonical(0).items()
        }
        push(write_canonical(site.dense(number), made, number), site.remote)
        write_ranks(site.ranks(number), made, number)
    anchor(site.dense(3), site.remote)
    result = site.pull()
    assert result.way is not None and result.way.anchor is None and result.applied == (3, 4)
    assert result.way.bytes > (site.dense(3) / "model.safetensors").stat().st_size
    assert tree(receiver) == tree(site.ranks(3))


def test_a_break_of_the_log(site: Site) -> None:
    write_canonical(site.dense(2), canonical(2), 2)
    push(site.dense(2), site.remote, no_delta=True)
    receiver = site.begin(1)
    result = site.pull()
    assert (result.from_version, result.applied, result.adopted) == (2, (3,), True)
    assert tree(receiver) == tree(write_ranks(site.ranks(2), canonical(2), 2))


def write_pytorch(folder: Path, number: int) -> Path:
    """What PyTorch's distributed checkpoint writes of two ranks that have half of the rows each."""
    folder.mkdir()
    for rank in range(RANKS):
        mine, info = {}, {}
        for name, tensor in canonical(number).items():
            rows = len(tensor) // RANKS
            begin = rank * rows if tensor.ndim == 2 else 0
            if tensor.ndim == 2 or rank == 0:
                mine[name] = np.ascontiguousarray(tensor[begin : begin + rows] if tensor.ndim == 2 else tensor)
                info[name] = {"saved_offsets": [begin, 0][: tensor.ndim]}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(mine, folder / name, {"DCP_SHARDING_INFO": json.dumps(info)})
    (folder / "config.json").write_text(json.dumps({"version": number}))
    return folder


@pytest.mark.parametrize("repair", [False, True])
def test_shards_that_say_themselves_what_they_are(site: Site, repair: bool) -> None:
    receiver = write_pytorch(site.folder / "pytorch", 0)
    if repair:
        flip(min(receiver.glob("*.safetensors")))
    assert pull(site.remote, receiver, repair=repair).applied == (2,)
    assert tree(receiver) == tree(write_pytorch(site.folder / "wanted", 1))
    assert pull(site.remote, receiver).already


def test_back_to_an_older_version(site: Site) -> None:
    receiver = site.begin(1)
    assert site.pull().already
    assert site.pull(version=1).applied == (1,)
    assert tree(receiver) == tree(site.ranks(0))


def test_behind_a_link(site: Site) -> None:
    shutil.copytree(site.ranks(0), site.folder / "work/first")
    site.receiver.symlink_to("first")
    claim(site.receiver)
    site.pull(mode="aside")
    assert tree(site.receiver) == tree(site.ranks(1))
    assert set(os.listdir(site.folder / "work")) == {"receiver", os.readlink(site.receiver)}
    assert set(os.listdir(site.receiver / ".dcr")) == NOTES | {"link"}


def test_the_folder_before_is_kept(site: Site) -> None:
    shutil.copytree(site.ranks(0), site.folder / "work/first")
    site.receiver.symlink_to("first")
    result = site.pull(mode="aside", keep_previous=True)
    assert result.previous == str(site.folder / "work/first")
    assert tree(site.folder / "work/first") == tree(site.ranks(0)) and tree(site.receiver) == tree(site.ranks(1))
    assert not (site.folder / "work/first/.dcr/fetched").exists()


# Damaged.


def flip(file: Path, at: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_is_repaired(site: Site, mode: str) -> None:
    receiver = site.begin(1)
    site.pull()
    intact = (receiver / path_of(1)).stat().st_ino
    flip(receiver / path_of(0))
    with pytest.raises(WrongBaseError) as caught:
        site.pull()
    assert "dcr pull --repair" in str(caught.value.hint)
    assert site.pull(repair=True, mode=mode).applied == (2,)
    assert tree(receiver) == tree(site.ranks(1)) and set(os.listdir(receiver / ".dcr")) == NOTES
    assert verify(receiver).matches and (receiver / path_of(1)).stat().st_ino == intact


def disagree(receiver: Path) -> None:
    mine = rank_tensors(canonical(1), 1)
    mine["norm"] = mine["norm"] + 1
    save_file(mine, receiver / path_of(1))


def swap(receiver: Path) -> None:
    (receiver / path_of(0)).rename(receiver / "x")
    (receiver / path_of(1)).rename(receiver / path_of(0))
    (receiver / "x").rename(receiver / path_of(1))


@pytest.mark.parametrize("damage", [disagree, swap], ids=lambda damage: damage.__name__)
def test_what_the_ranks_hold_is_wrong(site: Site, damage: Callable[[Path], None]) -> None:
    receiver = site.begin(1)
    damage(receiver)
    with pytest.raises((WrongBaseError, DamagedError)) as caught:
        site.pull()
    assert "dcr pull --repair" in str(caught.value.hint)
    site.pull(repair=True)
    for rank in range(RANKS):
        found, wanted = load_file(receiver / path_of(rank)), rank_tensors(canonical(1), rank)
        # Of what belongs to no checkpoint nobody knows what it should be.
        for tensors in (found, wanted):
            del tensors["buffer"]
        assert found.keys() == wanted.keys() and all(found[n].tobytes() == wanted[n].tobytes() for n in wanted)
    assert verify(receiver, against=site.dense(1)).matches


def test_another_layout_of_the_same_bytes_is_noted(site: Site) -> None:
    """What was recorded through one is not taken for what was read through the other."""
    receiver = site.begin(1)
    site.pull()
    layout = make_layout()
    kept = {path: {n: replace(t, fill=KEEP) for n, t in tensors.items()} for path, tensors in layout.shards.items()}
    other = replace(layout, shards=kept)
    # As if it had been written long enough after the last change to count.
    state = json.loads((receiver / ".dcr/state.json").read_bytes())
    (receiver / ".dcr/state.json").write_text(json.dumps(state | {"time_ns": state["time_ns"] + 3 * SETTLE_NS}))
    site.pull(repair=True, layout=write_layout(site.folder / "full", other))
    record = read_record_of(receiver)
    assert record.layout == layout_blake3(other) != layout_blake3(layout)
    assert pull(site.remote, receiver).already and tree(receiver) == tree(site.ranks(1))


def read_record_of(receiver: Path) -> Record:
    with open_folder(receiver / ".dcr") as home:
        record = read_record(home)
    assert record is not None
    return record


def test_what_is_no_part_of_a_checkpoint_stays(site: Site) -> None:
    """Padding, a buffer, the headers, and a file that dcr does not know."""
    receiver = site.begin()
    wanted = {}
    for rank in range(RANKS):
        for number in range(2):
            mine = rank_tensors(canonical(number), rank)
            mine["emb"] = mine["emb"].copy()
            mine["emb"][-2:] = 7 + rank
            mine["buffer"] = mine["buffer"] * 3
            save_file(mine, receiver / path_of(rank), {"format": "pt"})
            wanted[path_of(rank)] = (receiver / path_of(rank)).read_bytes()
        save_file(mine | rank_of_version_0(mine, rank), receiver / path_of(rank), {"format": "pt"})
    (receiver / "notes.txt").write_text("mine")
    (receiver / "model.safetensors.index.json").write_text("mine, too")
    site.pull()
    found = tree(receiver)
    assert {path: found[path] for path in wanted} == wanted
    assert found["notes.txt"] == b"mine" and found["model.safetensors.index.json"] == b"mine, too"


def rank_of_version_0(mine: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    found = rank_tensors(canonical(0), rank)
    emb = found["emb"].copy()
    emb[-2:] = mine["emb"][-2:]
    return found | {"emb": emb, "buffer": mine["buffer"]}


def test_a_shard_that_is_missing_is_made(site: Site) -> None:
    receiver = site.begin(1)
    for rank in range(RANKS):
        mine = rank_tensors(canonical(1), rank)
        del mine["buffer"]
        save_file(mine, receiver / path_of(rank))
    given = {"layout": site.full_layout}
    (receiver / path_of(1)).unlink()
    with pytest.raises(DamagedError, match="shards of the layout are missing") as caught:
        site.pull(**given)
    assert "dcr pull --repair" in str(caught.value.hint)
    kept = (receiver / path_of(0)).stat().st_ino
    site.pull(repair=True, **given)
    check_tensors = rank_tensors(canonical(1), 1)
    found = load_file(receiver / path_of(1))
    assert all(found[name].tobytes() == check_tensors[name].tobytes() for name in found)
    assert (receiver / path_of(0)).stat().st_ino == kept and verify(receiver).matches


def test_one_that_cannot_be_made(site: Site) -> None:
    receiver = site.begin(1)
    (receiver / path_of(1)).unlink()
    before = tree(receiver)
    with pytest.raises(DamagedError, match="shards of the layout are missing") as missing:
        site.pull()
    assert missing.value.hint is None
    with pytest.raises(UnsupportedError, match=r"rank-1.*cannot be made: .* no part of a checkpoint: buffer") as caught:
        site.pull(repair=True)
    assert "copy the shards of a full load there first" in str(caught.value.hint)
    assert tree(receiver) == before and not (receiver / ".dcr").exists()


def test_a_shard_without_a_header(site: Site) -> None:
    receiver = site.begin(1)
    os.truncate(receiver / path_of(0), 20)
    with pytest.raises(DamagedError, match="rank-0") as caught:
        site.pull(repair=True)
    assert "move it out of the checkpoint" in str(caught.value.hint) and not (receiver / ".dcr").exists()


def test_a_sector_that_is_lost(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = site.begin(1)
    shard = find_shards(receiver, View(layout=make_layout()), (), None).shards[path_of(0)]
    wide = next(entry for entry in shard.header.tensors if entry.name == "wide")
    inode, plain = (receiver / path_of(0)).stat().st_ino, os.preadv

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        begin = offset - len(shard.header.raw)
        is_lost = begin < wide.end and wide.begin < begin + sum(map(len, buffers))
        if os.fstat(fd).st_ino == inode and is_lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        with pytest.raises(LocalError):
            site.pull()
        assert site.pull(repair=True).unreadable == (path_of(0),)
    assert tree(receiver) == tree(site.ranks(1)) and verify(receiver).matches


def test_no_shard_is_left(site: Site) -> None:
    receiver = site.begin(1)
    for rank in range(RANKS):
        (receiver / path_of(rank)).unlink()
    with pytest.raises(NotFoundError) as caught:
        site.pull(layout=site.full_layout)
    assert "dcr pull --repair" in str(caught.value.hint)
    site.pull(repair=True, layout=site.full_layout)
    check_new(receiver, 1)


def test_an_apply_that_was_stopped_is_overtaken(site: Site) -> None:
    diff(site.dense(0), site.dense(1), site.folder / "delta")
    for mode in MODES:
        for number in count(30, 11):
            receiver = site.begin()
            if stopped_at(
                number, partial(apply, site.folder / "delta", receiver, mode=mode, jobs=1, layout=site.layout)
            ):
                break
            # Whoever has begun it has noted the layout.
            is_noted = (receiver / ".dcr/layout.json").exists()
            site.pull(repair=True, layout=None if is_noted else site.layout)
            assert tree(receiver) == tree(site.ranks(1)) and verify(receiver).matches
            assert set(os.listdir(receiver / ".dcr")) == NOTES


# Refused, and nothing touched.


def other_shapes(site: Site) -> Layout:
    layout = make_layout()
    return replace(layout, tensors={**layout.tensors, "norm": Form("F16", (8,))}, shards=shards_with_norm(layout))


def shards_with_norm(layout: Layout) -> dict[str, dict[str, LocalTensor]]:
    norm = LocalTensor(Form("F16", (8,)), (Placement("norm", whole_box(8)),))
    return {path: {**tensors, "norm": norm} for path, tensors in layout.shards.items()}


def other_local_shapes(site: Site) -> Layout:
    layout = make_layout()
    down = layout.shards[path_of(1)]["down"]
    turned = replace(down, form=Form("F16", (6, 8)))
    return replace(layout, shards={**layout.shards, path_of(1): {**layout.shards[path_of(1)], "down": turned}})


def fewer_shards(site: Site) -> Layout:
    layout = make_layout()
    return replace(layout, shards={"other-" + path: tensors for path, tensors in layout.shards.items()})


def other_tensors(site: Site) -> Layout:
    layout = without_buffer(make_layout())
    return replace(layout, tensors={**layout.tensors, "more": Form("F16", (2,))}, shards=with_more(layout))


def with_more(layout: Layout) -> dict[str, dict[str, LocalTensor]]:
    more = LocalTensor(Form("F16", (2,)), (Placement("more", whole_box(2)),))
    return {path: {**tensors, "more": more} for path, tensors in layout.shards.items()}


def with_rules(site: Site) -> Layout:
    layout = make_layout()
    return replace(layout, stored={"gate": layout.tensors["gate"]}, rules={"gate": Rule("add-one", "gate")})


@pytest.mark.parametrize("made", [other_shapes, other_local_shapes, fewer_shards, other_tensors, with_rules])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_layout_of_something_else(site: Site, made: Callable[[Site], Layout], dry_run: bool) -> None:
    receiver = site.begin()
    before = tree(receiver)
    site.layout.write_bytes(write_layout(site.folder / "work", made(site)).read_bytes())
    (site.folder / "work/layout.json").unlink()
    with pytest.raises((DamagedError, UnsupportedError)):
        site.pull(repair=True, dry_run=dry_run)
    assert tree(receiver) == before and os.listdir(site.folder / "work") == ["receiver"]
    assert not (receiver / ".dcr").exists()


def test_a_version_of_other_tensors(site: Site) -> None:
    write_canonical(site.dense(2), canonical(2) | {"new": np.zeros(3, np.float16)}, 2)
    push(site.dense(2), site.remote, anchor_every=1)
    receiver = site.begin()
    for given in (receiver, site.folder / "work/new"):
        with pytest.raises(UnsupportedError, match=r"not both in the target and in .*: new") as caught:
            pull(site.remote, given, layout=site.full_layout if given != receiver else site.layout, repair=True)
        assert "make a layout for the new tensors" in str(caught.value.hint)
    assert os.listdir(site.folder / "work") == ["receiver"] and tree(receiver) == tree(site.ranks(0))


def test_tied_tensors_that_are_not_the_same(site: Site) -> None:
    layout = make_layout()
    tied = {
        path: {
            name: replace(tensor, placements=(*tensor.placements, Placement("small.1", whole_box(3))))
            if name == "small.2"
            else tensor
            for name, tensor in tensors.items()
            if name != "small.1"
        }
        for path, tensors in without_buffer(layout).shards.items()
    }
    given = write_layout(site.folder / "full", replace(layout, shards=tied))
    with pytest.raises(UnsupportedError, match=r"small\.\d and small\.\d, which are one tensor here, differ"):
        pull(site.remote, site.folder / "new", layout=given)
    assert not (site.folder / "new").exists()


def test_an_anchor_that_is_damaged(site: Site) -> None:
    file = next((site.remote / "anchors").glob("0000000002-*/files/model.safetensors"))
    flip(file)
    receiver = site.begin()
    with pytest.raises(DamagedError, match="were fetched 2 times and are other ones"):
        site.pull()
    assert tree(receiver) == tree(site.ranks(0)) and not (receiver / ".dcr/in-progress").exists()
    # What has come is not taken for right by the next run.
    flip(file)
    site.pull()
    assert tree(receiver) == tree(site.ranks(1))


def test_the_header_of_an_anchor_is_damaged(site: Site) -> None:
    flip(next((site.remote / "anchors").glob("0000000002-*/files/model.safetensors")), 100)
    site.begin()
    with pytest.raises(DamagedError):
        site.pull()
    assert tree(site.receiver) == tree(site.ranks(0))


def test_files_with_the_names_of_shards(site: Site) -> None:
    """A file of the checkpoint lies where the layout has a shard."""
    dense = write_canonical(site.folder / "odd", canonical(1), 1)
    (dense / "parts").mkdir()
    (dense / "parts/rank-0.safetensors").write_bytes(b"no shard")
    push(dense, site.folder / "other")
    layout = without_buffer(make_layout())
    moved = {"parts/rank-0.safetensors": layout.shards[path_of(0)], path_of(1): layout.shards[path_of(1)]}
    given = write_layout(site.folder / "odd", replace(layout, shards=moved))
    with pytest.raises(UnsupportedError, match="have the names of shards"):
        pull(site.folder / "other", site.folder / "new", layout=given)


def test_no_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = site.begin()
    monkeypatch.setattr("dcr_cli.receiver.places.free_bytes", lambda folder: 1000)
    with pytest.raises(NoRoomError, match="of room"):
        site.pull()
    assert tree(receiver) == tree(site.ranks(0))
    with pytest.raises(NoRoomError, match="of room"):
        pull(site.remote, site.folder / "work/new", layout=site.full_layout)
    assert os.listdir(site.folder / "work") == ["receiver"]


# New.


@pytest.mark.parametrize("mode", [*MODES, "aside"])
def test_a_new_one(site: Site, mode: str) -> None:
    (site.folder / "work").mkdir()
    result = site.pull(mode=mode, layout=site.full_layout)
    assert (result.from_version, result.applied, result.changed) == (None, (2,), True)
    check_new(site.receiver, 1)
    left = {site.receiver.name, os.readlink(site.receiver)} if mode == "aside" else {site.receiver.name}
    assert set(os.listdir(site.folder / "work")) == left
    assert set(os.listdir(site.receiver / ".dcr")) - {"link"} == NOTES
    assert verify(site.receiver, remote=site.remote).matches and pull(site.remote, site.receiver).already
    write_canonical(site.dense(2), canonical(2), 2)
    push(site.dense(2), site.remote)
    pull(site.remote, site.receiver, mode=mode)
    check_new(site.receiver, 2)


def test_an_empty_folder(site: Site) -> None:
    site.receiver.mkdir(parents=True)
    site.pull(layout=site.full_layout)
    check_new(site.receiver, 1)


def test_a_new_one_is_rehearsed(site: Site) -> None:
    (site.folder / "work").mkdir()
    assert site.pull(layout=site.full_layout, dry_run=True).applied == (2,)
    assert not os.listdir(site.folder / "work")


def test_a_new_one_that_cannot_be_made(site: Site) -> None:
    (site.folder / "work").mkdir()
    for dry_run in (True, False):
        with pytest.raises(UnsupportedError, match=r"cannot be made: tensors .* no part of a checkpoint: buffer"):
            site.pull(dry_run=dry_run)
    assert not os.listdir(site.folder / "work")
    # As the hint says.
    receiver = site.begin()
    flip(receiver / path_of(0))
    site.pull(repair=True)
    assert tree(receiver) == tree(site.ranks(1))


def test_padding_that_is_kept_where_nothing_is(site: Site) -> None:
    layout = without_buffer(make_layout())
    kept = {
        path: {name: replace(tensor, fill=KEEP) for name, tensor in tensors.items()}
        for path, tensors in layout.shards.items()
    }
    pull(site.remote, site.folder / "new", layout=write_layout(site.folder / "full", replace(layout, shards=kept)))
    check_new(site.folder / "new", 1)


# Cutting.


def test_any_range_is_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it begins and ends, in the middle of an element too."""
    monkeypatch.setattr(cutter, "_SLICE_BYTES", 24)
    checkpoint = open_checkpoint(site.dense(1))
    cut = find_shards(site.ranks(0), View(layout=make_layout()), (), None)
    with Cutter(cut, checkpoint) as cutting:
        for rank in range(RANKS):
            wanted = (site.ranks(1) / path_of(rank)).read_bytes()
            assert cut.shards[path_of(rank)].size == len(wanted)
            for begin in range(0, len(wanted), 97):
                for size in (1, 2, 63, 700):
                    size = min(size, len(wanted) - begin)
                    found = b"".join(map(bytes, cutting.parts(path_of(rank), begin, size)))
                    assert found == wanted[begin : begin + size]


def test_small_ranges(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_cli.delta.file_rules.RANGE_BYTES", 333)
    monkeypatch.setattr(cutter, "_SLICE_BYTES", 64)
    site = make_site(site.folder / "small")
    receiver = site.begin()
    site.pull(jobs=4)
    assert tree(receiver) == tree(site.ranks(1))
    pull(site.remote, site.folder / "new", layout=site.full_layout, jobs=4)
    check_new(site.folder / "new", 1)


# Two at once.


def test_two_at_once(site: Site) -> None:
    """Whoever comes while one is at it is told so, whether the receiver is there or not, and spoils nothing."""
    for is_new in (False, True):
        if is_new:
            shutil.rmtree(site.receiver)
        else:
            site.begin()
        given = {"layout": site.full_layout if is_new else site.layout}
        answers: list[int] = []
        with watching(partial(ask_meanwhile, partial(site.pull, **given), answers)):
            site.pull(**given)
        assert answers == [ConflictError.exit_code]
        if is_new:
            check_new(site.receiver, 1)
        else:
            assert tree(site.receiver) == tree(site.ranks(1))
        assert os.listdir(site.folder / "work") == ["receiver"]


def ask_meanwhile(run: Callable[[], object], answers: list[int], kind: str, path: str, other: str) -> None:
    """Run it once, when a file of the anchor is written."""
    if kind == "write" and "/files/" in path and not answers:
        answers.append(0)
        answers[0] = in_child(run)


# Stopped anywhere.

WAYS = ("behind", "damaged", "aside", "new", "first")


@dataclass(frozen=True)
class Case:
    """A receiver, its work folder made anew each time, and how it comes to version 2."""

    site: Site
    way: str

    @property
    def is_new(self) -> bool:
        return self.way in ("new", "first")

    def reset(self) -> None:
        work = self.site.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if self.way == "aside":
            shutil.copytree(self.site.ranks(0), work / "first")
            self.site.receiver.symlink_to("first")
            claim(self.site.receiver)
        elif not self.is_new:
            self.site.begin(1 if self.way == "damaged" else 0)
            if self.way == "damaged":
                flip(self.site.receiver / path_of(0))

    def run(self) -> None:
        mode = "aside" if self.way in ("aside", "first") else "replace"
        layout = self.site.full_layout if self.is_new else self.site.layout
        self.site.pull(mode=mode, layout=layout, repair=self.way == "damaged")

    def check(self) -> None:
        """It is as it was, at the version, or says that it is incomplete; what is new is never seen incomplete."""
        receiver = self.site.receiver
        if self.is_new and not receiver.exists():
            return
        try:
            is_right = verify(receiver, against=self.site.dense(1), layout=self.site.layout).matches
        except IncompleteError:
            assert self.way in ("behind", "damaged")
            return
        except DamagedError:
            # Its shards have no buffer, so that it is at the version by their layout alone.
            assert self.is_new
            check_new(receiver, 1)
            return
        if is_right:
            assert tree(receiver) == tree(self.site.ranks(1))
        elif self.way != "damaged":
            assert tree(receiver) == tree(self.site.ranks(0))

    def check_end(self) -> None:
        receiver = self.site.receiver
        if self.is_new:
            check_new(receiver, 1)
        else:
            assert tree(receiver) == tree(self.site.ranks(1))
        assert verify(receiver).matches
        # The folder before, if it was to go just when the run was stopped, goes with the next change.
        assert set(os.listdir(receiver / ".dcr")) - {"link", "previous"} == NOTES
        left = {receiver.name, os.readlink(receiver)} if receiver.is_symlink() else {receiver.name}
        assert set(os.listdir(self.site.folder / "work")) - {"first"} == left - {"first"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stop", "apart"), [(stopped_at, 5), (killed_at, 29)])
def test_stopped_at_every_step(site: Site, way: str, stop: Callable[..., bool], apart: int) -> None:
    """Or, where others have been at all, at some of them."""
    if way not in ("behind", "first"):
        apart *= 3
    case = Case(site, way)
    for number in steps(apart):
        case.reset()
        if stop(number, case.run):
            break
        case.check()
        case.run()
        case.check_end()
    case.check_end()
    assert number > 40


def test_stopped_while_it_recovers(site: Site) -> None:
    case = Case(site, "behind")
    for number in count(5, 29):
        case.reset()
        if stopped_at(number, case.run):
            break
        fresh_copy(site.folder / "work", site.folder / "saved")
        for again in count(number % 11, 11):
            fresh_copy(site.folder / "saved", site.folder / "work")
            if stopped_at(again, case.run):
                break
            case.check()
            case.run()
            case.check_end()


def test_finished_without_remote_and_layout(site: Site) -> None:
    """What was begun is finished from what is there, as the shards are stored and in no other way."""
    case = Case(site, "behind")
    seen = 0
    for number in count(0, 5):
        case.reset()
        if stopped_at(number, case.run):
            break
        if not (site.receiver / ".dcr/in-progress").exists():
            continue
        seen += 1
        assert json.loads((site.receiver / ".dcr/in-progress").read_bytes())["format"] == LAID_FORMAT
        site.remote.rename(site.folder / "gone")
        with suppress(NotFoundError, WrongBaseError):
            pull(site.remote, site.receiver, jobs=1)
        (site.folder / "gone").rename(site.remote)
        assert tree(site.receiver) == tree(site.ranks(1)) and verify(site.receiver).matches
    assert seen > 5


def test_signed_as_what_led_there(site: Site, keys: tuple[Path, Path]) -> None:
    """Whoever trusts a key goes on from an anchor, though the run that came to it could not say so any more."""
    key = keys[0]
    trusted: dict[str, Any] = {"trusted_keys": [str(key.with_suffix(".pub"))], "jobs": 1}
    signed = site.folder / "signed"
    for number in range(2):
        push(site.dense(number), signed, sign_key=key)
    shutil.rmtree(next((signed / "versions").glob("0000000002-*")))
    anchor(site.dense(1), signed, sign_key=key)
    seen = 0
    for number in count(130):
        receiver = site.begin()
        pull(signed, receiver, layout=site.layout, version=1, repair=True, **trusted)
        if stopped_at(number, partial(pull, signed, receiver, **trusted)):
            break
        seen += not (receiver / ".dcr/in-progress").exists() and b'"version": 1' in position_of(receiver)
        assert pull(signed, receiver, **trusted).version == 2 and tree(receiver) == tree(site.ranks(1))
    assert seen


def position_of(receiver: Path) -> bytes:
    return (receiver / ".dcr/remote.json").read_bytes()


def test_what_was_fetched_is_not_fetched_again(site: Site) -> None:
    """And what lies there torn does not count."""
    site.begin()
    with suppress(StoppedError), watching(stop_at_first("stage")):
        site.pull()
    (copied,) = (site.receiver / ".dcr/fetched").glob("*/files")
    shard = max(copied.iterdir(), key=lambda file: file.stat().st_size)
    assert shard.stat().st_size == (site.dense(1) / "model.safetensors").stat().st_size
    result = site.pull()
    assert result.downloaded_bytes < shard.stat().st_size if shard.exists() else True
    assert tree(site.receiver) == tree(site.ranks(1))


def stop_at_first(word: str) -> Callable[[str, str, str], None]:
    is_over = False

    def stop(kind: str, path: str, other: str) -> None:
        nonlocal is_over
        is_over = is_over or word in path
        if is_over:
            raise StoppedError

    return stop


@pytest.mark.parametrize(("way", "apart"), [("behind", 7), ("new", 7)])
def test_every_step_fails_once(site: Site, way: str, apart: int) -> None:
    """A full disk or a broken one: an error that says so, or none where it does not matter; and then it is finished."""
    case = Case(site, way)
    failed, tried = [], 0
    for number in steps(apart):
        error = (errno.ENOSPC, errno.EIO)[number % 2]
        case.reset()
        try:
            if failing_at(number, error, case.run):
                break
        except NoRoomError:
            failed.append(errno.ENOSPC)
        except LocalError:
            failed.append(errno.EIO)
        tried += 1
        case.check()
        case.run()
        case.check_end()
    case.check_end()
    assert len(failed) > tried // 2 and set(failed) == {errno.ENOSPC, errno.EIO}
