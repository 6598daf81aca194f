"""What users of sharded checkpoints have reported: files that are not what they seem, through push and pull."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.diff import diff
from dcr_cli.push import push
from dcr_cli.verify import verify
from receivers import fresh_copy, tree
from strategies import (
    INDEX,
    every_dtype,
    raw_file,
    shard_bytes,
    tensor_of,
    tiny_tensors,
    with_changes,
    write_checkpoint,
    write_weight_map,
)

SHARD, OTHER = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"
Spoil = Callable[[Path], object]


def cut(size: int) -> Spoil:
    return lambda root: (root / SHARD).write_bytes((root / SHARD).read_bytes()[:size])


def as_folder(root: Path) -> None:
    (root / SHARD).unlink()
    (root / SHARD).mkdir()


def with_header(change: Callable[[dict[str, dict[str, object]]], object], more: bytes = b"") -> Spoil:
    """The second shard with its header changed; its tensors are layers.1.weight and layers.3.weight, of 8192 bytes."""

    def spoil(root: Path) -> None:
        data = (root / SHARD).read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        change(header)
        (root / SHARD).write_bytes(raw_file(json.dumps(header), data[8 + size :] + more))

    return spoil


def offsets(begin: int, end: int) -> Callable[[dict[str, dict[str, object]]], object]:
    return lambda header: header["layers.3.weight"].update(data_offsets=[begin, end])


def mapped_to(shard: str) -> Spoil:
    def spoil(root: Path) -> None:
        weight_map = json.loads((root / INDEX).read_text())["weight_map"]
        write_weight_map(root, weight_map | {"layers.0.weight": shard})

    return spoil


SPOILT: dict[str, tuple[Spoil, str]] = {
    "pointer": (
        lambda root: (root / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a Git-LFS pointer",
    ),
    "page": (lambda root: (root / SHARD).write_text("<!DOCTYPE html><html>log in"), "is an HTML page"),
    "empty": (cut(0), "is empty"),
    "folder": (as_folder, "is a directory"),
    "cut by one": (cut(-1), "it is cut short"),
    "cut by a page": (cut(-4096), "it is cut short"),
    "cut in the header": (cut(60), "is it cut short?"),
    "gone": (lambda root: (root / SHARD).unlink(), "which is not there"),
    "two bytes more": (with_header(lambda header: None, b"xx"), "2 more than its tensors need"),
    "gap": (with_header(offsets(8194, 16386), b"xx"), "layers.3.weight: begins at byte 8194, leaving a gap"),
    "overlap": (with_header(offsets(8190, 16382)), "layers.3.weight: begins at byte 8190, but"),
    "the same bytes": (with_header(offsets(0, 8192)), "layers.3.weight: begins at byte 0, but"),
    "backwards": (with_header(offsets(16384, 8192)), "layers.3.weight: begins at byte 16384, after its end"),
    "past the end": (with_header(offsets(8192, 1 << 60)), "layers.3.weight: its shape and dtype"),
    "no dtype": (
        with_header(lambda header: header.update(phantom={"dtype": "", "shape": [0], "data_offsets": [0, 0]})),
        "tensor phantom: unknown dtype",
    ),
    "unknown dtype": (with_header(lambda header: header["layers.3.weight"].update(dtype="Q7")), "unknown dtype Q7"),
    "mapped to nothing": (mapped_to("model-00009-of-00009.safetensors"), "layers.0.weight into shard model-00009"),
    "mapped to another": (mapped_to(SHARD), f"layers.0.weight into shard {SHARD}, but it is in {OTHER}"),
    "second copy": (
        lambda root: (root / "model.safetensors").write_bytes(shard_bytes(tiny_tensors()[0])),
        "perhaps a second copy of the weights",
    ),
    "two maps": (
        lambda root: (root / "other.safetensors.index.json").write_bytes((root / INDEX).read_bytes()),
        "has 2 weight maps",
    ),
    **{
        f"mapped to {name!r}": (mapped_to(name), "unsafe name")
        for name in ("../other/x.safetensors", "/x.safetensors", "a/../../x", "..\\x.safetensors", ".", "", "a\0b")
    },
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_no_whole_checkpoint_is_published_nowhere(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file is spoilt in one way: push, diff, verify and inspect say the same of it, and nothing is published."""
    good = write_checkpoint(tmp_path / "good", tiny_tensors()[0], shards=2)
    push(good, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    before = tree(tmp_path / "remote")
    spoil, facts = SPOILT[name]
    bad = fresh_copy(good, tmp_path / "bad")
    spoil(bad)
    told = set()
    for arguments in (
        ["push", bad, tmp_path / "remote", "--baseline", tmp_path / "baseline"],
        ["diff", good, bad, "-o", tmp_path / "delta"],
        ["verify", bad, "--against", good],
        ["inspect", bad],
    ):
        assert main([str(argument) for argument in arguments]) == 4
        told.add(capsys.readouterr().err.partition("\n")[0])
    assert len(told) == 1 and facts in told.pop()
    assert tree(tmp_path / "remote") == before and not (tmp_path / "delta").exists()


def test_every_dtype_and_empty_tensors_go_through_a_remote(tmp_path: Path) -> None:
    """A tensor of each dtype changes a byte; tensors of no elements stand in front, between and last, come and go."""
    empty = {name: ("F32", shape, b"") for name, shape in (("a", (0,)), ("t.", (0, 7)), ("zz", (3, 0)))}
    base = {"a": empty["a"], **every_dtype(), "t.": empty["t."], "scalar": tensor_of("I64", ()), "zz": empty["zz"]}
    target = {name: with_changes(tensor, [0]) if tensor[2] else tensor for name, tensor in base.items()}
    del target["a"]
    target["new"] = ("I8", (0, 3), b"")
    found = [
        write_checkpoint(tmp_path / "base", base, metadata={"format": "pt"}),
        write_checkpoint(tmp_path / "target", target, metadata={"format": "pt"}),
    ]
    result = diff(*found)
    assert (result.added, result.removed) == (("new",), ("a",))
    assert result.changed_tensors == len(every_dtype()) + 1
    for checkpoint in found:
        assert main(["push", str(checkpoint), str(tmp_path / "r"), "--baseline", str(tmp_path / "baseline")]) == 0
        assert main(["pull", str(tmp_path / "r"), str(tmp_path / "out")]) == 0
        assert tree(tmp_path / "out") == tree(checkpoint)
    assert verify(tmp_path / "out", against=found[1]).matches


def test_a_file_of_no_tensors_goes_through_a_remote(tmp_path: Path) -> None:
    """A shard that has metadata alone is published and pulled as it is."""
    checkpoint = write_checkpoint(tmp_path / "c", {}, metadata={"format": "pt"})
    assert main(["push", str(checkpoint), str(tmp_path / "r")]) == 0
    assert main(["pull", str(tmp_path / "r"), str(tmp_path / "out")]) == 0
    assert tree(tmp_path / "out") == tree(checkpoint)
