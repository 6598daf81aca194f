"""Parts: what ranks that do not talk to each other publish together is what one push would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import main
from dcr_cli.cli.ranks import rank_of
from dcr_cli.commit import commit
from dcr_cli.errors import ConflictError, DamagedError, NotFoundError, UsageError, WrongBaseError
from dcr_cli.publisher.shares import cut
from dcr_cli.push import push
from dcr_cli.push_part import PartResult, Rank
from dcr_cli.store.backend import Backend
from part_ranks import all_ranks, one_rank, results
from published import build_all, commits, version_folder
from receivers import fresh_copy, tree, write_rich_pair
from store_wrappers import Allows, KillsAtCall, wrapping
from strategies import TensorData, tensor_of, with_changes, write_checkpoint, write_halves, write_tiny_steps


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 4)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def large_pair(folder: Path) -> tuple[Path, Path]:
    """A tensor larger than all others together, small ones, one that comes, one that goes, one of another dtype."""
    large = tensor_of("BF16", (1024, 1024))
    base: dict[str, TensorData] = {
        "a": tensor_of("BF16", (3,)),
        "large": large,
        "old": tensor_of("F32", (40, 3)),
        "turned": tensor_of("F32", (6, 100)),
        "x": tensor_of("I8", (100,)),
        "y": tensor_of("F32", ()),
        "z": tensor_of("F4", (6, 4)),
    }
    target = base | {
        "large": with_changes(large, range(5, 1 << 20, 1001)),
        "new": tensor_of("F16", (50, 7)),
        "turned": ("F32", (100, 6), base["turned"][2]),
        "x": tensor_of("U8", (100,)),
        "y": with_changes(base["y"], [0]),
        "z": with_changes(base["z"], [1, 3]),
    }
    del target["old"]
    return (
        write_checkpoint(folder / "pair/base", base, sidecars={"config.json": b"{}", "gone.txt": b"1"}),
        write_checkpoint(folder / "pair/target", target, sidecars={"config.json": b"{ }", "new.txt": b""}),
    )


# What is published


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_make_the_steps(steps: list[Path], remote: Path, tmp_path: Path, count: int) -> None:
    push(steps[0], remote)
    for number, step in enumerate(steps[1:], 2):
        found = results(all_ranks(step, remote, count))
        assert {(each.version, each.kind, each.id) for each in found} == {(number, "delta", commits(remote)[-1]["id"])}
        assert found[0].changed_elements == 5 and found[0].changed_tensors == 1
        assert len({each.target for each in found}) == 1
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]
    assert push(steps[3], remote).kind == "same"


@pytest.mark.parametrize("encoding", ["auto", "gap", "whole"])
def test_a_giant_tensor_is_shared(tmp_path: Path, remote: Path, encoding: str) -> None:
    start, end = large_pair(tmp_path)
    push(start, remote)
    found = results(all_ranks(end, remote, 5, encoding=encoding))
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)
    other = push(end, tmp_path / "other", no_delta=True)
    assert found[0].target == other.target
    assert min(each.uploaded_bytes for each in found) * 5 > found[0].delta_bytes / 4  # type: ignore[operator]


def test_all_kinds_of_changes(tmp_path: Path, remote: Path) -> None:
    start, end = write_rich_pair(tmp_path)
    push(start, remote)
    results(all_ranks(end, remote, 3))
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_shares_cover_everything_once(tmp_path: Path) -> None:
    start, end = map(open_checkpoint, large_pair(tmp_path))
    total = sum(tensor.bytes for tensor in end.tensors)
    for count in (1, 2, 3, 7, 64, 2000):
        shares = cut(start, end, count)
        assert len(shares) == count
        for side in (start, end):
            covered: dict[str, list[tuple[int, int]]] = {}
            for share in shares:
                for each in share:
                    if (each.base if side is start else each.target) is not None:
                        covered.setdefault(each.tensor.name, []).append((each.start, each.elements))
            assert covered.keys() == side.by_name.keys()
            for name, spans in covered.items():
                assert [begin for begin, _ in spans] == [sum(size for _, size in spans[:n]) for n in range(len(spans))]
                assert sum(size for _, size in spans) == side.by_name[name].elements
        if count <= 7:
            sizes = [sum(each.elements * each.tensor.dtype.width for each in share) for share in shares]
            assert max(sizes) < 1.1 * total / count


def test_payloads_have_no_gap(tmp_path: Path, remote: Path) -> None:
    """The last tensor alone changes, so that ranks before the last have nothing to send."""
    base = {f"t{number}": tensor_of("BF16", (64, 64), number) for number in range(4)}
    start = write_checkpoint(tmp_path / "base", base)
    end = write_checkpoint(tmp_path / "target", base | {"t3": with_changes(base["t3"], [9])})
    push(start, remote, baseline=tmp_path / "baseline")
    (baseline := tmp_path / ".dcr-baseline").mkdir()
    shutil.move(tmp_path / "baseline", baseline / commits(remote)[0]["history"])
    results(all_ranks(end, remote, 4))
    document = commits(remote)[1]
    names = sorted(path.name for path in (version_folder(remote, document) / "payloads").iterdir())
    assert names == [f"{number:06d}.safetensors" for number in range(4)]
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_the_same_again_is_nothing(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    found = results(all_ranks(steps[0], remote, 3))
    assert {(each.kind, each.version) for each in found} == {("same", 1)}
    assert len(commits(remote)) == 1


def test_each_rank_has_its_own_baseline(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "own-0")
    shutil.copytree(tmp_path / "own-0", tmp_path / "own-1")
    for step in steps[1:]:
        outcomes = all_ranks(step, remote, 2, own=lambda number: {"baseline": f"{tmp_path}/own-{number}"})
        results(outcomes)
        assert tree(tmp_path / "own-0") == tree(tmp_path / "own-1") == tree(step)
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]


def test_nobody_waits(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    for number in (2, 1):
        found = one_rank(steps[1], remote, Rank(number, 3), wait=False)
        assert isinstance(found, PartResult) and (found.kind, found.target) == ("part", None)
    assert isinstance(one_rank(steps[1], remote, Rank(0, 3)), PartResult)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


def test_prepared(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    found = results(all_ranks(steps[1], remote, 2, prepare=True))
    assert {each.kind for each in found} == {"prepared"} and len(commits(remote)) == 1
    commit(remote)
    results(all_ranks(steps[2], remote, 2))
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_prepared_and_given_up(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    """Its ranks agree on the place by the attempt, so another one has to be named."""
    push(steps[0], remote)
    results(all_ranks(steps[1], remote, 2, prepare=True))
    assert not commit(remote, abort=True).committed
    for prepare in (True, False):
        outcome = one_rank(steps[1], remote, Rank(0, 2), prepare=prepare)
        assert isinstance(outcome, ConflictError) and "given up" in str(outcome) and "--attempt" in str(outcome.hint)
    results(all_ranks(steps[1], remote, 2, "again"))
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:2]]


def test_only_signed_versions_are_followed(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    trusting: dict[str, Any] = {"sign_key": keys[0], "trusted_keys": [str(keys[0].with_suffix(".pub"))]}
    push(steps[0], remote, sign_key=keys[0])
    results(all_ranks(steps[1], remote, 2, **trusting))
    push(steps[2], remote)
    outcome = one_rank(steps[3], remote, Rank(0, 1), **trusting)
    assert isinstance(outcome, WrongBaseError) and "signed" in str(outcome) and len(commits(remote)) == 3


# The command


@pytest.mark.parametrize(
    ("part", "attempt", "environment", "expected"),
    [
        ("3/8", None, {}, (3, 8, "0")),
        ("auto", None, {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "9", "SLURM_NTASKS": "16"}, (1, 2, "0")),
        ("auto", "x", {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}, (9, 16, "x")),
        ("0/1", None, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, (0, 1, "7/2/0")),
        ("0/1", None, {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "3"}, (0, 1, "r/3")),
    ],
)
def test_which_part_it_is(
    part: str, attempt: str | None, environment: dict[str, str], expected: tuple[int, int, str]
) -> None:
    assert rank_of(part, attempt, environment) == expected


@pytest.mark.parametrize(("part", "environment"), [("auto", {"RANK": "1"}), ("1", {}), ("1/2/3", {}), ("a/b", {})])
def test_no_part_at_all(part: str, environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="--part"):
        rank_of(part, None, environment)


def test_the_command(
    steps: list[Path], remote: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(steps[0], remote)
    arguments = ["push", str(steps[1]), str(remote)]
    assert main([*arguments, "--part", "1/2", "--no-wait", "--attempt", "a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["rank"], found["version"]) == ("part", 1, 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*arguments, "--part", "auto", "--attempt", "a"]) == 0
    assert "published: version 2" in capsys.readouterr().out
    assert main([*arguments, "--part", "auto", "--attempt", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recovered"] is True
    assert main([*arguments, "--part", "0/2", "--no-delta"]) == 2
    assert main([*arguments, "--no-wait"]) == 2


def test_the_rights_that_a_part_needs(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    get, put = ["dcr.json", "commits/*", "versions/*"], ["versions/*"]
    with wrapping(lambda backend: Allows(backend, get=get, put=put)):
        assert isinstance(one_rank(steps[1], remote, Rank(1, 2), wait=False), PartResult)
    with wrapping(lambda backend: Allows(backend, get=get, put=[*put, "next.json"], create=[*put, "commits/*"])):
        assert isinstance(one_rank(steps[1], remote, Rank(0, 2)), PartResult)


# What goes wrong


def test_a_rank_that_is_missing(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    first = [one_rank(steps[1], remote, Rank(number, 3), timeout_seconds=0.0) for number in (2, 0)]
    assert all(isinstance(outcome, ConflictError) for outcome in first)
    assert "not those of ranks 1" in str(first[1])
    assert len(commits(remote)) == 1
    # The same attempt: parts that are complete are not sent again.
    found = results(all_ranks(steps[1], remote, 3))
    assert [each.recovered for each in found] == [True, False, True]
    assert found[2].uploaded_bytes == 0
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


def test_a_new_attempt(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    one_rank(steps[1], remote, Rank(0, 2, "a"), timeout_seconds=0.0)
    one_rank(steps[1], remote, Rank(1, 2, "b"), timeout_seconds=0.0)
    assert isinstance(one_rank(steps[1], remote, Rank(0, 2, "c"), timeout_seconds=0.0), ConflictError)
    assert len(commits(remote)) == 1
    found = results(all_ranks(steps[1], remote, 2, "d"))
    assert not any(each.recovered for each in found)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


def test_another_checkpoint_is_another_attempt(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    one_rank(steps[2], remote, Rank(1, 2), timeout_seconds=0.0)
    assert isinstance(one_rank(steps[1], remote, Rank(0, 2), timeout_seconds=0.0), ConflictError)
    results(all_ranks(steps[1], remote, 2))
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


def test_a_baseline_that_is_another(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    baseline = next((steps[0].parent / ".dcr-baseline").iterdir())
    shard = next(baseline.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert isinstance(one_rank(steps[1], remote, Rank(1, 2), timeout_seconds=0.0), ConflictError)
    outcome = one_rank(steps[1], remote, Rank(0, 2))
    assert isinstance(outcome, WrongBaseError) and "not at version 1" in str(outcome)
    assert len(commits(remote)) == 1


def test_a_baseline_that_is_moved_meanwhile(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    position = next((steps[0].parent / ".dcr-baseline").glob("*/.dcr/remote.json"))
    document = json.loads(position.read_text())

    def move(stage: str, done: int, total: int) -> None:
        position.write_text(json.dumps(document | {"commit": "blake3:" + "0" * 64}))

    outcome = one_rank(steps[1], remote, Rank(1, 2), progress=move)
    assert isinstance(outcome, ConflictError) and "was moved" in str(outcome)
    assert not list(remote.glob("versions/*/parts/*"))


def test_a_checkpoint_that_changes_meanwhile(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)

    def touch(stage: str, done: int, total: int) -> None:
        (steps[1] / "config.json").write_text('{"changed": 1}')

    outcome = one_rank(steps[1], remote, Rank(1, 2), progress=touch)
    assert isinstance(outcome, ConflictError) and "changed while reading" in str(outcome)
    assert not list(remote.glob("versions/*/parts/*"))


def test_a_part_that_was_changed(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    one_rank(steps[1], remote, Rank(1, 2), wait=False)
    (table,) = remote.glob("versions/*/parts/00001.zst")
    data = bytearray(table.read_bytes())
    data[-1] ^= 1
    table.write_bytes(data)
    assert isinstance(one_rank(steps[1], remote, Rank(0, 2)), DamagedError)
    (document,) = remote.glob("versions/*/parts/00001.json")
    document.write_text(document.read_text().replace('"ranks":2', '"ranks":3'))
    outcome = one_rank(steps[1], remote, Rank(0, 2))
    assert isinstance(outcome, DamagedError) and "its ranks is another" in str(outcome)
    assert len(commits(remote)) == 1


def test_payloads_that_are_gone(tmp_path: Path, remote: Path) -> None:
    """They are made again by the rank whose they are; until then there is no version."""
    start, end = write_halves(tmp_path)
    push(start, remote)
    for rank in (0, 1):
        one_rank(end, remote, Rank(rank, 2), timeout_seconds=0.0)
    payloads = {rank: next(remote.glob(f"versions/*/payloads/{rank:06d}.safetensors")) for rank in (0, 1)}
    before = {rank: payload.read_bytes() for rank, payload in payloads.items()}
    payloads[0].unlink()
    payloads[1].write_bytes(b"short")
    outcome = one_rank(end, remote, Rank(0, 2), timeout_seconds=0.0)
    assert isinstance(outcome, ConflictError) and "not those of ranks 1" in str(outcome)
    assert len(commits(remote)) == 1 and payloads[0].read_bytes() == before[0]
    assert [each.recovered for each in results(all_ranks(end, remote, 2))] == [True, False]
    assert payloads[1].read_bytes() == before[1]
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_a_part_that_is_made_otherwise(tmp_path: Path, remote: Path) -> None:
    """A document that is there stands for one table, and that for the bytes of its payloads."""
    start, end = write_halves(tmp_path)
    push(start, remote)
    one_rank(end, remote, Rank(1, 2), wait=False)
    (payload,) = remote.glob("versions/*/payloads/*")
    payload.write_bytes(b"")
    before = tree(remote)
    outcome = one_rank(end, remote, Rank(1, 2), wait=False, encoding="whole")
    assert isinstance(outcome, ConflictError) and "--attempt" in str(outcome.hint)
    assert tree(remote) == before
    results(all_ranks(end, remote, 2, "another", encoding="whole"))
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_only_parts_signed_by_the_same_key_count(steps: list[Path], remote: Path, keys: tuple[Path, Path]) -> None:
    push(steps[0], remote)
    one_rank(steps[1], remote, Rank(1, 2), wait=False, sign_key=keys[1])
    outcome = one_rank(steps[1], remote, Rank(0, 2), sign_key=keys[0])
    assert isinstance(outcome, WrongBaseError) and "not signed" in str(outcome)
    results(all_ranks(steps[1], remote, 2, "again", sign_key=keys[0]))
    assert commits(remote)[1]["version"] == 2


def test_what_cannot_be_asked_for(steps: list[Path], remote: Path) -> None:
    assert isinstance(one_rank(steps[0], remote, Rank(0, 1)), NotFoundError)
    push(steps[0], remote, baseline=remote.parent / "elsewhere")
    assert isinstance(one_rank(steps[1], remote, Rank(1, 2)), WrongBaseError)
    for rank in (Rank(2, 2), Rank(-1, 2), Rank(0, 0), Rank(0, 1, ""), Rank(0, 1, "a\n")):
        assert isinstance(one_rank(steps[1], remote, rank), UsageError)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_is_killed_at_any_call(steps: list[Path], remote: Path, tmp_path: Path, killed: int) -> None:
    """By turns before and after a call, and gone on with as the same attempt and as a new one."""
    push(steps[0], remote)
    places = {"remote": remote, "baselines": steps[0].parent / ".dcr-baseline"}
    kept = {name: fresh_copy(path, tmp_path / f"kept-{name}") for name, path in places.items()}
    call = 0
    while True:
        for name, path in places.items():
            fresh_copy(kept[name], path)
        if killed == 0:
            one_rank(steps[1], remote, Rank(1, 2, "first"), wait=False)
        killing: list[KillsAtCall] = []

        def kill(backend: Backend, call: int = call, killing: list[KillsAtCall] = killing) -> Backend:
            killing.append(KillsAtCall(backend, call, when="after" if call % 2 else "before"))
            return killing[0]

        with wrapping(kill):
            one_rank(steps[1], remote, Rank(killed, 2, "first"), wait=False)
        if killed == 1:
            one_rank(steps[1], remote, Rank(0, 2, "first"), timeout_seconds=0.0)
        is_done, is_new = len(commits(remote)) == 2, call // 2 % 2 == 1
        found = all_ranks(steps[1], remote, 2, "second" if is_new else "first")
        assert {each.kind for each in results(found)} == {"same" if is_done and is_new else "delta"}
        assert len(commits(remote)) == 2
        assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])
        if killing[0].count <= call:
            break
        call += 1
    assert call > 5
