"""The rules of a list of files: names, kinds and sizes of one checkpoint, in little memory whatever they are."""

from __future__ import annotations

import tracemalloc

import pytest

from dcr_cli.checkpoint.parts import SHARD, SIDECAR, WEIGHT_MAP
from dcr_cli.delta.file_rules import check_file_parts, check_file_sizes, check_skipped
from dcr_cli.errors import DamagedError

FILES = {
    "a/b.txt": SIDECAR,
    "a/model.safetensors": SHARD,
    "config.json": SIDECAR,
    "model.safetensors": SHARD,
    "model.safetensors.index.json": WEIGHT_MAP,
}


def parts(files: dict[str, int]) -> None:
    check_file_parts(sorted(files), [files[path] for path in sorted(files)], "list")


def test_a_checkpoint_s_files_are_fine() -> None:
    parts(FILES)
    parts({"model.safetensors": SHARD})
    parts({"consolidated.safetensors": SHARD})
    parts({f"model-0000{number}-of-00003.safetensors": SHARD for number in range(3)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": SIDECAR}, "file a is also the folder of another"),
        ({"a/b.txt/c/d": SIDECAR}, "file a/b.txt is also the folder"),
        ({"config.json/x": SIDECAR, "config.json-": SIDECAR}, "file config.json is also the folder"),
        ({"x": 0}, "file x has unknown kind 0"),
        ({"x": 4}, "file x has unknown kind 4"),
        ({"x": SHARD}, "file x is of kind 1, its name says otherwise"),
        ({"y.safetensors": SIDECAR}, "file y.safetensors is of kind 2"),
        ({"config.json": WEIGHT_MAP}, "config.json cannot be a weight map"),
        ({"b.safetensors.index.json": SIDECAR}, "has to be a weight map"),
        ({"b.safetensors.index.json": WEIGHT_MAP}, "more than one weight map"),
        ({"original/x": SIDECAR}, "second copy"),
        ({"model-00001-of-00002.safetensors": SHARD}, "is one of 2 shards"),
        ({"../x": SIDECAR}, "unsafe name"),
    ],
)
def test_what_is_no_checkpoint_s(change: dict[str, int], match: str) -> None:
    with pytest.raises(DamagedError, match=f"list: .*{match}"):
        parts(FILES | change)


def test_shards_without_a_weight_map() -> None:
    for files in (
        {"model.safetensors": SHARD, "a/model.safetensors": SHARD},
        {"model.safetensors": SHARD, "consolidated.safetensors": SHARD},
    ):
        with pytest.raises(DamagedError, match="is a shard that no weight map names"):
            parts(files)
    with pytest.raises(DamagedError, match="has 0 shards, 1 to 1048576 are allowed"):
        parts({"config.json": SIDECAR})


def test_many_deep_folders_take_little() -> None:
    """All folders of all paths together would be gigabytes."""
    paths = [f"{number:04}/{'a/' * 2000}a" for number in range(400)]
    files = [*paths, "model.safetensors"]
    tracemalloc.start()
    check_file_parts(files, [*[SIDECAR] * len(paths), SHARD], "list")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_sizes() -> None:
    sizes = {SHARD: (9, 100_000_008), SIDECAR: (0, 64 << 20), WEIGHT_MAP: (0, 100_000_000)}
    for kind, (least, most) in sizes.items():
        for size in (least, most):
            check_file_sizes(["x"], [kind], [size], "list")
        for size in (least - 1, most + 1):
            if size >= 0:
                with pytest.raises(DamagedError, match=f"list: file x has {size} bytes, more or less than its kind"):
                    check_file_sizes(["x"], [kind], [size], "list")
    names = [f"{number:02}" for number in range(17)]
    check_file_sizes(names[:16], [SIDECAR] * 16, [64 << 20] * 16, "list")
    with pytest.raises(DamagedError, match="sidecars have more than 1073741824 bytes together"):
        check_file_sizes(names, [SIDECAR] * 17, [*[64 << 20] * 16, 1], "list")
    check_file_sizes(names, [SHARD] * 17, [64 << 20] * 17, "list")


def test_paths_with_skip_patterns() -> None:
    """4097 paths of 4095 bytes are the most."""
    paths = ["/".join([f"{number:0255}"] * 16) for number in range(4098)]
    check_skipped(["x"], paths[1:], "list")
    check_skipped([], paths, "list")
    match = "list: its paths have 16781310 bytes together, with skip patterns at most 16777216 are allowed"
    with pytest.raises(DamagedError, match=match):
        check_skipped(["x"], paths, "list")


def test_skip_patterns() -> None:
    check_skipped(["*.bin", "original/"], ["a.json", "b/original"], "list")
    check_skipped(["x" * 16_384], ["y"], "list")
    for skipped, match in (
        (["*.bin", ""], "a pattern of skipped is empty"),
        (["x" * 8192, "\u00e9" * 4097], "have 16386 bytes, at most 16384 are allowed"),
        (["*.json"], r"file a.json is skipped by a pattern"),
        (["b/"], "file b/original is skipped by a pattern"),
    ):
        with pytest.raises(DamagedError, match=f"list: .*{match}"):
            check_skipped(skipped, ["a.json", "b/original"], "list")
