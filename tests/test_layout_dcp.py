"""Shards of PyTorch's distributed checkpoint: what their headers say, and what they may not say.

With PyTorch, its own writer is asked, with two processes; more of them in slow/test_dcp_worlds.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Ran, Run, is_failure
from dcr_cli import apply, diff, verify
from dcr_cli.cli import main
from dcr_cli.errors import DamagedError, UnsupportedError
from dcr_cli.inspect import inspect
from dcr_cli.layout.document import read_layout
from dcr_cli.layout.opening import is_sharded, open_any
from layouts import Cut, cut_rows, dcp_metadata, dcp_name, part_of, run_world, write_dcp
from receivers import tree
from strategies import TensorData, shard_bytes, tensor_of, with_changes, write_checkpoint

SIDECARS = {"config.json": b"{}\n"}


def tensors() -> dict[str, TensorData]:
    """Odd numbers of rows, a tensor cut by columns, one of one row, a scalar, and one without elements."""
    return {
        "embed": tensor_of("BF16", (37, 6)),
        "out": tensor_of("F8_E4M3", (8, 10)),
        "one": tensor_of("F32", (1, 4)),
        "scale": tensor_of("F32", ()),
        "none": ("I32", (0, 4), b""),
        "packed": tensor_of("F4", (4, 6)),
    }


def cuts() -> list[list[Cut]]:
    """As three ranks hold them: 13, 13 and 11 rows; a row on the first one; columns; and the rest on any one."""
    ranks: list[list[Cut]] = [
        [*each] for each in zip(cut_rows("embed", (37, 6), 3), cut_rows("one", (1, 4), 3), strict=True)
    ]
    for rank, (begin, count) in enumerate([(0, 4), (4, 3), (7, 3)]):
        ranks[rank].append(("out", (0, begin), (8, count)))
    ranks[1].append(("scale", (), ()))
    ranks[2] += [("none", (0, 0), (0, 4)), ("packed", (0, 0), (4, 6))]
    return ranks


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A dense base and target, and the target's shards."""
    old = tensors()
    new = {**old, "embed": with_changes(old["embed"], [0, 77, 78, 221]), "out": with_changes(old["out"], [6, 79])}
    base = write_checkpoint(tmp_path / "base", old, shards=2, sidecars=SIDECARS)
    dense = write_checkpoint(tmp_path / "dense", new, shards=2, sidecars=SIDECARS)
    return base, dense, write_dcp(tmp_path / "ranks", new, cuts())


def test_shards_are_read_with_nothing_said(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, dense, ranks = pair
    assert is_sharded(ranks)
    diff(base, dense, tmp_path / "dense-delta")
    diff(base, ranks, tmp_path / "delta")
    assert tree(tmp_path / "delta") == tree(tmp_path / "dense-delta")
    apply(tmp_path / "delta", base)
    assert verify(ranks, against=base).matches and verify(ranks, delta=tmp_path / "delta").matches


def test_shards_of_one_world_are_compared_with_those_of_another(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, _, ranks = pair
    old = tensors()
    two: list[list[Cut]] = [[each] for each in cut_rows("embed", (37, 6), 2)]
    two[1] += [(name, (0,) * len(old[name][1]), old[name][1]) for name in old if name != "embed"]
    other = write_dcp(tmp_path / "two", old, two)
    assert diff(other, ranks).changed_elements == diff(base, ranks).changed_elements == 6
    assert diff(other, base).changed_elements == 0


def test_without_a_base_tensors_are_as_large_as_their_shards_need(pair: tuple[Path, Path, Path]) -> None:
    _, dense, ranks = pair
    found = {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in open_any(ranks).tensors}
    assert found == {tensor.name: (tensor.dtype.name, tensor.shape) for tensor in open_any(dense).tensors}


def test_inspect_says_that_they_are_shards(pair: tuple[Path, Path, Path]) -> None:
    _, dense, ranks = pair
    found = inspect(ranks)
    assert found.laid is not None and found.laid.layout == str(ranks)
    assert (len(found.shards), found.laid.local_tensors) == (3, 12)
    assert found.dtypes == inspect(dense).dtypes


def test_replicas_are_compared(tmp_path: Path) -> None:
    old = {"norm": tensor_of("F32", (8,)), "w": tensor_of("BF16", (4, 4))}
    base = write_checkpoint(tmp_path / "base", old, sidecars=SIDECARS)
    norm: Cut = ("norm", (0,), (8,))
    ranks = write_dcp(tmp_path / "ranks", old, [[norm, ("w", (0, 0), (2, 4))], [norm, ("w", (2, 0), (2, 4))]])
    assert diff(base, ranks).same
    parts = {"norm": with_changes(old["norm"], [5]), "w": part_of(old["w"], (2, 0), (2, 4))}
    (ranks / dcp_name(2)).write_bytes(shard_bytes(parts, dcp_metadata({"norm": (0,), "w": (2, 0)})))
    with pytest.raises(DamagedError, match=r"tensor norm: element 5 is 0x\w{8} in norm of shard-00001.*, but 0x"):
        diff(base, ranks)


@pytest.mark.parametrize(
    ("rank", "match", "hint"),
    [
        (1, r"tensor embed: element \[0, 0\] is in no shard", "there are shard-00002 to shard-00003"),
        (2, r"tensor embed: element \[13, 0\] is in no shard", "there are shard-00001, shard-00003"),
        (3, r"tensor embed: element \[26, 0\] is in no shard", "there are shard-00001 to shard-00002"),
    ],
)
def test_a_missing_shard_is_told_by_the_others(pair: tuple[Path, Path, Path], rank: int, match: str, hint: str) -> None:
    (pair[2] / dcp_name(rank)).unlink()
    before = tree(pair[2].parent)
    with pytest.raises(DamagedError, match=match) as caught:
        diff(pair[0], pair[2], pair[2].parent / "delta")
    assert caught.value.hint == f"{hint}: is another one missing?"
    assert tree(pair[2].parent) == before


def test_swapped_offsets_are_what_they_say(pair: tuple[Path, Path, Path]) -> None:
    """Two ranks that hold the same number of rows and say the other's offsets are a valid checkpoint, another one."""
    base, _, ranks = pair
    new = tensors()
    for rank, begin in ((1, 13), (2, 0)):
        parts = {name: part_of(new[name], starts, shape) for name, starts, shape in cuts()[rank - 1]}
        offsets = {name: starts for name, starts, _ in cuts()[rank - 1]} | {"embed": (begin, 0)}
        (ranks / dcp_name(rank)).write_bytes(shard_bytes(parts, dcp_metadata(offsets)))
    found = verify(ranks, against=base)
    assert not found.matches and any(each.first_index == (0, 0) for each in found.differences)


def say(ranks: Path, rank: int, info: Any, **tensors_too: TensorData) -> None:
    """Write a rank's shard with another DCP_SHARDING_INFO, text or JSON, or without it."""
    new = tensors()
    parts = {name: part_of(new[name], starts, shape) for name, starts, shape in cuts()[rank - 1]}
    metadata = {"format": "pt", "DCP_VERSION": "1.0"}
    if info is not None:
        metadata["DCP_SHARDING_INFO"] = info if isinstance(info, str) else json.dumps(info)
    (ranks / dcp_name(rank)).write_bytes(shard_bytes({**parts, **tensors_too}, metadata))


def info_with(rank: int, name: str, member: Any) -> dict[str, Any]:
    info: dict[str, Any] = {name: {"saved_offsets": list(starts)} for name, starts, _ in cuts()[rank - 1]}
    return {**info, name: member}


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (None, "it has no DCP_SHARDING_INFO, which others have"),
        ("", "DCP_SHARDING_INFO: is not valid JSON"),
        ("[]", "DCP_SHARDING_INFO is not an object of tensors"),
        ('{"embed": {}, "embed": {}}', "duplicate key embed"),
        ("[" * 1000, "DCP_SHARDING_INFO: is"),
        ({}, "DCP_SHARDING_INFO has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", [13, 0]), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": "13"}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": ["13", "0"]}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": [13, -1]}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": [13, 0.0]}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": [13, True]}), "has no saved_offsets of tensor embed"),
        (info_with(2, "embed", {"saved_offsets": [13]}), r"tensor embed has shape \[13, 6\] and saved_offsets \[13\]"),
        (info_with(2, "embed", {"saved_offsets": [13, 0, 0]}), r"saved_offsets \[13, 0, 0\]"),
        (info_with(2, "scale", {"saved_offsets": [0]}), r"tensor scale has shape \[\] and saved_offsets \[0\]"),
        (
            info_with(2, "embed", {"saved_offsets": [25, 0]}),
            r"is BF16 \[13, 6\] from \[25, 0\] on, the whole of it BF16",
        ),
        (
            info_with(2, "embed", {"saved_offsets": [13, 1]}),
            r"is BF16 \[13, 6\] from \[13, 1\] on, the whole of it BF16",
        ),
        (info_with(2, "embed", {"saved_offsets": [2**64 - 1, 0]}), "the whole of it BF16"),
        (info_with(2, "embed", {"saved_offsets": [14, 0]}), r"element \[26, 0\] is in .*, which overlap in part"),
        (info_with(2, "embed", {"saved_offsets": [12, 0]}), r"element \[12, 0\] is in .*, which overlap in part"),
    ],
)
def test_what_headers_lie_about_is_refused(pair: tuple[Path, Path, Path], info: Any, match: str) -> None:
    base, _, ranks = pair
    say(ranks, 2, info)
    before = tree(ranks.parent)
    with pytest.raises(DamagedError, match=match):
        diff(base, ranks, ranks.parent / "delta")
    assert tree(ranks.parent) == before


def test_the_end_that_is_missing_is_not_missed_without_a_base(pair: tuple[Path, Path, Path]) -> None:
    """A header does not say how large the whole is; so a base, or a layout, has to."""
    (pair[2] / dcp_name(3)).unlink()
    found = open_any(pair[2])
    assert found.by_name["embed"].shape == (26, 6)


def test_tensors_that_the_base_has_not_are_named(pair: tuple[Path, Path, Path]) -> None:
    base, _, ranks = pair
    say(ranks, 2, info_with(2, "new", {"saved_offsets": [0]}), new=tensor_of("F32", (2,)))
    with pytest.raises(DamagedError, match=r"shard-00002-.*: tensor new is not in the base") as caught:
        diff(base, ranks)
    assert caught.value.hint == "the base has to be a checkpoint with all tensors of the shards"


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_tied(root: Path, embedding: TensorData, head: TensorData) -> Path:
    """Write the embedding and the output layer by rows, as two ranks hold them."""
    names = {EMBEDDING: embedding, HEAD: head, "model.layers.1.embed_tokens.weight": embedding}
    ranks = [[rows[rank] for rows in (cut_rows(name, embedding[1], 2) for name in names)] for rank in (0, 1)]
    return write_dcp(root, names, ranks)


def test_a_tied_output_layer_that_the_base_has_not_is_the_embedding(tmp_path: Path) -> None:
    old = tensor_of("BF16", (9, 4))
    new = with_changes(old, [0, 35])
    other = "model.layers.1.embed_tokens.weight"
    base = write_checkpoint(tmp_path / "base", {EMBEDDING: old, other: old}, sidecars=SIDECARS)
    dense = write_checkpoint(tmp_path / "dense", {EMBEDDING: new, other: new}, sidecars=SIDECARS)
    ranks = write_tied(tmp_path / "ranks", new, new)
    diff(base, dense, tmp_path / "dense-delta")
    diff(base, ranks, tmp_path / "delta")
    assert tree(tmp_path / "delta") == tree(tmp_path / "dense-delta")
    # One that is not the same is no output layer that was tied.
    untied = write_tied(tmp_path / "untied", new, with_changes(new, [20]))
    with pytest.raises(DamagedError, match=rf"{EMBEDDING}: element \[5, 0\] is .* in {HEAD} of shard-00002"):
        diff(base, untied)
    # Where the base has both they are two tensors, as they are where it is not known which the embedding is.
    both = write_checkpoint(tmp_path / "both", {EMBEDDING: new, HEAD: new, other: new}, sidecars=SIDECARS)
    assert diff(both, untied).changed_elements == 1
    two = write_checkpoint(tmp_path / "two", {EMBEDDING: old, "wte.weight": old, other: old}, sidecars=SIDECARS)
    with pytest.raises(DamagedError, match=f"tensor {HEAD} is not in the base"):
        diff(two, ranks)


def test_a_layout_that_is_written_down_has_the_shapes_of_the_base(
    pair: tuple[Path, Path, Path], run: Run, tmp_path: Path
) -> None:
    """The files of the last rank are missing: without a base nobody knows."""
    base, _, ranks = pair
    assert run("layout", "show", ranks, "--base", base, "-o", tmp_path / "whole.json", "--json").json[
        "has_known_shapes"
    ]
    assert diff(base, ranks, layout=tmp_path / "whole.json").changed_elements == 6
    told = "  shapes     as far as these shards reach; --base CHECKPOINT says how large tensors are\n"
    for command in ("show", "check"):
        ran = run("layout", command, ranks)
        assert ran.code == 0 and told in ran.out
        assert told not in run("layout", command, ranks, "--base", base).out
        assert not run("layout", command, ranks, "--json").json["has_known_shapes"]
    (ranks / dcp_name(3)).unlink()
    assert read_shape(run("layout", "show", ranks, "--base", base, "-o", tmp_path / "of-base.json"), tmp_path) == 37
    missing = run("diff", base, ranks, "--layout", tmp_path / "of-base.json")
    assert is_failure(missing, 4, "tensor embed: element [26, 0] is in no shard")
    other = write_checkpoint(tmp_path / "other", {"embed": tensor_of("BF16", (37, 6))})
    assert is_failure(run("layout", "show", tmp_path / "whole.json", "--base", other), 4, "is not in")


def read_shape(ran: Ran, folder: Path) -> int:
    """How many rows a layout that was just written has of the embedding."""
    assert ran.code == 0, ran
    return read_layout(folder / "of-base.json").tensors["embed"].shape[0]


def test_shards_of_several_dtypes_or_ranks_are_refused(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank, dtype in ((1, "BF16"), (2, "F16")):
        metadata = dcp_metadata({"w": (2 * rank - 2,)})
        (ranks / dcp_name(rank)).write_bytes(shard_bytes({"w": tensor_of(dtype, (2,))}, metadata))
    with pytest.raises(DamagedError, match=r"shard-00002-.*: tensor w is F16 \[2\], in another shard BF16 \[2\]"):
        open_any(ranks)


def test_a_part_of_a_packed_tensor_is_unsupported(pair: tuple[Path, Path, Path]) -> None:
    base, _, ranks = pair
    parts = {"packed": ("F4", (2, 6), tensors()["packed"][2][:6])}
    (ranks / dcp_name(4)).write_bytes(shard_bytes(parts, dcp_metadata({"packed": (0, 0)})))
    with pytest.raises(UnsupportedError, match="tensor packed is a part of one of F4"):
        diff(base, ranks)


def test_a_stray_shard_is_named(pair: tuple[Path, Path, Path]) -> None:
    base, _, ranks = pair
    (ranks / "x.safetensors").write_bytes(shard_bytes({"x": tensor_of("U8", (1,))}))
    with pytest.raises(DamagedError, match=r"x\.safetensors: does not say .*no DCP_SHARDING_INFO, which others") as e:
        diff(base, ranks)
    assert "--layout" in str(e.value.hint) and "--skip" in str(e.value.hint)


def test_shards_that_say_nothing_need_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").mkdir()
    for rank in range(2):
        (tmp_path / "ranks" / f"rank-{rank}.safetensors").write_bytes(shard_bytes({"w": tensor_of("U8", (4,), rank)}))
    assert main(["layout", "check", str(tmp_path / "ranks")]) == 3
    assert "hint: give the file of one, as LAYOUT here and as --layout elsewhere" in capsys.readouterr().err


def test_what_was_joined_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    """Where PyTorch has put the shards together it says the offsets all the same, and writes a weight map."""
    new = tensors()
    offsets = {name: (0,) * len(shape) for name, (_, shape, _) in new.items()}
    joined = write_checkpoint(tmp_path / "joined", new, shards=2, metadata=dcp_metadata(offsets))
    assert not is_sharded(joined)
    assert open_any(joined).by_name.keys() == new.keys()


# PyTorch's own writer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PyTorch writes before and after a step, as two processes."""
    return run_world(tmp_path_factory.mktemp("world") / "two", 2)


def test_shards_that_pytorch_wrote_are_the_checkpoint_it_gathers(world: Path, tmp_path: Path) -> None:
    base, target = world / "before/gathered", world / "after/gathered"
    assert is_sharded(world / "after/sharded") and not is_sharded(world / "after/joined")
    dense = diff(base, target, tmp_path / "dense-delta")
    assert 0 < dense.changed_elements < dense.elements
    diff(base, world / "after/sharded", tmp_path / "delta")
    assert tree(tmp_path / "delta") == tree(tmp_path / "dense-delta")
    assert verify(world / "after/sharded", against=target).matches


def test_a_step_reaches_a_receiver_from_shards_alone(world: Path, tmp_path: Path) -> None:
    result = diff(world / "before/sharded", world / "after/sharded")
    assert result.changed_elements == diff(world / "before/gathered", world / "after/gathered").changed_elements
    diff(world / "before/gathered", world / "after/sharded", tmp_path / "delta")
    apply(tmp_path / "delta", world / "before/gathered", to=tmp_path / "receiver")
    assert tree(tmp_path / "receiver") == tree(world / "after/gathered")


def test_what_pytorch_joins_is_right_but_for_scalars(world: Path) -> None:
    """It writes zeros for a tensor of no dimensions; the shards hold what it was."""
    found = verify(world / "after/sharded", against=world / "after/joined")
    assert [(each.tensor, each.expected) for each in found.differences] == [("model.scale", "0x0000")]
    assert not found.missing and not found.extra
