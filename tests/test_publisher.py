"""Publisher: what a trainer adds is what a push of the same checkpoint would publish, however it comes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.commit import commit
from dcr_cli.content import Workers, read_state
from dcr_cli.errors import (
    ConflictError,
    LocalError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    WrongBaseError,
)
from dcr_cli.publish import Publisher
from dcr_cli.publisher import moving
from dcr_cli.publisher.bases import MemoryBase
from dcr_cli.push import PushResult, push
from dcr_cli.store.backend import Backend
from dcr_cli.verify_remote import verify_remote
from faults import StoppedError
from published import build_all, commits, version_folder
from receivers import fresh_copy, tree
from store_wrappers import KillsAtCall, Wrapped, wrapping
from strategies import TensorData, every_dtype, tensor_of, with_changes, write_checkpoint, write_tiny_steps

Tensors = Mapping[str, TensorData]
_CONFIG = {"config.json": b"{}\n"}


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 4)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "baseline"


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    opened = open_checkpoint(checkpoint)
    found = {}
    with opened.reader() as reader:
        for tensor in opened.tensors:
            data = bytearray(tensor.bytes)
            reader.read_into(tensor, 0, data)
            found[tensor.name] = bytes(data)
    return found


def arrays_of(checkpoint: Path) -> dict[str, NDArray[np.uint8]]:
    return {name: np.frombuffer(bytearray(data), np.uint8) for name, data in tensors_of(checkpoint).items()}


def state_of(checkpoint: Path) -> State:
    opened = open_checkpoint(checkpoint)
    with Workers(1, "test", None) as workers, opened.reader() as reader:
        return read_state(workers, opened, reader)[0]


def add_all(publisher: Publisher, checkpoint: Path) -> None:
    """Add all that a step is."""
    for name, data in tensors_of(checkpoint).items():
        publisher.add(name, data)
    publisher.add_file("step.txt", (checkpoint / "step.txt").read_bytes())


def publish(publisher: Publisher, checkpoint: Path) -> PushResult:
    """Publish a step."""
    publisher.begin()
    add_all(publisher, checkpoint)
    return publisher.commit()


def pair(folder: Path, base: Tensors, target: Tensors) -> tuple[Path, Path]:
    return (
        write_checkpoint(folder / "base", dict(base), sidecars=_CONFIG),
        write_checkpoint(folder / "target", dict(target), sidecars=_CONFIG),
    )


# What is published


def test_versions_build_the_steps(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place, jobs=2) as publisher:
        results = [publish(publisher, step) for step in steps[1:]]
    assert [(r.version, r.kind, r.base_version, r.changed_elements) for r in results] == [
        (2, "delta", 1, 5),
        (3, "delta", 2, 5),
        (4, "delta", 3, 5),
    ]
    assert [result.target for result in results] == [state_of(step) for step in steps[1:]]
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]
    assert tree(place) == tree(steps[-1])


def test_it_takes_what_a_push_takes(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place) as publisher:
        ours = publish(publisher, steps[1])
    push(steps[0], tmp_path / "other")
    theirs = push(steps[1], tmp_path / "other")
    assert (ours.target, ours.base) == (theirs.target, theirs.base)
    assert (ours.changed_elements, ours.changed_tensors) == (theirs.changed_elements, theirs.changed_tensors)
    folder = version_folder(remote, commits(remote)[1])
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert ours.delta_bytes == taken + (remote / "commits/0000000002.json").stat().st_size == ours.uploaded_bytes


def test_a_push_goes_on_from_it(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place) as publisher:
        publish(publisher, steps[1])
    assert push(steps[2], remote, baseline=place).changed_elements == 5
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps[:3]]


def test_any_order_and_threads(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    given = list(tensors_of(steps[2]).items())
    with Publisher(remote, place, jobs=3) as publisher:
        publisher.begin()
        for first in (1, 0):
            threads = [threading.Thread(target=publisher.add, args=each) for each in reversed(given[first::2])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        publisher.add_file("step.txt", (steps[2] / "step.txt").read_bytes())
        assert publisher.commit().target == state_of(steps[2])
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[2])


def test_what_was_added_may_change_at_once(tmp_path: Path, remote: Path, place: Path) -> None:
    elements = 3 * (1 << 18) + 5
    base = {"few": tensor_of("BF16", (elements,)), "all": tensor_of("F32", (1 << 18,)), "odd": tensor_of("I8", (3,))}
    target = {
        "few": with_changes(base["few"], range(7, elements, 1000)),
        "all": tensor_of("F32", (1 << 18,), 1),
        "odd": with_changes(base["odd"], [2]),
    }
    start, end = pair(tmp_path, base, target)
    push(start, remote, baseline=place)
    for encoding in ("auto", "context", "gap", "whole"):
        with Publisher(remote, place, encoding=encoding, jobs=2) as publisher:
            publisher.begin()
            for name, array in arrays_of(end).items():
                publisher.add(name, array)
                array[:] = 0x55
            assert publisher.commit().target == state_of(end)
        assert tree(place) == tree(end)
        start, end = end, start
    assert [
        built == tree(tmp_path / ("base", "target")[n % 2]) for n, built in enumerate(build_all(remote, tmp_path / "s"))
    ] == [True] * 5


def test_every_dtype_and_shape(tmp_path: Path, remote: Path, place: Path) -> None:
    base: dict[str, TensorData] = every_dtype() | {
        "empty": tensor_of("F32", (0, 3)),
        "scalar": tensor_of("F64", ()),
        "one": tensor_of("BF16", (1,)),
        "same": tensor_of("I32", (40,)),
    }
    target = {n: with_changes(t, [0]) if t[2] and n != "same" else t for n, t in base.items()}
    start, end = pair(tmp_path, base, target)
    push(start, remote, baseline=place)
    with Publisher(remote, place) as publisher:
        publisher.begin()
        for name, data in tensors_of(end).items():
            publisher.add(name, memoryview(data))
        result = publisher.commit()
    assert (result.target, result.changed_tensors) == (state_of(end), len(DTYPES) + 2)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_tied_tensors_are_coded_once(tmp_path: Path, remote: Path, place: Path) -> None:
    tied = tensor_of("BF16", (64, 64))
    base = {"embed": tied, "head": tied, "other": tensor_of("BF16", (64, 64), 1)}
    changed = with_changes(tied, range(0, 4096, 3))
    start, end = pair(tmp_path, base, base | {"embed": changed, "head": changed})
    push(start, remote, baseline=place)
    (place / ".dcr/state.json").unlink()
    taken = []
    for known in (False, True):
        with Publisher(remote, place) as publisher:
            publisher.begin()
            for name, data in tensors_of(end).items():
                publisher.add(name, data)
            taken.append(publisher.commit())
        assert tree(place) == tree(end)
        if not known:
            push(start, remote, baseline=place)
            settle(place)
    assert build_all(remote, tmp_path / "scratch")[1::2] == [tree(end)] * 2
    assert taken[0].target == taken[1].target == state_of(end)
    assert taken[1].delta_bytes < taken[0].delta_bytes


def settle(place: Path) -> None:
    """Have the record count, as it does two seconds after the last change."""

    path = place / ".dcr/state.json"
    document = json.loads(path.read_text())
    document["time_ns"] += 3_000_000_000
    path.write_text(json.dumps(document))


def test_what_is_not_added_stays(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place) as publisher:
        publisher.begin()
        assert publisher.commit().kind == "same"
        publisher.begin()
        publisher.add_file("training.json", b"[1]")
        publisher.remove_file("step.txt")
        result = publisher.commit()
    assert (result.kind, result.changed_tensors) == ("delta", 0)
    expected = tree(steps[0]) | {"training.json": b"[1]"}
    del expected["step.txt"]
    assert build_all(remote, tmp_path / "scratch")[1] == expected == tree(place)


# Forms of tensors


def test_numpy_arrays(tmp_path: Path, remote: Path, place: Path) -> None:
    forms = {"BOOL": bool, "F16": np.float16, "F32": np.float32, "I64": np.int64, "U32": np.uint32, "C64": np.complex64}
    base = {
        name: (name, (4, 6), bytes(byte_count))
        for name, byte_count in ((n, 24 * np.dtype(t).itemsize) for n, t in forms.items())
    }
    start = write_checkpoint(tmp_path / "base", base | {"bf": ("BF16", (4,), bytes(8))})
    push(start, remote, baseline=place)
    with Publisher(remote, place) as publisher:
        publisher.begin()
        for name, kind in forms.items():
            # Neither in one piece nor in this order in memory.
            publisher.add(name, np.arange(48).reshape(6, 8).astype(kind)[:, ::2].T)
        publisher.add("bf", np.arange(4, dtype=np.uint16))
        publisher.commit()
    found = tensors_of(place)
    for name, kind in forms.items():
        assert found[name] == np.ascontiguousarray(np.arange(48).reshape(6, 8).astype(kind)[:, ::2].T).tobytes()
    assert found["bf"] == np.arange(4, dtype=np.uint16).tobytes()


def test_torch_tensors(tmp_path: Path, remote: Path, place: Path) -> None:
    torch = pytest.importorskip("torch")
    forms = {
        "BOOL": torch.bool,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F32": torch.float32,
        "C64": torch.complex64,
        "I8": torch.int8,
    }
    base = {name: (name, (4, 6), bytes(24 * DTYPES[name].width)) for name in forms}
    start = write_checkpoint(tmp_path / "base", base | {"scalar": ("F32", (), bytes(4)), "none": ("F32", (0,), b"")})
    push(start, remote, baseline=place)
    given = {name: torch.arange(24).reshape(6, 4).to(dtype).T for name, dtype in forms.items()}
    given["C64"] = given["C64"].conj()
    given |= {"scalar": torch.nn.Parameter(torch.tensor(2.5)), "none": torch.empty(0)}
    with Publisher(remote, place) as publisher:
        publisher.begin()
        for name, tensor in given.items():
            publisher.add(name, tensor)
        with pytest.raises(UsageError, match="added twice"):
            publisher.add("I8", given["I8"])
        publisher.commit()
    found = tensors_of(place)
    for name in forms:
        expected = given[name].resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found[name] == expected
    assert found["scalar"] == np.float32(2.5).tobytes()


def test_what_is_refused_does_nothing(steps: list[Path], remote: Path, place: Path) -> None:
    push(steps[0], remote, baseline=place)
    name = "layers.1.weight"
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("new", bytes(8), UnsupportedError, "not in the version before"),
        (name, np.zeros((64, 64), np.float16), UnsupportedError, "is of BF16"),
        (name, np.zeros((64, 63), np.uint16), UnsupportedError, "8192 bytes"),
        (name, bytes(8191), UnsupportedError, "8192 bytes"),
        (name, np.zeros((64, 64), ">u2"), UnsupportedError, "order"),
        (name, [1, 2], UsageError, "found list"),
    ]
    with Publisher(remote, place) as publisher:
        with pytest.raises(UsageError, match="no version was begun"):
            publisher.add(name, bytes(8192))
        publisher.begin()
        for tensor, given, error, match in wrong:
            with pytest.raises(error, match=match):
                publisher.add(tensor, given)
        for path in ("model.safetensors", "model.safetensors.index.json", "../x", "a.bin", ".dcr/x"):
            with pytest.raises(UsageError):
                publisher.add_file(path, b"")
        with pytest.raises(UsageError, match="no file"):
            publisher.remove_file("nothing")
        publisher.add(name, tensors_of(steps[0])[name])
        with pytest.raises(UsageError, match="twice"):
            publisher.add(name, tensors_of(steps[0])[name])
        assert publisher.commit().kind == "same"


# Baselines


def test_a_remote_without_versions(remote: Path, place: Path, steps: list[Path]) -> None:
    with Publisher(remote, place) as publisher, pytest.raises(NotFoundError):
        publisher.begin()
    push(steps[0], remote)
    with Publisher(remote, place) as publisher, pytest.raises(WrongBaseError, match="no baseline"):
        publisher.begin()


def test_a_damaged_baseline_is_seen(steps: list[Path], remote: Path, place: Path) -> None:
    push(steps[0], remote, baseline=place)
    shard = sorted(place.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with Publisher(remote, place) as publisher, pytest.raises(WrongBaseError):
        publish(publisher, steps[1])
    assert len(commits(remote)) == 1


def test_memory_is_patched_by_commits(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    memory = arrays_of(steps[0])
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        for step in steps[1:3]:
            assert publish(publisher, step).target == state_of(step)
            assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(step)
    # Where the newest version is a delta, its manifest says what there is.
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        publish(publisher, steps[3])
    assert build_all(remote, tmp_path / "scratch") == [tree(step) for step in steps]


def test_memory_that_changes_much(tmp_path: Path, remote: Path) -> None:
    base = {"a": tensor_of("F32", (1 << 17,)), "b": tensor_of("F32", (1 << 17,)), "c": tensor_of("U8", (9,))}
    new = tensor_of("F32", (1 << 17,), 3)
    start, end = pair(tmp_path, base, base | {"a": new, "b": new, "c": with_changes(base["c"], [8])})
    push(start, remote)
    memory = arrays_of(start)
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        publisher.begin()
        for name, data in tensors_of(end).items():
            publisher.add(name, data)
        assert publisher.commit().target == state_of(end)
    assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(end)
    assert build_all(remote, tmp_path / "scratch")[1] == tree(end)


def test_memory_that_is_elsewhere(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    memory = arrays_of(steps[1])
    with (
        Publisher(remote, memory, home=tmp_path / "home") as publisher,
        pytest.raises(WrongBaseError, match="version 1"),
    ):
        publisher.begin()
    del memory["layers.0.weight"]
    with (
        Publisher(remote, memory, home=tmp_path / "home") as publisher,
        pytest.raises(WrongBaseError, match="layers"),
    ):
        publisher.begin()
    frozen = arrays_of(steps[0])
    frozen["layers.0.weight"].flags.writeable = False
    with Publisher(remote, frozen, home=tmp_path / "home") as publisher, pytest.raises(UsageError, match="written"):
        publisher.begin()
    with pytest.raises(UsageError, match="home"):
        Publisher(remote, memory)


def test_memory_that_somebody_changes(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    memory = arrays_of(steps[0])
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        publisher.begin()
        memory["layers.0.weight"][5] ^= 1
        with pytest.raises(WrongBaseError, match="is not what it was"):
            publisher.add("layers.0.weight", tensors_of(steps[1])["layers.0.weight"])
        with pytest.raises(UsageError, match="went wrong"):
            publisher.commit()
    assert len(commits(remote)) == 1


# Others, and what goes wrong


def test_another_is_faster(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=tmp_path / "theirs")
    memory = arrays_of(steps[0])
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        publisher.begin()
        for name, data in tensors_of(steps[2]).items():
            publisher.add(name, data)
        push(steps[1], remote, baseline=tmp_path / "theirs")
        with pytest.raises(ConflictError, match="taken"):
            publisher.commit()
        assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[0])
        with pytest.raises(WrongBaseError, match="is at version 1, the newest is 2"):
            publisher.begin()
    assert len(commits(remote)) == 2


def test_another_makes_the_same(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    shutil.copytree(place, tmp_path / "theirs")
    memory = arrays_of(steps[0])
    with Publisher(remote, place) as folder, Publisher(remote, memory, home=tmp_path / "home") as publisher:
        for each in (folder, publisher):
            each.begin()
            for name, data in tensors_of(steps[1]).items():
                each.add(name, data)
            each.add_file("step.txt", (steps[1] / "step.txt").read_bytes())
        push(steps[1], remote, baseline=tmp_path / "theirs")
        assert (folder.commit().kind, publisher.commit().kind) == ("same", "same")
    assert tree(place) == tree(steps[1])
    assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[1])


def test_prepared_and_committed(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    memory = arrays_of(steps[0])
    with Publisher(remote, memory, home=tmp_path / "home") as publisher:
        publisher.begin()
        for name, data in tensors_of(steps[1]).items():
            publisher.add(name, data)
        assert publisher.prepare().kind == "prepared"
        assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[0])
        commit(remote)
        assert publisher.begin() == 3
        assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[1])


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("is_committed", [False, True])
def test_what_is_prepared_is_decided_before_the_next(
    steps: list[Path], remote: Path, place: Path, tmp_path: Path, kind: str, is_restarted: bool, is_committed: bool
) -> None:
    push(steps[0], remote, baseline=place)
    memory = arrays_of(steps[0])
    baseline: Any = place if kind == "folder" else memory
    home = None if kind == "folder" else tmp_path / "home"
    with Publisher(remote, baseline, home=home) as publisher:
        publisher.begin()
        add_all(publisher, steps[1])
        assert publisher.prepare().kind == "prepared"
        if not is_restarted:
            end_prepared(publisher, remote, is_committed)
            assert publish(publisher, steps[2]).version == (3 if is_committed else 2)
    if is_restarted:
        with Publisher(remote, baseline, home=home) as publisher:
            end_prepared(publisher, remote, is_committed)
            if kind == "memory" and is_committed:
                # What brings the arrays there was lost with the process.
                with pytest.raises(WrongBaseError, match="is not at version 2") as caught:
                    publisher.begin()
                assert caught.value.hint is not None and "dcr pull" in caught.value.hint
                assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[0])
                return
            assert publish(publisher, steps[2]).version == (3 if is_committed else 2)
    found = {name: array.tobytes() for name, array in memory.items()} if kind == "memory" else tensors_of(place)
    assert found == tensors_of(steps[2])
    expected = [tree(step) for step in (steps if is_committed else [steps[0], steps[2]])[:3]]
    assert build_all(remote, tmp_path / "scratch") == expected


def end_prepared(publisher: Publisher, remote: Path, is_committed: bool) -> None:
    """Have what was prepared committed, or given up; until then nothing can be begun."""
    for _ in range(2):
        with pytest.raises(ConflictError, match="version 2 is prepared") as caught:
            publisher.begin()
        assert caught.value.hint is not None and "dcr commit" in caught.value.hint
    assert commit(remote, abort=not is_committed).committed == is_committed


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_published_but_the_baseline_is_not_moved(
    steps: list[Path], remote: Path, place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object, **options: object) -> None:
        raise LocalError("the baseline", "no space left on device")

    push(steps[0], remote, baseline=place)
    memory = arrays_of(steps[0])
    baseline: Any = place if kind == "folder" else memory
    with Publisher(remote, baseline, home=None if kind == "folder" else tmp_path / "home") as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(moving, "apply_chain", no_room)
            patch.setattr(MemoryBase, "patch", no_room)
            with pytest.raises(LocalError, match="version 2 is published all the same") as caught:
                publish(publisher, steps[1])
            assert caught.value.details == {"committed": True, "version": 2}
        if kind == "folder":
            assert publish(publisher, steps[2]).version == 3
            assert tree(place) == tree(steps[2])
        else:
            with pytest.raises(WrongBaseError, match="is at version 1, the newest is 2"):
                publisher.begin()
    assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])


def test_anchors_now_and_then(steps: list[Path], remote: Path, place: Path, tmp_path: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place, anchor_every=2) as publisher:
        assert [publish(publisher, step).anchor for step in steps[1:]] == [1, 3, 3]
    assert sorted(path.name[:10] for path in remote.glob("anchors/*.json")) == ["0000000001", "0000000003"]
    verify_remote(remote, deep=True)
    with pytest.raises(UsageError, match="from 1 on"):
        Publisher(remote, place, anchor_every=0)
    with pytest.raises(UsageError, match="in host memory"):
        Publisher(remote, arrays_of(steps[0]), home=tmp_path / "home", anchor_every=2)


def test_only_signed_versions_are_followed(
    steps: list[Path], remote: Path, place: Path, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    trusted = [str(keys[0].with_suffix(".pub"))]
    push(steps[0], remote, baseline=place, sign_key=keys[0])
    with Publisher(remote, place, sign_key=keys[0], trusted_keys=trusted) as publisher:
        assert publish(publisher, steps[1]).version == 2
        push(steps[2], remote, baseline=fresh_copy(place, tmp_path / "theirs"))
        with pytest.raises(WrongBaseError, match="signed"):
            publisher.begin()
    assert tree(place) == tree(steps[1])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_killed_at_any_call(steps: list[Path], remote: Path, place: Path, tmp_path: Path, when: str, kind: str) -> None:
    push(steps[0], remote, baseline=place)
    kept = {path: fresh_copy(path, tmp_path / f"kept-{path.name}") for path in (remote, place)}
    call = 0
    while True:
        for path, copy in kept.items():
            fresh_copy(copy, path)
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        memory = arrays_of(steps[0])
        baseline: Any = place if kind == "folder" else memory
        home = None if kind == "folder" else tmp_path / "home"
        killing: list[KillsAtCall] = []

        def kill(backend: Backend, call: int = call, killing: list[KillsAtCall] = killing) -> Backend:
            killing.append(KillsAtCall(backend, call, when=when))
            return killing[0]

        with wrapping(kill):
            try:
                with Publisher(remote, baseline, home=home, jobs=1) as publisher:
                    publish(publisher, steps[1])
            except StoppedError:
                pass
        is_over = killing[0].count <= call
        if kind == "memory" and len(commits(remote)) == 2:
            # What lives on after a stop is filled from the newest version.
            baseline = memory = arrays_of(steps[1])
        with Publisher(remote, baseline, home=home, jobs=1) as publisher:
            result = publish(publisher, steps[1])
        assert result.version == 2 and len(commits(remote)) == 2
        built = tensors_of(place) if kind == "folder" else {name: array.tobytes() for name, array in memory.items()}
        assert built == tensors_of(steps[1])
        assert build_all(remote, tmp_path / "scratch")[1] == tree(steps[1])
        if is_over:
            break
        call += 1
    assert call > 6


def test_a_commit_is_tried_again(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    memory = arrays_of(steps[0])
    stopped: list[str] = []

    class StopsOnce(Wrapped):
        def called(self, name: str, key: str) -> None:
            if key == "commits/0000000002.json" and name == "create" and not stopped:
                stopped.append(key)
                raise StoppedError

    with wrapping(StopsOnce), Publisher(remote, memory, home=tmp_path / "home") as publisher:
        with pytest.raises(StoppedError):
            publish(publisher, steps[1])
        assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[0])
        assert publisher.commit().version == 2
    assert {name: array.tobytes() for name, array in memory.items()} == tensors_of(steps[1])


def test_an_add_that_went_wrong(steps: list[Path], remote: Path, place: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place) as publisher:
        publisher.begin()
        for shard in place.glob("*.safetensors"):
            shard.write_bytes(shard.read_bytes() + b"\0")
        with pytest.raises(ConflictError):
            publisher.add("layers.0.weight", bytes(8192))
        with pytest.raises(UsageError, match=r"layers\.0\.weight went wrong"):
            publisher.commit()
    assert len(commits(remote)) == 1


_LARGE = """
import resource, sys
import numpy as np
from dcr_cli.publish import Publisher

def peak() -> int:
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

remote, place = sys.argv[1:]
data = np.arange(1 << 27, dtype=np.uint16)
data[::100] ^= 1
with Publisher(remote, place, jobs=2) as publisher:
    publisher.begin()
    before = peak()
    publisher.add("large", data)
    publisher.commit()
    print((peak() - before) >> 20)
"""


def test_memory_is_bounded(tmp_path: Path, remote: Path, place: Path) -> None:
    data = np.arange(1 << 27, dtype=np.uint16).tobytes()
    start = write_checkpoint(tmp_path / "base", {"large": ("BF16", (1 << 27,), data)})
    del data
    push(start, remote, baseline=place)
    done = subprocess.run([sys.executable, "-c", _LARGE, remote, place], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100


def test_a_device_that_cannot_be_had_is_refused_at_once(remote: Path, place: Path) -> None:
    with pytest.raises(UsageError, match=r"^--device: "):
        Publisher(remote, place, device="gpu")
    with pytest.raises(UnsupportedError, match=r"^--device cuda:4095: "):
        Publisher(remote, place, device="cuda:4095")
    assert not remote.exists()


def test_what_was_compared_where_is_told(steps: list[Path], remote: Path, place: Path) -> None:
    push(steps[0], remote, baseline=place)
    with Publisher(remote, place) as publisher:
        result = publish(publisher, steps[1])
    assert result.device == "cpu" and result.account is not None
    assert {"read and compare", "code", "write"} <= {stage.name for stage in result.account.stages}
