"""What show and inspect tell of deltas and checkpoints, and that a damaged delta is never shown as valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.digest import digest_text
from dcr_cli.diff import diff
from dcr_cli.errors import DcrError, NotFoundError
from dcr_cli.inspect import DtypeFacts, SidecarFacts, inspect
from dcr_cli.report import people
from dcr_cli.show import show
from dcr_kernels import reference
from receivers import tree, write_rich_pair
from strategies import every_dtype, tensor_of, with_changes, write_checkpoint


def test_show_agrees_with_diff(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = diff(*tiny_pair, tmp_path / "delta")
    result = show(tmp_path / "delta")
    assert (result.base, result.target) == (made.base, made.target)
    assert (result.tensors, result.elements, result.dense_bytes) == (made.tensors, made.elements, made.dense_bytes)
    assert (result.changed_tensors, result.changed_elements) == (3, 5)
    assert result.delta_bytes == made.delta_bytes
    assert {row.name: (row.encoding, row.bytes) for row in result.rows} == {
        row.name: (row.encoding, row.delta_bytes) for row in made.rows if row.kind != "same"
    }


def test_show_tells_added_removed_renamed_and_files(tmp_path: Path) -> None:
    base = {"a": tensor_of("F32", (300,)), "b": tensor_of("F32", (301,)), "c": tensor_of("F32", (302,))}
    target = {"a": with_changes(base["a"], [3]), "b2": base["b"], "new": tensor_of("I64", (100,))}
    write_checkpoint(tmp_path / "base", base, sidecars={"x": b"1", "y": b""})
    write_checkpoint(tmp_path / "target", target, sidecars={"x": b"2"})
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    result = show(tmp_path / "delta")
    assert (result.new, result.removed, result.renamed) == (("new",), ("c",), (("b", "b2"),))
    assert "x" in result.sent_files
    assert result.removed_files == ("y",)
    assert sum(encoding.bytes for encoding in result.encodings) == sum(row.bytes for row in result.rows)


@pytest.mark.parametrize("encoding", ["auto", "whole"])
def test_show_and_diff_use_the_same_words(tmp_path: Path, encoding: str) -> None:
    """Without the base, added and replaced are one; of what is sent whole, the changed elements are a bound."""
    made = diff(*write_rich_pair(tmp_path), tmp_path / "delta", encoding=encoding)
    result = show(tmp_path / "delta")
    assert sorted(result.new) == sorted((*made.added, *made.replaced)) != []
    assert (
        (result.removed, result.renamed)
        == (made.removed, made.renamed)
        == (("c.removed",), (("d.old_name", "d.new_name"),))
    )
    assert result.changed_tensors == made.changed_tensors
    assert result.changed_elements - result.whole_elements <= made.changed_elements <= result.changed_elements
    assert result.whole_elements > 0
    by_name = {row.name: row for row in made.rows}
    for row in result.rows:
        assert row.is_whole or row.changed_elements == by_name[row.name].changed_elements
    text = people.render(people.show_lines(result, verbose=True), None)
    assert f"at most {result.changed_elements:,} changed" in text
    assert f"new        {len(result.new)} added or replaced: " in text


def test_equal_to_another_tensor_of_the_base_is_replaced(tmp_path: Path) -> None:
    """A tensor that is now what another one is has not stayed the same."""
    base = {"a": tensor_of("F32", (2048,), 1), "b": tensor_of("F32", (2048,), 2)}
    write_checkpoint(tmp_path / "base", base)
    write_checkpoint(tmp_path / "target", {"a": base["a"], "b": base["a"]})
    made = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    assert [(row.name, row.kind) for row in made.rows] == [("a", "same"), ("b", "replaced")]
    assert (made.replaced, show(tmp_path / "delta").new) == (("b",), ("b",))


@pytest.mark.parametrize("changed", [[], [7]])
def test_in_another_shape_is_replaced(tmp_path: Path, changed: list[int]) -> None:
    """Its elements are coded against what they were all the same."""
    old, same = tensor_of("F32", (64, 32), 1), tensor_of("F32", (4,), 2)
    dtype, _, content = with_changes(old, changed)
    write_checkpoint(tmp_path / "base", {"a": old, "b": same})
    write_checkpoint(tmp_path / "target", {"a": (dtype, (32, 64), content), "b": same})
    made = diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    result = show(tmp_path / "delta")
    assert [(row.name, row.kind, row.source) for row in made.rows] == [("a", "replaced", "a"), ("b", "same", "b")]
    assert (result.new, result.changed_tensors) == (made.replaced, made.changed_tensors) == (("a",), 0)
    assert [(row.name, row.changed_elements, row.is_whole) for row in result.rows] == [("a", 0, False)] * len(changed)
    apply(tmp_path / "delta", tmp_path / "base")
    assert tree(tmp_path / "base") == tree(tmp_path / "target")


def test_any_flipped_byte_of_a_delta_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff(*tiny_pair, tmp_path / "delta")
    for path in sorted(file for file in (tmp_path / "delta").rglob("*") if file.is_file()):
        whole = path.read_bytes()
        if path.name == "commit.json":
            continue  # Its own bytes are bound by nothing; what they bind is checked in test_commit.
        for position in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            with pytest.raises(DcrError) as caught:
                show(tmp_path / "delta")
            assert caught.value.exit_code == 4
        path.write_bytes(whole)
    show(tmp_path / "delta")


def test_what_is_no_delta_is_not_found(tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(NotFoundError, match="no delta"):
        show(tiny_pair[0])


def test_inspect_counts(tiny_pair: tuple[Path, Path]) -> None:
    result = inspect(tiny_pair[0])
    assert (result.tensors, result.elements, result.dense_bytes) == (4, 16384, 32768)
    assert result.dtypes == (DtypeFacts("BF16", 4, 16384, 32768),)
    assert [(shard.path, shard.tensors) for shard in result.shards] == [
        ("model-00001-of-00002.safetensors", 2),
        ("model-00002-of-00002.safetensors", 2),
    ]
    assert SidecarFacts("config.json", 23, "sidecar") in result.sidecars
    assert [file.path for file in result.sidecars if file.kind == "weight map"] == ["model.safetensors.index.json"]
    assert result.state is None and result.rows == ()


def test_inspect_digests_are_those_of_diff(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", every_dtype(), shards=3, sidecars={"a/b": b"1"})
    found = inspect(tmp_path / "checkpoint", digest=True, tensors=True, jobs=3)
    assert found.state == diff(tmp_path / "checkpoint", tmp_path / "checkpoint").base
    assert [row.name for row in found.rows] == sorted(every_dtype())
    assert all(row.digest is not None and row.digest.startswith("sum:") for row in found.rows)


def test_digests_of_many_blocks_add_up(tmp_path: Path) -> None:
    tensors = {"w": tensor_of("F32", (3, 150_001)), "x": tensor_of("U8", (524_289,)), "y": tensor_of("I8", (7,))}
    write_checkpoint(tmp_path / "checkpoint", tensors)
    found = inspect(tmp_path / "checkpoint", digest=True, tensors=True, jobs=3)
    assert found.state == diff(tmp_path / "checkpoint", tmp_path / "checkpoint").base
    expected = {name: digest_text(reference.digest(data)) for name, (_, _, data) in tensors.items()}
    assert {row.name: row.digest for row in found.rows} == expected
