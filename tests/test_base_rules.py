"""The rules of FORMAT.md that need the base or the result: each broken alone in a delta whose own digests fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.digest import State, content_digest, files_digest, object_digest
from dcr_cli.delta.commit import Commit, decode_commit, encode_commit, open_digests, open_manifest
from dcr_cli.delta.manifest import FileRow, Manifest, RemovedFile, TensorRow, encode_digests, encode_manifest
from dcr_cli.diff import diff
from dcr_cli.errors import DamagedError, DcrError, WrongBaseError
from strategies import INDEX, Tensors, shard_bytes, tensor_of, with_changes, write_checkpoint

MODES = ("replace", "in-place")
BASE: Tensors = {
    "copied": tensor_of("F32", (6,)),
    "gone": tensor_of("I16", (5,)),
    "same.kind": tensor_of("BF16", (300,), 1),
    "w": tensor_of("BF16", (300,), 2),
    "x": tensor_of("BF16", (301,), 3),
}
TARGET: Tensors = {
    "copied": BASE["copied"],
    "same.kind": BASE["same.kind"],
    "w": with_changes(BASE["w"], [3, 70, 299]),
    "x": with_changes(BASE["x"], [1]),
}
SIDECARS = {"config.json": b"{}", "notes.txt": b"same in both"}
OLD = RemovedFile("old.txt", object_digest(b"gone"))


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "base", BASE, shards=2, sidecars={**SIDECARS, OLD.path: b"gone"})
    write_checkpoint(tmp_path / "target", TARGET, shards=2, sidecars={**SIDECARS, "config.json": b'{"a": 1}'})
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", encoding="context")
    return tmp_path / "delta"


def rewrite(
    delta: Path,
    manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    digests: Callable[[list[bytes]], list[bytes]] = lambda digests: digests,
    commit: Callable[[Commit], Commit] = lambda commit: commit,
) -> None:
    """Change what a delta says, and make all digests over it fit again."""
    old = decode_commit((delta / "commit.json").read_bytes(), "commit")
    opened = open_manifest(old, (delta / "manifest.zst").read_bytes(), "manifest")
    plain = Manifest(
        tuple(opened.tensors),
        opened.removed,
        tuple(opened.files),
        tuple(opened.removed_files),
        tuple(opened.payloads),
        opened.skipped,
    )
    rows = open_digests(old, opened, (delta / "digests.zst").read_bytes(), "digests")
    changed = manifest(plain)
    copies = digests([bytes(row) for row in np.asarray(rows)])
    manifest_object, decoded = encode_manifest(changed)
    digests_object = encode_digests(copies)
    copied = iter(copies)
    tensors = ((row.name, row.dtype, tuple(row.shape), row.digest or next(copied)) for row in changed.tensors)
    files = files_digest((row.path, row.kind, row.blake3) for row in changed.files)
    new = dataclasses.replace(
        old,
        target=State(content_digest(tensors), files),
        manifest_blake3=object_digest(manifest_object),
        manifest_decoded_blake3=decoded,
        manifest_bytes=len(manifest_object),
        digests_blake3=object_digest(digests_object),
        digests_bytes=len(digests_object),
    )
    (delta / "manifest.zst").write_bytes(manifest_object)
    (delta / "digests.zst").write_bytes(digests_object)
    (delta / "commit.json").write_bytes(encode_commit(commit(new)))


def with_tensor(name: str, **changes: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        def row(old: TensorRow) -> TensorRow:
            return dataclasses.replace(old, **changes) if old.name == name else old  # type: ignore[arg-type]

        return dataclasses.replace(manifest, tensors=tuple(row(old) for old in manifest.tensors))

    return change


def with_file(path: str, **changes: object) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        def row(old: FileRow) -> FileRow:
            return dataclasses.replace(old, **changes) if old.path == path else old  # type: ignore[arg-type]

        return dataclasses.replace(manifest, files=tuple(row(old) for old in manifest.files))

    return change


def refused(delta: Path, kind: type[DcrError], fault: str) -> None:
    """Both ways in place refuse the delta and leave the receiver as it was; so does building elsewhere."""
    receiver = delta.parent / "base"
    before = contents(receiver)
    for mode in MODES:
        with pytest.raises(kind, match=fault):
            apply(delta, receiver, mode=mode)
        assert contents(receiver) == before
    with pytest.raises(kind, match=fault):
        apply(delta, receiver, to=delta.parent / "out")
    assert contents(receiver) == before
    assert not (delta.parent / "out").exists()


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and ".dcr" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_delta_that_is_written_again_applies(delta: Path) -> None:
    rewrite(delta)
    apply(delta, delta.parent / "base")
    assert contents(delta.parent / "base") == contents(delta.parent / "target")


def test_rule_78_the_base_has_the_state_that_the_commit_names(delta: Path) -> None:
    rewrite(delta, commit=lambda old: dataclasses.replace(old, base=State(bytes(32), old.base.files)))
    refused(delta, WrongBaseError, "base")


def test_rule_79_a_source_has_the_dtype_and_element_count(delta: Path) -> None:
    rewrite(delta, with_tensor("w", source="x"))
    refused(delta, WrongBaseError, "tensor x: expected 300")


def test_rule_79_a_source_is_a_tensor_of_the_base(delta: Path) -> None:
    rewrite(delta, with_tensor("w", source="nobody"))
    refused(delta, WrongBaseError, "no tensor nobody")


@pytest.mark.parametrize("removed", [(), ("gone", "never.there")])
def test_rule_80_removed_are_the_tensors_that_the_target_has_not(delta: Path, removed: tuple[str, ...]) -> None:
    rewrite(delta, lambda old: dataclasses.replace(old, removed=removed))
    refused(delta, WrongBaseError, "gone|never.there")


@pytest.mark.parametrize("change", [{"blake3": bytes(32)}, {"size": 3}])
def test_rule_81_a_file_without_runs_is_the_bases(delta: Path, change: dict[str, object]) -> None:
    rewrite(delta, with_file("notes.txt", **change))
    refused(delta, DamagedError, "notes.txt")


@pytest.mark.parametrize("removed", [(), (RemovedFile("old.txt", bytes(32)),), (OLD, RemovedFile("zz.txt", bytes(32)))])
def test_rule_81_removed_files_are_those_that_the_target_has_not(delta: Path, removed: tuple[RemovedFile, ...]) -> None:
    rewrite(delta, lambda old: dataclasses.replace(old, removed_files=removed))
    refused(delta, DamagedError, "files of the base that the target has not")


def test_rule_82_the_changed_elements_add_up(delta: Path) -> None:
    def change(manifest: Manifest) -> Manifest:
        piece = next(row for row in manifest.tensors if row.name == "w").pieces[0]
        return with_tensor("w", pieces=(dataclasses.replace(piece, changed=4),))(manifest)

    rewrite(delta, change)
    refused(delta, DamagedError, "3 elements change, 4 says the manifest")


@pytest.mark.parametrize("change", [{"blake3": bytes(32)}, {"size": 9}])
def test_rule_83_a_files_blocks_make_the_file(delta: Path, change: dict[str, object]) -> None:
    rewrite(delta, with_file("config.json", **change))
    refused(delta, DamagedError, "config.json")


def test_rule_84_the_headers_have_the_tensors_of_the_manifest(delta: Path) -> None:
    rewrite(delta, with_tensor("copied", shape=(2, 3)))
    refused(delta, DamagedError, "copied")


WEIGHT_MAP = {name: f"model-{1 + at % 2:05}-of-00002.safetensors" for at, name in enumerate(TARGET)}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "JSON"),
        ("[]", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}', "duplicate key"),
        (json.dumps({"weight_map": {**WEIGHT_MAP, "w": "../w.safetensors"}}), "unsafe name"),
        (json.dumps({"weight_map": {**WEIGHT_MAP, "w": "w.txt"}}), "not a .safetensors file"),
        (json.dumps({"weight_map": {**WEIGHT_MAP, "w": WEIGHT_MAP["copied"], "x": WEIGHT_MAP["w"]}}), "puts tensor"),
        (json.dumps({"weight_map": {**WEIGHT_MAP, "more": WEIGHT_MAP["w"]}}), "has no such tensor"),
        (json.dumps({"weight_map": {name: WEIGHT_MAP[name] for name in ("copied", "w")}}), "does not name tensor"),
    ],
)
def test_rule_84_the_weight_map_is_that_of_the_target(tmp_path: Path, text: str, fault: str) -> None:
    write_checkpoint(tmp_path / "base", BASE, shards=2)
    write_checkpoint(tmp_path / "target", TARGET, shards=2, sidecars={"zz.json": text.encode()})
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")

    def change(manifest: Manifest) -> Manifest:
        files = [
            dataclasses.replace(row, path=INDEX, kind=3) if row.path == "zz.json" else row
            for row in manifest.files
            if row.path != INDEX
        ]
        return dataclasses.replace(manifest, files=tuple(files))

    rewrite(tmp_path / "delta", change)
    refused(tmp_path / "delta", DamagedError, fault)


def test_rule_84_a_weight_map_that_stays_is_that_of_the_target(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", BASE, shards=2)
    write_checkpoint(tmp_path / "target", TARGET, shards=2)
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    text = (base / INDEX).read_bytes()
    rewrite(tmp_path / "delta", with_file(INDEX, size=len(text), blake3=object_digest(text), runs=()))
    refused(tmp_path / "delta", DamagedError, "puts tensor w into shard")


def test_rule_84_the_weight_map_names_every_shard(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", BASE)
    (base / "more.safetensors").write_bytes(shard_bytes({}))
    (base / INDEX).unlink()
    target = write_checkpoint(tmp_path / "target", TARGET, sidecars={"model.safetensors.json": b"{}"})
    weight_map = json.dumps({"weight_map": dict.fromkeys(TARGET, "model.safetensors")})
    (target / INDEX).unlink()
    (target / "more.safetensors").write_bytes(shard_bytes({}))
    (target / "model.safetensors.json").write_text(weight_map)
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")

    def change(manifest: Manifest) -> Manifest:
        files = (
            dataclasses.replace(row, path=INDEX, kind=3) if row.path == "model.safetensors.json" else row
            for row in manifest.files
        )
        return dataclasses.replace(manifest, files=tuple(files))

    rewrite(tmp_path / "delta", change)
    refused(tmp_path / "delta", DamagedError, "does not name shard more.safetensors")


def test_rule_85_a_decoded_tensor_has_its_digest(delta: Path) -> None:
    rewrite(delta, with_tensor("w", digest=bytes(16)))
    refused(delta, DamagedError, "w")


def test_rule_85_a_copy_has_its_digest(delta: Path) -> None:
    rewrite(delta, digests=lambda old: [bytes(16), *old[1:]])
    refused(delta, DamagedError, "copied|digest")


@pytest.mark.parametrize("side", ["content", "files"])
def test_rule_86_the_result_has_the_state_of_the_commit(delta: Path, side: str) -> None:
    def change(old: Commit) -> Commit:
        target = State(bytes(32), old.target.files) if side == "content" else State(old.target.content, bytes(32))
        return dataclasses.replace(old, target=target)

    rewrite(delta, commit=change)
    refused(delta, DamagedError, "target|digest")
