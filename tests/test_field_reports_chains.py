"""What users of delta sync have reported, as scenarios: versions, chains, and what a checkpoint is made of."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.diff import diff
from dcr_cli.durable import open_folder
from dcr_cli.errors import UsageError, WrongBaseError
from dcr_cli.fetch.position import read_position
from dcr_cli.prune import prune
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.store.backend import PermanentError
from dcr_cli.verify import verify
from faults import killed_at, watching
from published import anchor_folder, build_all, commits
from receivers import fresh_copy, state_of, tree
from store_wrappers import FlipsAByte, Wrapped, interrupting, recording, wrapping
from strategies import Tensors, byte_count, tensor_of, tiny_tensors, with_changes, write_checkpoint, write_tiny_steps


def publish(folder: Path, states: Sequence[Tensors], *, shards: int = 2) -> list[Path]:
    """Publish these states as the versions of folder/remote: the checkpoints."""
    found = []
    for number, state in enumerate(states, 1):
        found.append(write_checkpoint(folder / f"v{number}", state, shards=shards))
        push(found[-1], folder / "remote", baseline=folder / "baseline", jobs=1)
    return found


def version_of(root: Path) -> int | None:
    with open_folder(root / ".dcr") as home:
        position = read_position(home)
    return position.version if position is not None else None


# Stopped, failed, and run again


@pytest.mark.parametrize(("mode", "first"), [("in-place", 0), ("replace", 5)])
def test_a_killed_pull_is_finished_by_the_next_and_a_third_does_nothing(tmp_path: Path, mode: str, first: int) -> None:
    """SIGKILL at a spread of the steps of a pull, then two more pulls: never a tensor patched twice, no full copy."""
    steps = write_tiny_steps(tmp_path, 2)
    for step in steps:
        push(step, tmp_path / "remote", jobs=1)
    start = tmp_path / "start"
    pull(tmp_path / "remote", start, version=1, jobs=1)
    seen = set()
    number, is_done = first, False
    while not is_done:
        root = fresh_copy(start, tmp_path / "r")
        is_done = killed_at(number, lambda root=root: pull(tmp_path / "remote", root, mode=mode, jobs=1))  # type: ignore[misc]
        seen.add(state := state_of(root, *steps))
        if state == "marked":
            assert main(["verify", str(root)]) == 4
        with recording() as calls:
            pull(tmp_path / "remote", root, mode=mode, jobs=1)
        assert tree(root) == tree(steps[1])
        assert not [key for _, key in calls if key.startswith("anchors/")]
        assert pull(tmp_path / "remote", root, mode=mode, jobs=1).already
        number += 14
    assert seen == {"base", "marked", "target"}


def test_a_push_that_failed_at_any_write_is_no_version_and_loses_no_change(tmp_path: Path) -> None:
    """The store fails for good from the k-th call on; the next checkpoint is then compared with the newest commit."""
    steps = write_tiny_steps(tmp_path, 3)
    push(steps[0], tmp_path / "kept", baseline=tmp_path / "kept-baseline", jobs=1)
    number = 0
    while True:
        remote = fresh_copy(tmp_path / "kept", tmp_path / "remote")
        baseline = fresh_copy(tmp_path / "kept-baseline", tmp_path / "baseline")

        class Fails(Wrapped):
            count = 0

            def called(self, name: str, key: str, last: int = number) -> None:
                Fails.count += 1
                if Fails.count > last:
                    raise PermanentError("status 500")

        with wrapping(Fails):
            code = main(["push", str(steps[1]), str(remote), "--baseline", str(baseline)])
        assert (code, len(commits(remote))) in ((7, 1), (0, 2))
        if code == 7:
            assert version_of(baseline) == 1
        last = push(steps[2], remote, baseline=baseline, jobs=1)
        assert last.base_version == len(commits(remote)) - 1
        assert build_all(remote, tmp_path / "scratch")[-1] == tree(steps[2])
        if code == 0:
            return
        number += 2


def test_what_failed_is_told_alike_by_exit_code_json_and_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A payload comes with a wrong byte: the checkpoint says version 1, wherever it is asked."""
    steps = write_tiny_steps(tmp_path, 2)
    for step in steps:
        push(step, tmp_path / "remote", jobs=1)
    root = tmp_path / "r"
    pull(tmp_path / "remote", root, version=1)
    before = tree(root)
    with wrapping(lambda backend: FlipsAByte(backend, "versions/*/payloads/*", 200)):
        assert main(["pull", str(tmp_path / "remote"), str(root), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["error"]["class"] == "DamagedError"
    assert main(["verify", str(root), "--remote", str(tmp_path / "remote"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"].startswith("version 1 of ")
    assert tree(root) == before and version_of(root) == 1


def test_a_reader_that_polls_finds_whole_versions_alone(tmp_path: Path) -> None:
    """Before every call of a push, somebody pulls, into what they have and into nothing."""
    steps = write_tiny_steps(tmp_path, 2)
    push(steps[0], tmp_path / "remote", jobs=1)
    seen: list[int] = []
    is_polling = False

    class Polls(Wrapped):
        def called(self, name: str, key: str) -> None:
            nonlocal is_polling
            if is_polling or name in ("read", "status"):
                return
            is_polling = True
            shutil.rmtree(tmp_path / "new", ignore_errors=True)
            for root in (tmp_path / "r", tmp_path / "new"):
                seen.append(pull(tmp_path / "remote", root, jobs=1).version)
                assert tree(root) == tree(steps[seen[-1] - 1])
            is_polling = False

    with wrapping(Polls):
        push(steps[1], tmp_path / "remote", jobs=1)
    assert set(seen) == {1}
    assert pull(tmp_path / "remote", tmp_path / "r").version == 2


# Chains


def test_a_pull_of_one_version_fetches_and_writes_no_more_than_it_changes(tmp_path: Path) -> None:
    """A receiver at version 5 of a long chain pulls version 6: only its objects, only what changed is written."""
    state = {f"l.{number}": tensor_of("BF16", (256, 256), number) for number in range(4)}
    states = [state := state | {"l.1": with_changes(state["l.1"], [number, 999 * number])} for number in range(6)]
    publish(tmp_path, states[:5])
    root = tmp_path / "r"
    pull(tmp_path / "remote", root)
    target = write_checkpoint(tmp_path / "v6", states[5], shards=2)
    push(target, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    written: list[str] = []

    def see(kind: str, path: str, other: str) -> None:
        if kind == "write" and path.startswith(f"{root}/model"):
            written.append(path)

    with recording() as calls, watching(see):
        result = pull(tmp_path / "remote", root, mode="in-place", jobs=1)
    keys = {key for _, key in calls if key.startswith(("versions/", "anchors/"))}
    assert keys and all(key.startswith("versions/0000000006-") for key in keys)
    assert result.downloaded_bytes < byte_count("BF16", (256, 256)) // 4
    assert 1 <= len(written) <= 4
    assert tree(root) == tree(target)


def test_an_anchor_has_all_tensors_though_one_changed(tmp_path: Path) -> None:
    """Versions 2 to 4 change one tensor of four; a newcomer gets version 4 from its anchor, with no holes."""
    state, _ = tiny_tensors()
    states = [state | {"layers.1.weight": with_changes(state["layers.1.weight"], [n])} for n in range(4)]
    found = publish(tmp_path, states[:3])
    found.append(write_checkpoint(tmp_path / "v4", states[3], shards=2))
    result = push(found[3], tmp_path / "remote", baseline=tmp_path / "baseline", anchor_every=3)
    assert result.anchor == 4
    assert tree(anchor_folder(tmp_path / "remote", commits(tmp_path / "remote")[3])) == tree(found[3])
    new = pull(tmp_path / "remote", tmp_path / "new")
    assert new.way is not None and new.way.anchor == 4
    assert tree(tmp_path / "new") == tree(found[3])


@pytest.mark.parametrize("own", [None, 3])
def test_a_prune_beside_a_pull_leaves_whole_versions(tmp_path: Path, own: int | None) -> None:
    """A prune down to version 6 runs before the k-th call of a pull that was reading version 5, or the newest."""
    steps = write_tiny_steps(tmp_path, 6)
    for step in steps[:5]:
        push(step, tmp_path / "kept", baseline=tmp_path / "baseline", jobs=1)
    push(steps[5], tmp_path / "kept", baseline=tmp_path / "baseline", anchor_every=1, jobs=1)
    remote, root = tmp_path / "remote", tmp_path / "r"
    whole = [tree(step) for step in steps]
    for wanted in (5, None):
        for number in range(1, 24, 6):
            fresh_copy(tmp_path / "kept", remote)
            shutil.rmtree(root, ignore_errors=True)
            if own is not None:
                pull(remote, root, version=own, jobs=1)
            with interrupting(number, lambda: prune(remote, keep=1, keep_within=0, lease=0)):
                code = main(["pull", str(remote), str(root), *(["--version", "5"] if wanted else [])])
            found = tree(root) if root.exists() else {}
            if code == 0:
                assert found == whole[(wanted or 6) - 1]
            else:
                assert wanted == 5 and code in (3, 5)
                assert found in ({}, whole[0]) if own is None else found == whole[own - 1]


# What is at an address


def test_another_run_cannot_go_on_in_a_history_that_is_not_its_own(tmp_path: Path) -> None:
    """Two training runs are given one address: the second is refused, and what the first published stays."""
    steps = write_tiny_steps(tmp_path, 3)
    for step in steps:
        push(step, tmp_path / "remote", baseline=tmp_path / "first", jobs=1)
    before = tree(tmp_path / "remote")
    others = {f"layers.{number}.weight": tensor_of("BF16", (64, 64), 50 + number) for number in range(4)}
    other = write_checkpoint(tmp_path / "other/step", others, shards=2)
    with pytest.raises(WrongBaseError, match="holds history") as caught:
        push(other, tmp_path / "remote")
    assert "use another address" in (caught.value.hint or "")
    assert tree(tmp_path / "remote") == before
    push(other, tmp_path / "its own", baseline=tmp_path / "second")
    with pytest.raises(WrongBaseError, match="follows history"):
        push(other, tmp_path / "remote", baseline=tmp_path / "second")
    assert tree(tmp_path / "remote") == before


def test_remotes_baselines_and_checkpoints_lie_apart(tmp_path: Path) -> None:
    """A push into a folder of the checkpoint itself, or a baseline there, would change what it publishes."""
    steps = write_tiny_steps(tmp_path, 1)
    before = tree(steps[0])
    for remote, baseline in (
        (steps[0] / "remote", tmp_path / "baseline"),
        (steps[0], tmp_path / "baseline"),
        (tmp_path / "remote", steps[0] / "baseline"),
        (tmp_path / "remote", tmp_path / "remote/baseline"),
        (tmp_path / "baseline/remote", tmp_path / "baseline"),
    ):
        with pytest.raises(UsageError, match="cannot lie inside"):
            push(steps[0], remote, baseline=baseline)
    assert tree(steps[0]) == before and not (tmp_path / "remote").exists()
    push(steps[0], tmp_path / "remote")
    for root in (tmp_path / "remote", tmp_path / "remote/r", tmp_path):
        with pytest.raises(UsageError, match="cannot lie inside"):
            pull(tmp_path / "remote", root)


# What a checkpoint is made of


def test_sidecars_reach_new_and_old_receivers_alike(tmp_path: Path) -> None:
    """A version changes an element and a config, and adds a file; another changes only a file."""
    steps = write_tiny_steps(tmp_path, 2)
    push(steps[0], tmp_path / "remote", jobs=1)
    pull(tmp_path / "remote", tmp_path / "old")
    (steps[1] / "config.json").write_text('{"tie_word_embeddings": true}')
    (steps[1] / "chat_template.json").write_text("{}")
    for number in (2, 3):
        assert push(steps[1], tmp_path / "remote", jobs=1).version == number
        pull(tmp_path / "remote", tmp_path / "old")
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        pull(tmp_path / "remote", tmp_path / "new")
        assert tree(tmp_path / "old") == tree(tmp_path / "new") == tree(steps[1])
        (steps[1] / "chat_template.json").write_text('{"new": 1}')


def test_other_shapes_and_dtypes_of_equal_bytes_are_replaced(tmp_path: Path) -> None:
    """A padded embedding, the same bytes in another shape, the same bytes of another dtype: header and all."""
    data = tensor_of("BF16", (100, 8))[2] + bytes(64)
    shapes = [("BF16", (100, 8)), ("BF16", (104, 8)), ("BF16", (8, 104)), ("F16", (8, 104))]
    other = tensor_of("BF16", (8, 8))
    found = publish(
        tmp_path, [{"embed": (*kind, data[: byte_count(*kind)]), "other": other} for kind in shapes], shards=1
    )
    for number, checkpoint in enumerate(found, 1):
        pull(tmp_path / "remote", tmp_path / "r", version=number)
        assert tree(tmp_path / "r") == tree(checkpoint)
        if number > 1:
            result = diff(found[number - 2], checkpoint)
            assert (result.replaced, result.changed_elements) == (("embed",), 0)


def test_a_tied_tensor_comes_and_goes_through_a_remote(tmp_path: Path) -> None:
    """The head is saved, left out, and saved again beside the embedding that has its bytes: next to nothing is sent."""
    embed = tensor_of("BF16", (512, 64))
    states = [{"embed": embed, "head": embed}, {"embed": embed}, {"embed": embed, "head": embed}]
    found = publish(tmp_path, states, shards=1)
    for number, checkpoint in enumerate(found, 1):
        pull(tmp_path / "remote", tmp_path / "r", version=number)
        assert tree(tmp_path / "r") == tree(checkpoint)
    payloads = sum(path.stat().st_size for path in (tmp_path / "remote/versions").rglob("payloads/*"))
    assert payloads < len(embed[2]) // 10


def test_another_number_of_shards_costs_what_changed(tmp_path: Path) -> None:
    """Three shards become two of other names, two elements change: the old shards go, no tensor is sent whole."""
    state, _ = tiny_tensors()
    first = write_checkpoint(tmp_path / "a", state, shards=3)
    changed = state | {"layers.0.weight": with_changes(state["layers.0.weight"], [3, 9])}
    second = write_checkpoint(tmp_path / "b", changed, shards=2)
    push(first, tmp_path / "remote", baseline=tmp_path / "baseline")
    for mode in ("replace", "in-place"):
        pull(tmp_path / "remote", tmp_path / mode)
    push(second, tmp_path / "remote", baseline=tmp_path / "baseline")
    for mode in ("replace", "in-place"):
        result = pull(tmp_path / "remote", tmp_path / mode, mode=mode, jobs=1)
        assert tree(tmp_path / mode) == tree(second)
        assert result.way is not None and result.way.bytes < 8192
        assert verify(tmp_path / mode, against=second).matches


def test_a_byte_that_changed_without_its_time_is_found(tmp_path: Path) -> None:
    """One byte is changed and the file's time put back: verify says no, push sends it, size and time say nothing."""
    steps = write_tiny_steps(tmp_path, 1)
    push(steps[0], tmp_path / "remote")
    pull(tmp_path / "remote", tmp_path / "r")
    for root in (steps[0], tmp_path / "r"):
        shard = next(root.glob("*.safetensors"))
        status, data = shard.stat(), bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert main(["verify", str(tmp_path / "r")]) == 1
    assert main(["verify", str(tmp_path / "r"), "--remote", str(tmp_path / "remote")]) == 1
    assert push(steps[0], tmp_path / "remote").changed_elements == 1
