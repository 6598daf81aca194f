from __future__ import annotations

import json
from typing import Any

import pytest

from dcr_cli.checkpoint.weight_map import check_agreement, check_sets_complete, check_shards_exist, parse_weight_map
from dcr_cli.errors import DamagedError


def document(weight_map: Any, **members: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **members}).encode()


def test_the_map_is_read_and_other_members_ignored() -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b\n": "sub/x.safetensors", "": "sub/x.safetensors"}
    assert parse_weight_map(document(weight_map, other=[1.5, None]), "f") == weight_map


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "not valid JSON"),
        (b"[]", "has no weight_map"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": null}', "has no weight_map"),
        (b'{"weight_map": []}', "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "tensor a: its shard is not a string"),
        (b'{"weight_map": {"a": null}}', "tensor a: its shard is not a string"),
        (b'{"weight_map": {"a": "model.bin"}}', "tensor a: its shard model.bin is not a .safetensors file"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "duplicate key a"),
        (b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}', "duplicate key weight_map"),
        (b'{"metadata": {"total_size": NaN}, "weight_map": {"a": "x.safetensors"}}', "NaN"),
        (b'{"metadata": {"total_size": 1e400}, "weight_map": {"a": "x.safetensors"}}', "too large"),
        (b'\xef\xbb\xbf{"weight_map": {"a": "x.safetensors"}}', "BOM"),
        (b'{"weight_map": {"\\ud800": "x.safetensors"}}', "surrogate"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "is a Git-LFS pointer, not a weight map",
        ),
        (b"<!DOCTYPE html>", "is an HTML page, not a weight map"),
    ],
)
def test_a_bad_map_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(DamagedError) as caught:
        parse_weight_map(data, "model.safetensors.index.json")
    assert str(caught.value).startswith("model.safetensors.index.json: ")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "../other/x.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "a\\x.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        ".",
        "..",
        "",
        "a//x.safetensors",
        "x.safetensors/",
        "a\0.safetensors",
        "a\n.safetensors",
        ".dcr/x.safetensors",
        "sub/.x.safetensors",
        "x" * 256 + ".safetensors",
    ],
)
def test_an_unsafe_shard_name_is_refused(path: str) -> None:
    with pytest.raises(DamagedError, match="unsafe name"):
        parse_weight_map(document({"a": path}), "f")


def test_a_shard_that_is_not_there_is_named_with_its_tensor() -> None:
    check_shards_exist({"a": "x.safetensors"}, {"x.safetensors", "y.safetensors"}, "f")
    with pytest.raises(DamagedError, match=r"puts tensor a into shard x\.safetensors, which is not there"):
        check_shards_exist({"a": "x.safetensors"}, {"y.safetensors"}, "f")


@pytest.mark.parametrize(
    ("weight_map", "shard_of", "fault"),
    [
        ({"a": "x", "b": "y"}, {"a": "x", "b": "x"}, "puts tensor b into shard y, but it is in x"),
        ({"a": "x"}, {"a": "x", "b": "y"}, "does not name tensor b, which is in shard y"),
        ({"a": "x", "b": "y"}, {"a": "x"}, "puts tensor b into shard y, which has no such tensor"),
        ({"a": "x"}, {"b": "x"}, "does not name tensor b, which is in shard x"),
    ],
)
def test_map_and_shards_must_agree(weight_map: dict[str, str], shard_of: dict[str, str], fault: str) -> None:
    check_agreement(shard_of, shard_of, "f")
    with pytest.raises(DamagedError, match=fault):
        check_agreement(weight_map, shard_of, "f")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["model.safetensors", "other.safetensors"],
        ["m-00001-of-00001.safetensors"],
        ["m-00002-of-00002.safetensors", "m-00001-of-00002.safetensors"],
        ["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"],
        ["m-1-of-2.safetensors", "m-2-of-2.safetensors", "n-1-of-1.safetensors", "m-1-of-1.safetensors"],
        ["a/m-1-of-1.safetensors", "b/m-1-of-1.safetensors"],
        ["m-1-of-x.safetensors"],
        ["m-2-of-2.safetensors.bak"],
    ],
)
def test_complete_sets_of_numbered_shards(names: list[str]) -> None:
    check_sets_complete(names, "f")


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (
            ["m-00001-of-00003.safetensors", "m-00002-of-00003.safetensors"],
            "one of 3 shards, of which 2 .* number 3 is not",
        ),
        (["m-00002-of-00002.safetensors"], "number 1 is not"),
        (["m-00000-of-00002.safetensors"], "number 1 is not"),
        (["m-00000-of-00002.safetensors", "m-00002-of-00002.safetensors"], "number 1 is not"),
        (["m-00001-of-00002.safetensors", "m-00003-of-00002.safetensors"], "number 2 is not"),
        (["m-1-of-2.safetensors", "m-01-of-2.safetensors"], "have the same number"),
        (["m-0-of-0.safetensors"], "one of 0 shards"),
        (["sub/m-1-of-2.safetensors", "m-2-of-2.safetensors"], "number 1 is not"),
        (["m-1-of-999999999999999999999.safetensors"], "one of 999999999999999999999 shards"),
    ],
)
def test_incomplete_sets_of_numbered_shards(names: list[str], fault: str) -> None:
    with pytest.raises(DamagedError, match=fault):
        check_sets_complete(names, "f")
