from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, strategies as st

from dcr_cli.checkpoint import checkpoint as checkpoint_module
from dcr_cli.checkpoint.checkpoint import Checkpoint, Reader, open_checkpoint
from dcr_cli.checkpoint.folder import scan
from dcr_cli.checkpoint.in_progress import IN_PROGRESS, is_incomplete
from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.errors import ConflictError, DamagedError, DcrError, IncompleteError, LocalError, NotFoundError, UsageError
from dcr_cli.holder import encode_holder, this_process
from strategies import (
    INDEX,
    TensorData,
    every_dtype,
    shard_bytes,
    tensor_sets,
    write_checkpoint,
    write_weight_map,
)

A: TensorData = ("U8", (2,), b"ab")
B: TensorData = ("BF16", (2, 1), b"cdef")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of two shards, a weight map and two sidecars."""
    sidecars = {"config.json": b"{}\n", "sub/notes.txt": b"x"}
    return write_checkpoint(tmp_path / "root", {"a": A, "b": B}, shards=2, sidecars=sidecars)


def test_an_apply_that_begins_while_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed then may be a mixture."""
    base = write_checkpoint(tmp_path / "base", {"a": A, "b": B})

    def scan_meanwhile(*arguments: Any, **options: Any) -> Any:
        (base / ".dcr").mkdir()
        (base / ".dcr" / "in-progress").write_bytes(b"{}")
        return scan(*arguments, **options)

    monkeypatch.setattr("dcr_cli.checkpoint.checkpoint.scan", scan_meanwhile)
    with pytest.raises(IncompleteError):
        open_checkpoint(base)


def all_tensors(checkpoint: Checkpoint) -> dict[str, TensorData]:
    with checkpoint.reader() as reader:
        return {
            tensor.name: (tensor.dtype.name, tensor.shape, read(reader, checkpoint, tensor.name))
            for tensor in checkpoint.tensors
        }


def read(reader: Reader, checkpoint: Checkpoint, name: str) -> bytes:
    buffer = bytearray(checkpoint.by_name[name].bytes)
    reader.read_into(checkpoint.by_name[name], 0, buffer)
    return bytes(buffer)


def refusal(root: Path, kind: type[DcrError] = DamagedError, **options: Any) -> DcrError:
    """The error that opening gives, after seeing that it changed nothing."""
    before = {path: os.lstat(path) for path in sorted(root.rglob("*"))}
    with pytest.raises(kind) as caught:
        open_checkpoint(root, **options)
    after = {path: os.lstat(path) for path in sorted(root.rglob("*"))}
    assert [(p, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p, s in before.items()] == [
        (p, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for p, s in after.items()
    ]
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    return caught.value


# What is read


def test_the_parts_of_a_checkpoint(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    assert [shard.path for shard in checkpoint.shards] == [FIRST, SECOND]
    assert [shard.size for shard in checkpoint.shards] == [(root / path).stat().st_size for path in (FIRST, SECOND)]
    assert [(sidecar.path, sidecar.size, sidecar.kind) for sidecar in checkpoint.sidecars] == [
        ("config.json", 3, SIDECAR),
        (INDEX, (root / INDEX).stat().st_size, WEIGHT_MAP),
        ("sub/notes.txt", 1, SIDECAR),
    ]
    assert [(t.name, t.dtype.name, t.shape, t.shard, t.bytes, t.elements) for t in checkpoint.tensors] == [
        ("a", "U8", (2,), 0, 2, 2),
        ("b", "BF16", (2, 1), 1, 4, 2),
    ]
    assert checkpoint.by_name == {tensor.name: tensor for tensor in checkpoint.tensors}
    assert (root / SECOND).read_bytes()[checkpoint.by_name["b"].begin :] == b"cdef"
    assert checkpoint.root == root
    assert checkpoint.skipped == ()
    assert open_checkpoint(str(root)) == checkpoint


@given(tensor_sets(), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_checkpoint_is_read_as_written(
    tensors: dict[str, TensorData], shards: int, index: bool, metadata: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # A weight map cannot name a shard without tensors.
        shards = min(shards, max(len(tensors), 1)) if index else shards
        root = write_checkpoint(
            Path(folder), tensors, shards=shards, index=index, metadata={"format": "pt"} if metadata else None
        )
        checkpoint = open_checkpoint(root)
        assert all_tensors(checkpoint) == tensors
        assert [tensor.name.encode() for tensor in checkpoint.tensors] == sorted(name.encode() for name in tensors)


def test_every_dtype_is_read_by_bytes(tmp_path: Path) -> None:
    tensors = every_dtype()
    assert all_tensors(open_checkpoint(write_checkpoint(tmp_path, tensors, shards=3))) == tensors


def test_canonical_order_is_that_of_utf8_bytes(tmp_path: Path) -> None:
    names = ["\U0001f600", "\uffff", "é", "e\u0301", "a", "B", "", "\n"]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, dict.fromkeys(names, A), shards=2))
    assert [tensor.name for tensor in checkpoint.tensors] == sorted(names, key=str.encode)


def test_tensors_without_elements_and_shards_without_tensors(tmp_path: Path) -> None:
    tensors: dict[str, TensorData] = {
        "a": ("F32", (0,), b""),
        "b": ("F32", (), b"abcd"),
        "c": ("F32", (3, 0), b""),
        "d": ("F64", (0, 7), b""),
    }
    assert all_tensors(open_checkpoint(write_checkpoint(tmp_path / "one", tensors))) == tensors
    assert all_tensors(open_checkpoint(write_checkpoint(tmp_path / "two", tensors, shards=6, index=False))) == tensors
    assert open_checkpoint(write_checkpoint(tmp_path / "none", {}, metadata={"k": "v"})).tensors == ()


def test_part_of_a_tensor_is_read_into_any_buffer(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    tensor = checkpoint.by_name["b"]
    with checkpoint.reader() as reader:
        array = np.zeros((1, 1), np.uint16)
        reader.read_into(tensor, 1, array)
        assert array.tobytes() == b"de"
        buffer = bytearray(8)
        reader.read_into(tensor, 0, memoryview(buffer)[2:6])
        assert buffer == b"\0\0cdef\0\0"
        reader.read_into(tensor, 4, bytearray())
        reader.read_into(tensor, 0, np.zeros((0, 3), np.uint8))
        for offset, size in ((0, 5), (1, 4), (5, 0), (-1, 1)):
            with pytest.raises(ValueError, match="not all in tensor 'b'"):
                reader.read_into(tensor, offset, bytearray(size))


def test_files_digest_has_all_files_in_canonical_order(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    with checkpoint.reader() as reader:
        records = checkpoint.files_digest(reader)
    shard = (root / FIRST).read_bytes()[:-2]
    assert [(record.path, record.kind) for record in records] == [
        ("config.json", SIDECAR),
        (FIRST, SHARD),
        (SECOND, SHARD),
        (INDEX, WEIGHT_MAP),
        ("sub/notes.txt", SIDECAR),
    ]
    assert (records[0].size, records[0].blake3) == (3, blake3(b"{}\n").digest())
    assert (records[1].size, records[1].blake3) == (len(shard), blake3(shard).digest())
    assert records[3].blake3 == blake3((root / INDEX).read_bytes()).digest()


def test_shards_in_a_subfolder_that_the_weight_map_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/x.safetensors").write_bytes(shard_bytes({"a": A}))
    (tmp_path / "y.safetensors").write_bytes(shard_bytes({"b": B}))
    write_weight_map(tmp_path, {"a": "sub/x.safetensors", "b": "y.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert [shard.path for shard in checkpoint.shards] == ["sub/x.safetensors", "y.safetensors"]
    assert all_tensors(checkpoint) == {"a": A, "b": B}


def test_a_safetensors_file_in_a_subfolder_that_no_weight_map_names_is_a_sidecar(root: Path) -> None:
    (root / "sub/adapter.safetensors").write_bytes(b"not even safetensors")
    assert "sub/adapter.safetensors" in [sidecar.path for sidecar in open_checkpoint(root).sidecars]


def test_the_one_weight_map_may_have_another_name(root: Path) -> None:
    (root / INDEX).rename(root / "diffusion_pytorch_model.safetensors.index.json")
    kinds = {sidecar.path: sidecar.kind for sidecar in open_checkpoint(root).sidecars}
    assert kinds["diffusion_pytorch_model.safetensors.index.json"] == WEIGHT_MAP


def test_a_root_that_is_a_link_and_files_that_are_links(tmp_path: Path, root: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate((FIRST, "config.json")):
        (root / path).rename(blobs / str(number))
        (root / path).symlink_to(f"../blobs/{number}")
    (tmp_path / "link").symlink_to("root")
    assert all_tensors(open_checkpoint(tmp_path / "link")) == {"a": A, "b": B}


def test_what_starts_with_a_dot_is_no_part(root: Path) -> None:
    expected = open_checkpoint(root)
    (root / ".dcr/stage").mkdir(parents=True)
    (root / ".dcr/state.json").write_bytes(b"{}")
    (root / ".hidden.safetensors").write_bytes(b"")
    (root / ".model.bin").write_bytes(b"")
    assert open_checkpoint(root) == expected


# What is not there


def test_no_checkpoint(tmp_path: Path, root: Path) -> None:
    assert str(refusal(tmp_path / "none", NotFoundError, what="base")) == f"base {tmp_path / 'none'}: no such folder"
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in str(refusal(tmp_path / "empty", NotFoundError))
    assert "is a file, not a folder" in str(refusal(root / FIRST, NotFoundError))
    assert "no such folder" in str(refusal(root / FIRST / "x", NotFoundError))
    assert "no path has" in str(refusal(Path("nul\0"), UsageError))
    os.mkfifo(tmp_path / "fifo")
    assert "is a FIFO, not a folder" in str(refusal(tmp_path / "fifo", NotFoundError))
    (tmp_path / "loop").symlink_to("loop")
    refusal(tmp_path / "loop", LocalError)


def test_a_delta_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads/000000.safetensors").write_bytes(shard_bytes({"blocks": A}))
    for path in ("manifest.zst", "digests.zst", "commit.json"):
        (tmp_path / path).write_bytes(b"x")
    error = refusal(tmp_path, NotFoundError)
    assert "is a delta, not a checkpoint" in str(error)
    assert "dcr apply" in str(error.hint)


def test_a_stopped_apply(root: Path) -> None:
    assert not is_incomplete(root)
    (root / ".dcr").mkdir()
    assert not is_incomplete(root)
    (root / IN_PROGRESS).write_bytes(b"")
    assert is_incomplete(root)
    shutil.copy(root / FIRST, root / SECOND)
    error = refusal(root, IncompleteError)
    assert error.exit_code == 4
    assert str(error.hint) == f"dcr apply DELTA {root} finishes it"
    (root / IN_PROGRESS).write_text('{"delta": "the/delta"}')
    assert str(refusal(root, IncompleteError).hint) == f"dcr apply the/delta {root} finishes it"
    (root / IN_PROGRESS).unlink()
    os.mkfifo(root / IN_PROGRESS)
    assert str(refusal(root, IncompleteError).hint) == f"dcr apply DELTA {root} finishes it"
    for delta in ("a\nb", "x" * 2000, "", ["x" * 2000]):
        (root / IN_PROGRESS).unlink()
        (root / IN_PROGRESS).write_text(json.dumps({"delta": delta}))
        assert str(refusal(root, IncompleteError).hint) == f"dcr apply DELTA {root} finishes it"
    (root / IN_PROGRESS).write_text(json.dumps({"delta": "$(rm -rf /); x"}))
    assert str(refusal(root, IncompleteError).hint) == f"dcr apply '$(rm -rf /); x' {root} finishes it"
    assert "tensor a is in it and in" in str(refusal(root, DamagedError, allow_incomplete=True))
    assert not is_incomplete(root / "none")
    assert not is_incomplete(root / FIRST)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (encode_holder(this_process()), f"is running, process {os.getpid()}"),
        (encode_holder(this_process()._replace(start="1@another-boot")), "was stopped"),
        (
            b"%d - %s\n" % (os.getpid(), os.fsencode(socket.gethostname())),
            f"was stopped, or is running: process {os.getpid()} on {socket.gethostname()}",
        ),
        (
            encode_holder(this_process()._replace(host="other")),
            f"was stopped, or is running: process {os.getpid()} on other",
        ),
        (b"", "was stopped"),
        (b"\xff\x00 1", "was stopped"),
        (None, "was stopped"),
    ],
    # Its number would be in the name, which has to be the same in every process that runs tests.
    ids=["this", "another boot", "no start", "another host", "empty", "torn", "none"],
)
def test_whether_an_apply_is_running(root: Path, text: bytes | None, facts: str) -> None:
    (root / ".dcr").mkdir()
    (root / IN_PROGRESS).write_bytes(b"")
    if text is not None:
        (root / ".dcr/lock").write_bytes(text)
    error = refusal(root, IncompleteError)
    assert error.facts == f"incomplete: an apply to it {facts}"
    assert ("wait" in str(error.hint)) == facts.startswith("is running, ")


def test_a_state_that_cannot_be_seen_is_not_taken_for_complete(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(LocalError, match="cannot tell whether an apply is in progress"):
        is_incomplete(root)


# Shards and weight map at odds


def test_a_shard_that_is_missing(root: Path) -> None:
    (root / SECOND).unlink()
    assert f"{INDEX}: puts tensor b into shard {SECOND}, which is not there" in str(refusal(root))


def test_a_tensor_mapped_to_the_wrong_shard(root: Path) -> None:
    write_weight_map(root, {"a": SECOND, "b": FIRST})
    assert f"{INDEX}: puts tensor a into shard {SECOND}, but it is in {FIRST}" in str(refusal(root))


def test_a_tensor_that_is_in_no_shard_and_one_that_is_in_no_map(root: Path) -> None:
    write_weight_map(root, {"a": FIRST, "b": SECOND, "c": SECOND})
    assert f"puts tensor c into shard {SECOND}, which has no such tensor" in str(refusal(root))
    (root / SECOND).write_bytes(shard_bytes({"b": B, "d": A}))
    write_weight_map(root, {"a": FIRST, "b": SECOND})
    assert f"does not name tensor d, which is in shard {SECOND}" in str(refusal(root))


def test_a_phantom_tensor_without_a_dtype(root: Path) -> None:
    (root / SECOND).write_bytes(shard_bytes({"b": B, "ghost": ("", (0,), b"")}))
    error = refusal(root)
    assert f'{SECOND}: tensor ghost: unknown dtype ""' in str(error)


def test_a_shard_that_the_weight_map_does_not_name(root: Path) -> None:
    for path in ("model.safetensors", "model-00003-of-00003.safetensors", "adapter_model.safetensors"):
        shutil.copy(root / FIRST, root / path)
        error = refusal(root)
        assert f"{path}: is a shard that the weight map does not name" in str(error)
        assert error.hint == f"leave it out with --skip '{path}'"
        assert all_tensors(open_checkpoint(root, skip=[path])) == {"a": A, "b": B}
        (root / path).unlink()


@pytest.mark.parametrize("index", [True, False])
def test_a_numbered_set_that_is_incomplete(tmp_path: Path, index: bool) -> None:
    root = write_checkpoint(tmp_path, {"a": A, "b": B, "c": A}, shards=3, index=index)
    (root / "model-00003-of-00003.safetensors").unlink()
    if index:
        write_weight_map(root, {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"})
    assert "is one of 3 shards, of which 2 are there and number 3 is not" in str(refusal(root))


def test_two_weight_maps(root: Path) -> None:
    shutil.copy(root / INDEX, root / "other.safetensors.index.json")
    error = refusal(root)
    assert f"has 2 weight maps, {INDEX} and other.safetensors.index.json" in str(error)
    assert open_checkpoint(root, skip=["other.*"])
    (root / "other.safetensors.index.json").rename(root / "consolidated.safetensors.index.json")
    assert refusal(root).hint == "leave it out with --skip 'consolidated*'"
    (root / INDEX).rename(root / "a.safetensors.index.json")
    assert refusal(root).hint == "leave it out with --skip 'consolidated*'"


def test_without_a_weight_map_all_shards_count(root: Path) -> None:
    (root / INDEX).unlink()
    assert all_tensors(open_checkpoint(root)) == {"a": A, "b": B}
    shutil.copy(root / FIRST, root / "other.safetensors")
    error = refusal(root)
    assert f"other.safetensors: tensor a is in it and in {FIRST}" in str(error)
    assert "--skip 'other.safetensors'" in str(error.hint)
    assert open_checkpoint(root, skip=["other.safetensors"])


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("rank-1.safetensors", {"a": A}),
        ("model-rank-1-part-0.safetensors", {"a": A}),
        ("tp1.safetensors", {"a": A}),
        ("other.safetensors", {"a": ("U8", (1,), b"a")}),
        ("other.safetensors", {"a": ("U8", (2,), b"ax")}),
        ("other.safetensors", {"a": A, "c": B}),
    ],
)
def test_a_shard_that_is_no_second_copy_is_not_to_be_left_out(
    root: Path, name: str, tensors: dict[str, TensorData]
) -> None:
    (root / INDEX).unlink()
    (root / name).write_bytes(shard_bytes(tensors))
    assert str(refusal(root).hint) == "shards of ranks need --layout"


def test_the_same_tensor_in_two_mapped_shards(root: Path) -> None:
    (root / SECOND).write_bytes(shard_bytes({"b": B, "a": A}))
    assert f"{SECOND}: tensor a is in it and in {FIRST}" in str(refusal(root))


@pytest.mark.parametrize(
    "path",
    [
        "../other/x.safetensors",
        "/x.safetensors",
        "a/../../x.safetensors",
        "a\\x.safetensors",
        ".",
        "",
        "a\0.safetensors",
    ],
)
def test_an_unsafe_name_in_the_weight_map(root: Path, path: str) -> None:
    (root.parent / "other").mkdir()
    (root.parent / "other/x.safetensors").write_bytes(shard_bytes({"a": A}))
    write_weight_map(root, {"a": path, "b": SECOND})
    assert f"{INDEX}: unsafe name" in str(refusal(root))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n", "is a Git-LFS pointer, not"),
        (b"<!DOCTYPE html><html></html>", "is an HTML page"),
        (b"", "is empty"),
        (b"\xff" * 200, "states a header of 18446744073709551615 bytes"),
    ],
)
def test_a_shard_that_is_no_safetensors_file(root: Path, content: bytes, message: str) -> None:
    (root / SECOND).write_bytes(content)
    assert f"{root / SECOND}: {message}" in str(refusal(root))


def test_a_shard_that_is_no_file(root: Path) -> None:
    (root / SECOND).unlink()
    (root / SECOND).mkdir()
    assert f"{SECOND}: is a directory" in str(refusal(root))
    (root / SECOND).rmdir()
    os.mkfifo(root / SECOND)
    assert f"{SECOND}: is a FIFO" in str(refusal(root))
    (root / SECOND).unlink()
    (root / SECOND).symlink_to("nowhere")
    assert f"{SECOND}: is a link that leads to no file" in str(refusal(root))
    (root / SECOND).unlink()
    (root / INDEX).unlink()
    (root / INDEX).mkdir()
    assert f"{INDEX}: is a directory" in str(refusal(root))


@pytest.mark.parametrize("cut", [1, 7, 4096, 8200])
def test_a_shard_that_is_cut_short(tmp_path: Path, cut: int) -> None:
    tensors: dict[str, TensorData] = {"a": ("U8", (8192,), bytes(8192)), "b": ("U8", (8192,), bytes(8192))}
    root = write_checkpoint(tmp_path, tensors, shards=2)
    size = (root / SECOND).stat().st_size
    os.truncate(root / SECOND, size - cut)
    message = str(refusal(root))
    assert f"{SECOND}: has {size - cut} bytes" in message
    assert "cut short" in message


def test_a_bad_weight_map(root: Path) -> None:
    for content in (b"", b"[]", b"{}", b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', b"[" * 100_000):
        (root / INDEX).write_bytes(content)
        assert str(refusal(root)).startswith(f"{root / INDEX}: ")


def test_a_weight_map_that_is_too_large(root: Path) -> None:
    os.truncate(root / INDEX, 100_000_001)
    assert "more than the 100000000 a weight map may have" in str(refusal(root))


# Second copies, limits, names, skipping


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("consolidated.safetensors", "consolidated*"),
        ("consolidated.00.pth", "consolidated*"),
        ("pytorch_model.bin", "*.bin"),
        ("sub/optimizer.pt", "*.pt"),
        ("rng_state.pth", "*.pth"),
        ("gguf/model.gguf", "*.gguf"),
        ("original/params.json", "original/"),
        ("original/deep/x", "original/"),
    ],
)
@pytest.mark.parametrize("index", [True, False])
def test_a_second_copy_of_the_weights(root: Path, path: str, pattern: str, index: bool) -> None:
    if not index:
        (root / INDEX).unlink()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / FIRST, root / path)
    error = refusal(root)
    assert str(error) == f"{root / path}: would be a second copy of the weights"
    assert error.hint == f"leave it out with --skip '{pattern}'"
    checkpoint = open_checkpoint(root, skip=[pattern])
    assert all_tensors(checkpoint) == {"a": A, "b": B}
    assert path not in checkpoint.identities
    assert checkpoint.skipped == (pattern,)


def test_all_second_copies_are_in_the_hint(root: Path) -> None:
    for path in ("a.bin", "b.bin", "c.pt", "model.safetensors"):
        shutil.copy(root / FIRST, root / path)
    error = refusal(root)
    assert "(and 3 more files are refused)" in str(error)
    assert error.hint == "leave it out with --skip '*.bin' --skip '*.pt' --skip 'model.safetensors'"


def test_a_long_hint_is_cut(root: Path) -> None:
    for number in range(13):
        shutil.copy(root / FIRST, root / f"more-{number:02}.safetensors")
    hint = str(refusal(root).hint)
    assert hint.count("--skip") == 10
    assert hint.endswith("--skip 'more-09.safetensors' and 3 more")


def test_consolidated_shards_alone_are_the_weights(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(shard_bytes({"a": A}))
    assert all_tensors(open_checkpoint(tmp_path)) == {"a": A}
    write_weight_map(tmp_path, {"a": "consolidated.safetensors"}, name="consolidated.safetensors.index.json")
    assert all_tensors(open_checkpoint(tmp_path)) == {"a": A}


def test_a_sidecar_over_the_limit(root: Path) -> None:
    (root / "big.json").touch()
    os.truncate(root / "big.json", 64 << 20)
    assert open_checkpoint(root)
    os.truncate(root / "big.json", (64 << 20) + 1)
    error = refusal(root)
    assert "big.json: has 67108865 bytes, more than the 67108864" in str(error)
    assert error.hint == "leave it out with --skip 'big.json'"
    assert open_checkpoint(root, skip=["big.json"])


def test_sidecars_over_the_limit_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_SIDECARS_BYTES", 10)
    assert open_checkpoint(root)
    (root / "x").write_bytes(b"1234567")
    error = refusal(root)
    assert "have 11 bytes, more than the 10 allowed" in str(error)
    assert error.hint == "leave it out with --skip 'x'"


@pytest.mark.parametrize("path", ["a\nb", "a\\b", "C:x", b"caf\xe9", "x\x1b[2J"])
def test_a_sidecar_with_an_unsafe_name(root: Path, path: str | bytes) -> None:
    name = os.fsdecode(path)
    (root / name).write_bytes(b"x")
    error = refusal(root)
    assert "unsafe name" in str(error)
    assert error.hint is not None
    pattern = error.hint.split("'")[1]
    assert open_checkpoint(root, skip=[pattern])


def test_shards_and_weight_maps_with_unsafe_names(tmp_path: Path) -> None:
    (tmp_path / "a\n.safetensors").write_bytes(shard_bytes({"a": A}))
    assert "unsafe name: it has a control character" in str(refusal(tmp_path))
    (tmp_path / "a\n.safetensors").rename(tmp_path / "a.safetensors")
    write_weight_map(tmp_path, {"a": "a.safetensors"}, name="\n.safetensors.index.json")
    assert "unsafe name: it has a control character" in str(refusal(tmp_path))


def test_skipping_among_too_many_paths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = sum(len(path) for path in open_checkpoint(root).identities)
    monkeypatch.setattr("dcr_cli.checkpoint.patterns.MAX_PATHS_BYTES", most)
    assert open_checkpoint(root, skip=["x"])
    (root / "y").write_bytes(b"")
    error = refusal(root, skip=["x"])
    assert f"its paths have {most + 1} bytes together, with skip patterns at most {most}" in str(error)
    assert error.hint == "move away what --skip was to leave out, and leave out --skip"
    assert open_checkpoint(root) and open_checkpoint(root, skip=["x"], allow_strangers=True)


def test_skipping_a_shard(root: Path) -> None:
    assert "leaves out shard" in str(refusal(root, UsageError, skip=["model-00002*"]))
    assert "empty pattern" in str(refusal(root, UsageError, skip=[""]))
    assert r"\udcff* is not UTF-8" in str(refusal(root, UsageError, skip=["x", "\udcff*"]))
    (root / INDEX).unlink()
    (root / "adapter.safetensors").write_bytes(shard_bytes({"c": A}))
    assert all_tensors(open_checkpoint(root, skip=["adapter*"])) == {"a": A, "b": B}
    assert open_checkpoint(root, skip=["x", "y", "x"]).skipped == ("x", "y")


def test_skipping_the_weight_map(root: Path) -> None:
    write_weight_map(root, {"a": "nowhere.safetensors"})
    refusal(root)
    assert all_tensors(open_checkpoint(root, skip=[INDEX])) == {"a": A, "b": B}


# Changes while reading


def test_unchanged_files_pass(root: Path) -> None:
    checkpoint = open_checkpoint(root, skip=["*.log"])
    with checkpoint.reader() as reader:
        read(reader, checkpoint, "a")
        (root / "new.log").write_bytes(b"")
        (root / ".dcr").mkdir()
        reader.check_unchanged()


@pytest.mark.parametrize("path", [FIRST, INDEX, "config.json", "sub/notes.txt"])
def test_a_change_of_any_file_is_seen(root: Path, path: str) -> None:
    checkpoint = open_checkpoint(root)
    with checkpoint.reader() as reader:
        os.utime(root / path)
        with pytest.raises(ConflictError, match=f"{path}: changed while reading") as caught:
            reader.check_unchanged()
        assert caught.value.retryable
        with pytest.raises(ConflictError, match=f"{path}: changed while reading"):
            reader.read_file(path)


def test_a_new_file_is_seen(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    (root / "tokenizer.json").write_bytes(b"{}")
    with checkpoint.reader() as reader, pytest.raises(ConflictError, match=r"tokenizer.json: .* it is new"):
        reader.check_unchanged()


def test_a_shard_that_shrinks_is_a_conflict_and_no_signal(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    with checkpoint.reader() as reader:
        assert read(reader, checkpoint, "b") == b"cdef"
        os.truncate(root / SECOND, checkpoint.by_name["b"].begin + 1)
        with pytest.raises(ConflictError, match=f"{SECOND}: changed while reading: it became shorter"):
            read(reader, checkpoint, "b")


def test_a_shard_that_is_replaced_between_scan_and_header(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcr_cli.checkpoint.folder import scan as real

    def scan_then_replace(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        os.unlink(root / FIRST)
        os.mkfifo(root / FIRST)
        return found

    monkeypatch.setattr(checkpoint_module, "scan", scan_then_replace)
    with pytest.raises(ConflictError, match=f"{FIRST}: changed while reading"):
        open_checkpoint(root)


def test_no_file_is_mapped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert all_tensors(open_checkpoint(root)) == {"a": A, "b": B}


# Size


@pytest.mark.usefixtures("few_descriptors")
def test_2000_shards_with_few_descriptors(tmp_path: Path) -> None:
    tensors: dict[str, TensorData] = {f"t{n}": ("U8", (1,), bytes([n % 256])) for n in range(2000)}
    root = write_checkpoint(tmp_path, tensors, shards=2000)
    assert all_tensors(open_checkpoint(root)) == tensors


def test_a_tensor_of_more_than_2_to_the_32_elements(tmp_path: Path) -> None:
    count = 2**32 + 10
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + count)
    with path.open("r+b") as file:
        file.seek(8 + len(header) + 2**32 + 5)
        file.write(b"xyz")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.by_name["a"].elements == count
    buffer = bytearray(5)
    with checkpoint.reader() as reader:
        reader.read_into(checkpoint.by_name["a"], 2**32 + 4, buffer)
    assert buffer == b"\0xyz\0"


def test_names_of_any_kind_give_messages_of_one_line(tmp_path: Path) -> None:
    name = "a\n\x1b[31m\u202e" + "x" * 65536
    root = write_checkpoint(tmp_path, {name: A, "b": B}, shards=2)
    assert all_tensors(open_checkpoint(root))[name] == A
    (root / FIRST).write_bytes(shard_bytes({name: A, "c": A}))
    write_weight_map(root, {"b": SECOND, "c": FIRST})
    message = str(refusal(root))
    assert "does not name tensor a\\n\\x1b[31m\\u202e" in message
    assert len(message) < 1000


def test_open_takes_no_descriptors_with_it(root: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    open_checkpoint(root)
    (root / SECOND).write_bytes(b"")
    refusal(root)
    assert len(os.listdir("/dev/fd")) == before
