"""Receivers that store tensors through a layout: every way to change them, stopped anywhere, against NumPy's cuts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from safetensors.numpy import save_file

from dcr_cli import apply, diff, pull, push, verify
from dcr_cli.errors import (
    DamagedError,
    IncompleteError,
    UnsupportedError,
    WrongBaseError,
)
from dcr_cli.layout.layout import LocalTensor, Rule
from dcr_cli.receiver.laid import projection
from faults import killed_at, steps, stopped_at
from ranks import canonical, make_layout, path_of, rank_tensors, write_canonical, write_layout, write_ranks
from receivers import tree

MODES = ("replace", "in-place")


@dataclass(frozen=True)
class Run:
    """Three versions, the deltas between them, and a layout."""

    folder: Path

    def dense(self, version: int) -> Path:
        return self.folder / f"dense-{version}"

    def ranks(self, version: int) -> Path:
        return self.folder / f"ranks-{version}"

    def delta(self, version: int) -> Path:
        return self.folder / f"delta-{version}"

    @property
    def layout(self) -> Path:
        return self.folder / "layout.json"

    def receiver(self, name: str = "receiver") -> Path:
        shutil.copytree(self.ranks(0), self.folder / name)
        return self.folder / name


def make_run(folder: Path, encoding: str = "auto") -> Run:
    run = Run(folder)
    for version in range(3):
        write_canonical(run.dense(version), canonical(version), version)
        write_ranks(run.ranks(version), canonical(version), version)
        if version:
            diff(run.dense(version - 1), run.dense(version), run.delta(version), encoding=encoding)
    write_layout(folder)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_become_what_numpy_cuts(tmp_path: Path, mode: str, encoding: str) -> None:
    run = make_run(tmp_path, encoding)
    receiver = run.receiver()
    result = apply(run.delta(1), receiver, mode=mode, layout=run.layout)
    assert not result.already and tree(receiver) == tree(run.ranks(1))
    assert verify(receiver, against=run.dense(1)).matches


def test_a_receiver_without_its_sidecars_is_no_match(run: Run) -> None:
    receiver = run.receiver()
    apply(run.delta(1), receiver, layout=run.layout)
    (receiver / "config.json").unlink()
    for result in (
        verify(receiver),
        verify(receiver, against=run.dense(1)),
        verify(receiver, delta=run.delta(1)),
        verify(run.dense(1), against=receiver),
    ):
        kind = "extra" if result.reference == str(receiver) else "missing"
        assert not result.matches and result.checked_sidecars == 0
        assert [(each.path, each.kind) for each in result.sidecars] == [("config.json", kind)]


def test_shards_of_a_trainer_need_no_sidecars(run: Run) -> None:
    (run.ranks(1) / "config.json").unlink()
    for result in (
        verify(run.ranks(1), layout=run.layout, against=run.dense(1)),
        verify(run.ranks(1), layout=run.layout, delta=run.delta(1)),
        verify(run.dense(1), against=run.ranks(1), against_layout=run.layout),
    ):
        assert result.matches and result.checked_sidecars == 0


@pytest.mark.parametrize("mode", MODES)
def test_the_layout_is_given_once(run: Run, mode: str) -> None:
    receiver = run.receiver()
    apply(run.delta(1), receiver, mode=mode, layout=run.layout)
    run.layout.unlink()
    apply([run.delta(1), run.delta(2)], receiver, mode=mode)
    assert tree(receiver) == tree(run.ranks(2))
    assert apply(run.delta(2), receiver).already
    assert verify(receiver).matches and verify(receiver, delta=run.delta(2)).matches


def test_several_deltas_go_in_one_pass(run: Run) -> None:
    receiver = run.receiver()
    result = apply([run.delta(1), run.delta(2)], receiver, layout=run.layout)
    assert result.rewritten_shards == 2 and tree(receiver) == tree(run.ranks(2))


def test_a_new_folder(run: Run) -> None:
    out = run.folder / "out"
    apply(run.delta(1), run.ranks(0), to=out, layout=run.layout)
    assert tree(out) == tree(run.ranks(1)) and not (run.ranks(0) / ".dcr").exists()
    apply(run.delta(2), out)
    assert tree(out) == tree(run.ranks(2))


def test_behind_a_link(run: Run) -> None:
    run.receiver("first")
    link = run.folder / "link"
    link.symlink_to("first")
    apply(run.delta(1), link, mode="aside", layout=run.layout)
    assert os.readlink(link) != "first" and tree(link) == tree(run.ranks(1))
    apply(run.delta(2), link, mode="aside")
    assert tree(link) == tree(run.ranks(2)) and tree(run.folder / "first") == tree(run.ranks(0))


def test_a_dry_run_changes_nothing(run: Run) -> None:
    receiver = run.receiver()
    result = apply(run.delta(1), receiver, dry_run=True, layout=run.layout)
    assert result.dry_run and result.rewritten_shards == 2
    assert tree(receiver) == tree(run.ranks(0)) and not (receiver / ".dcr").exists()


def test_little_is_held_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that are journalled in many parts, many of them for the same places."""
    monkeypatch.setattr(projection, "_HELD_BYTES", 100)
    monkeypatch.setattr(projection, "BLOCK_BYTES", 256)
    for mode in MODES:
        receiver = run.receiver(mode)
        apply([run.delta(1), run.delta(2)], receiver, mode=mode, layout=run.layout)
        assert tree(receiver) == tree(run.ranks(2))


def test_tensors_that_take_the_place_of_each_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = canonical(0)
    after = before | {"gate": before["up"], "up": before["gate"], "small.1": before["small.2"]}
    for version, tensors in enumerate((before, after)):
        write_canonical(run.dense(version), tensors)
        write_ranks(run.ranks(version), tensors)
    diff(run.dense(0), run.dense(1), run.delta(1))
    write_layout(tmp_path)
    for mode in MODES:
        receiver = run.receiver(mode)
        apply(run.delta(1), receiver, mode=mode, layout=run.layout)
        assert tree(receiver) == tree(run.ranks(1))


# Refused, and nothing touched.


def refused(run: Run, receiver: Path, error: type[Exception], message: str, layout: Path | None = None) -> None:
    before = tree(receiver)
    for mode in MODES:
        with pytest.raises(error, match=message):
            apply(run.delta(1), receiver, mode=mode, layout=layout or run.layout)
    assert tree(receiver) == before and not (receiver / ".dcr").exists()


def test_another_base(run: Run) -> None:
    shutil.copytree(run.ranks(2), run.folder / "receiver")
    refused(run, run.folder / "receiver", WrongBaseError, "is not the base of this delta")


def test_ranks_in_each_others_place(run: Run) -> None:
    receiver = run.receiver()
    (receiver / path_of(0)).rename(receiver / "x")
    (receiver / path_of(1)).rename(receiver / path_of(0))
    (receiver / "x").rename(receiver / path_of(1))
    refused(run, receiver, WrongBaseError, "is not the base of this delta")


def test_ranks_that_do_not_agree(run: Run) -> None:
    receiver = run.receiver()
    mine = rank_tensors(canonical(0), 1)
    mine["norm"] = mine["norm"].copy()
    mine["norm"][3] += 1
    save_file(mine, receiver / path_of(1))
    refused(
        run, receiver, DamagedError, r"norm: element 3 is 0x\w+ in norm of .*rank-0.*, but 0x\w+ in norm of .*rank-1"
    )


def test_a_missing_rank(run: Run) -> None:
    receiver = run.receiver()
    (receiver / path_of(1)).unlink()
    refused(run, receiver, DamagedError, "shards of the layout are missing: model-rank-1-part-0")


def test_a_layout_of_other_shapes(run: Run) -> None:
    receiver = run.receiver()
    mine = rank_tensors(canonical(0), 1)
    mine["down"] = mine["down"].reshape(-1, 8)
    save_file(mine, receiver / path_of(1))
    refused(run, receiver, DamagedError, r"down is F16 \[6, 8\], F16 \[8, 6\] expected by layout")


def test_an_element_with_two_places(run: Run, tmp_path: Path) -> None:
    layout = make_layout()
    shards = {path: dict(tensors) for path, tensors in layout.shards.items()}
    gate_up = shards[path_of(0)]["gate_up"]
    shards[path_of(0)]["gate_up"] = replace(gate_up, placements=(*gate_up.placements, gate_up.placements[0]))
    given = write_layout(tmp_path, replace(layout, shards=shards))
    refused(run, run.receiver(), DamagedError, r"gate_up of .*rank-0.*: element \[0, 0\] is in box \d+ of", given)


def test_what_cannot_be_patched(run: Run, tmp_path: Path) -> None:
    layout = make_layout()
    ruled = replace(layout, stored={"gate": layout.tensors["gate"]}, rules={"gate": Rule("add-one", "gate")})
    refused(run, run.receiver(), UnsupportedError, "has rules", write_layout(tmp_path, ruled))


def test_a_target_with_other_tensors(run: Run) -> None:
    receiver = run.receiver()
    write_canonical(run.folder / "more", canonical(1) | {"new": np.zeros(3, np.float16)})
    diff(run.dense(0), run.folder / "more", run.folder / "to-more")
    before = tree(receiver)
    with pytest.raises(UnsupportedError, match=r"tensors are not both in the target and in layout .*: new"):
        apply(run.folder / "to-more", receiver, layout=run.layout)
    assert tree(receiver) == before


def test_a_record_is_of_one_layout(run: Run) -> None:
    """What was checked through one layout says nothing of another, in which two tensors change places."""
    receiver = run.receiver()
    apply(run.delta(1), receiver, layout=run.layout)
    layout = make_layout()
    swapped = {path: _swapped(tensors) for path, tensors in layout.shards.items()}
    other = write_layout(run.folder, replace(layout, shards=swapped))
    with pytest.raises(WrongBaseError):
        apply(run.delta(2), receiver, layout=other)
    assert tree(receiver) == tree(run.ranks(1))


def _swapped(tensors: object) -> dict[str, LocalTensor]:
    assert isinstance(tensors, dict)
    small = {"small.1": tensors["small.2"], "small.2": tensors["small.1"]}
    return {**tensors, **small}


@pytest.mark.parametrize("name", ["layout.json", "state.json", "state.zst"])
@pytest.mark.parametrize("mode", MODES)
def test_a_folder_where_notes_are_kept(run: Run, mode: str, name: str) -> None:
    receiver = run.receiver()
    apply(run.delta(1), receiver, layout=run.layout)
    (receiver / ".dcr" / name).unlink()
    (receiver / ".dcr" / name).mkdir()
    before = tree(receiver)
    with pytest.raises(DamagedError, match=rf"{name}: is a directory, where a file has to be"):
        apply(run.delta(2), receiver, mode=mode, layout=run.layout)
    assert tree(receiver) == before and not (receiver / ".dcr/in-progress").exists()
    (receiver / ".dcr" / name).rmdir()
    apply(run.delta(2), receiver, mode=mode, layout=run.layout)
    assert tree(receiver) == tree(run.ranks(2))


# Stopped anywhere.


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory where there is one."""
    with TemporaryDirectory(prefix="dcr-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def state_of(run: Run, receiver: Path) -> str:
    """base, target or marked; anything else is an error."""
    try:
        verify(receiver, against=run.dense(1), layout=run.layout)
    except IncompleteError:
        return "marked"
    found = tree(receiver)
    if found == tree(run.ranks(1)):
        return "target"
    assert found == tree(run.ranks(0))
    return "base"


@pytest.mark.parametrize("stop", [stopped_at, killed_at])
@pytest.mark.parametrize("mode", MODES)
def test_stopped_at_every_step(place: Path, mode: str, stop: object) -> None:
    assert callable(stop)
    run = make_run(place)
    seen = set()
    for number in steps(4):
        receiver = run.receiver(f"receiver-{number}")
        ended = stop(
            number, lambda receiver=receiver: apply(run.delta(1), receiver, mode=mode, jobs=1, layout=run.layout)
        )
        if ended:
            break
        seen.add(state_of(run, receiver))
        # Once begun, it is finished without the layout being given again.
        given = None if seen and state_of(run, receiver) == "marked" else run.layout
        apply(run.delta(1), receiver, mode=mode, jobs=1, layout=given)
        assert tree(receiver) == tree(run.ranks(1)) and verify(receiver).matches
        assert set(os.listdir(receiver / ".dcr")) == {"lock", "state.json", "state.zst", "layout.json"}
        shutil.rmtree(receiver)
    assert number > 20 and seen == {"base", "marked", "target"}


def test_aside_stopped_at_every_step(place: Path) -> None:
    run = make_run(place)
    seen = set()
    for number in steps(4):
        work = place / f"work-{number}"
        shutil.copytree(run.ranks(0), work / "first")
        link = work / "link"
        link.symlink_to("first")
        if stopped_at(number, partial(apply, run.delta(1), link, mode="aside", jobs=1, layout=run.layout)):
            break
        state = state_of(run, link)
        assert state != "marked"
        seen.add(state)
        apply(run.delta(1), link, mode="aside", jobs=1, layout=run.layout)
        assert tree(link) == tree(run.ranks(1))
        shutil.rmtree(work)
    assert number > 20 and seen == {"base", "target"}


# Pulled.


@pytest.fixture
def remote(run: Run) -> Path:
    """A remote with version 1 and, if it is asked for, more; an anchor would be the cheaper way."""
    push(run.dense(0), run.folder / "remote")
    push(run.dense(1), run.folder / "remote")
    return run.folder / "remote"


@pytest.mark.parametrize("mode", MODES)
def test_pulled_from_where_it_is_found_to_be(run: Run, remote: Path, mode: str) -> None:
    receiver = run.receiver()
    result = pull(remote, receiver, mode=mode, layout=run.layout)
    assert (result.from_version, result.applied, result.adopted) == (1, (2,), True)
    assert tree(receiver) == tree(run.ranks(1))
    run.layout.unlink()
    assert pull(remote, receiver).already
    push(run.dense(2), remote)
    result = pull(remote, receiver, mode=mode)
    assert result.applied == (3,) and tree(receiver) == tree(run.ranks(2))
    assert verify(receiver, remote=remote).matches


def test_adopted_as_it_is(run: Run, remote: Path) -> None:
    shutil.copytree(run.ranks(1), run.folder / "receiver")
    result = pull(remote, run.folder / "receiver", layout=run.layout)
    assert result.already and result.adopted
    push(run.dense(2), remote)
    pull(remote, run.folder / "receiver")
    assert tree(run.folder / "receiver") == tree(run.ranks(2))


def test_pulled_behind_a_link(run: Run, remote: Path) -> None:
    run.receiver("first")
    link = run.folder / "link"
    link.symlink_to("first")
    pull(remote, link, mode="aside", layout=run.layout)
    assert tree(link) == tree(run.ranks(1))
    push(run.dense(2), remote)
    pull(remote, link, mode="aside")
    assert tree(link) == tree(run.ranks(2))


def test_another_layout_of_what_is_there_is_not_believed(run: Run, remote: Path) -> None:
    """A record that was made through one layout does not let a pull through another one be content."""
    receiver = run.receiver()
    pull(remote, receiver, layout=run.layout)
    layout = make_layout()
    swapped = {path: _swapped(tensors) for path, tensors in layout.shards.items()}
    other = write_layout(run.folder, replace(layout, shards=swapped))
    with pytest.raises(WrongBaseError, match="is none of the versions 1 to 2") as caught:
        pull(remote, receiver, layout=other)
    assert "dcr pull --repair brings it to a version" in str(caught.value.hint)
    assert pull(remote, receiver, layout=write_layout(run.folder)).already


@pytest.mark.parametrize("mode", MODES)
def test_a_pull_stopped_at_every_step(place: Path, mode: str) -> None:
    run = make_run(place)
    push(run.dense(0), place / "remote")
    push(run.dense(1), place / "remote")
    for number in steps(4):
        receiver = run.receiver(f"receiver-{number}")
        if stopped_at(number, partial(pull, place / "remote", receiver, mode=mode, jobs=1, layout=run.layout)):
            break
        state_of(run, receiver)
        pull(place / "remote", receiver, mode=mode, jobs=1, layout=run.layout)
        assert tree(receiver) == tree(run.ranks(1))
        shutil.rmtree(receiver)
    assert number > 20
