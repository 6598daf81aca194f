"""Shards seen through a layout: the same delta as from the dense checkpoint, and no shard that is taken for another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli import apply, check_layout, diff, verify
from dcr_cli.checkpoint import checkpoint as checkpoints
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import main
from dcr_cli.errors import (
    ConflictError,
    DamagedError,
    DcrError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from dcr_cli.inspect import inspect
from dcr_cli.layout.gather import Gatherer
from dcr_cli.layout.opening import is_sharded, open_any
from dcr_cli.layout.shards import open_shards
from layouts import array_of, layout_bytes, layout_document, local
from receivers import tree
from strategies import TensorData, every_dtype, shard_bytes, tensor_of, tiny_tensors, with_changes, write_checkpoint

SIDECARS = {"config.json": b"{}\n", "tokenizer/vocab.txt": b"a\n"}
DTYPE, ROWS, COLUMNS = "BF16", 64, 48


def canonical_tensors() -> dict[str, TensorData]:
    """A query, gate and up projection, a down projection that is transposed, a norm on every rank, a step count."""
    tensors = {
        name: tensor_of(DTYPE, (ROWS, COLUMNS), number) for number, name in enumerate(["q", "gate", "up", "down"])
    }
    return {**tensors, "norm": tensor_of("F32", (COLUMNS,)), "step": tensor_of("I64", ()), "none": ("F16", (0, 3), b"")}


def joined(*parts: np.ndarray) -> TensorData:
    made = np.concatenate(parts)
    return DTYPE, made.shape, made.tobytes()


def rank_files(tensors: dict[str, TensorData]) -> dict[str, tuple[dict[str, TensorData], dict[str, Any]]]:
    """What each of two ranks holds, and what a layout says of it."""
    files: dict[str, tuple[dict[str, TensorData], dict[str, Any]]] = {}
    q, gate, up, down = (array_of(tensors[name]) for name in ("q", "gate", "up", "down"))
    rows, columns = ROWS // 2, COLUMNS // 2
    for rank in range(2):
        mine = slice(rank * rows, (rank + 1) * rows)
        fused = joined(gate[mine], up[mine])
        half = np.ascontiguousarray(q[:, rank * columns : (rank + 1) * columns])
        turned = np.ascontiguousarray(down[mine].T)
        padded = joined(half, np.zeros((2, columns), half.dtype))
        held = {
            "gate_up": fused,
            "q": padded,
            "down.T": (DTYPE, turned.shape, turned.tobytes()),
            "norm": tensors["norm"],
            "scratch": tensor_of("U8", (5,), rank),
        }
        size, at = rows * COLUMNS, rank * rows * COLUMNS
        said = {
            "gate_up": local(fused, [["gate", at, 0, [[size, 1, 1]]], ["up", at, size, [[size, 1, 1]]]]),
            "q": local(padded, [["q", rank * columns, 0, [[ROWS, COLUMNS, columns], [columns, 1, 1]]]], fill="zero"),
            "down.T": local(held["down.T"], [["down", at, 0, [[rows, COLUMNS, 1], [COLUMNS, 1, rows]]]]),
            "norm": local(tensors["norm"], [["norm", 0, 0, [[COLUMNS, 1, 1]]]]),
            "scratch": local(held["scratch"], []),
        }
        if rank:
            held |= {"step": tensors["step"], "none": tensors["none"]}
            said |= {"step": local(tensors["step"], [["step", 0, 0, []]]), "none": local(tensors["none"], [])}
        files[f"rank-{rank}.safetensors"] = held, said
    return files


class Case:
    """A dense pair, the shards of its target, and their layout, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_tensors = canonical_tensors()
        self.tensors = dict(self.base_tensors)
        for name, positions in (("q", [0, 47, 3071]), ("up", [1600]), ("down", [48, 49]), ("norm", [1]), ("step", [0])):
            self.tensors[name] = with_changes(self.tensors[name], positions)
        self.base = write_checkpoint(folder / "base", self.base_tensors, shards=2, sidecars=SIDECARS)
        self.dense = write_checkpoint(folder / "dense", self.tensors, shards=2, sidecars=SIDECARS)
        self.ranks, self.layout = folder / "ranks", folder / "layout.json"
        self.ranks.mkdir()
        self.files = rank_files(self.tensors)
        for path, (held, _) in self.files.items():
            (self.ranks / path).write_bytes(shard_bytes(held))
        self.document = layout_document(self.tensors, {path: said for path, (_, said) in self.files.items()})
        self.say()

    def say(self) -> None:
        """Write the layout as it is now."""
        self.layout.write_bytes(layout_bytes(self.document))

    def hold(self, path: str, **tensors: TensorData | None) -> None:
        """Write a shard again with some tensors changed, or without them."""
        held = {name: tensor for name, tensor in {**self.files[path][0], **tensors}.items() if tensor is not None}
        (self.ranks / path).write_bytes(shard_bytes(held))

    def refused(self, match: str, kind: type[DcrError] = DamagedError) -> DcrError:
        """Both commands that read through a layout refuse, and leave nothing behind."""
        before = tree(self.folder)
        with pytest.raises(kind, match=match):
            verify(self.ranks, against=self.base, layout=self.layout)
        with pytest.raises(kind, match=match) as caught:
            diff(self.base, self.ranks, self.folder / "delta", layout=self.layout)
        assert tree(self.folder) == before
        return caught.value


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_delta_is_that_of_the_dense_checkpoint(case: Case) -> None:
    dense = diff(case.base, case.dense, case.folder / "dense-delta")
    laid = diff(case.base, case.ranks, case.folder / "delta", layout=case.layout)
    assert tree(case.folder / "delta") == tree(case.folder / "dense-delta")
    assert laid.target == dense.target and laid.changed_elements == dense.changed_elements == 8
    apply(case.folder / "delta", case.base)
    assert verify(case.base, against=case.dense).matches


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("encoding", ["auto", "gap", "whole"])
def test_whatever_the_threads_and_the_encoding(case: Case, jobs: int, encoding: str) -> None:
    diff(case.base, case.dense, case.folder / "dense-delta", encoding=encoding, jobs=1)
    diff(case.base, case.ranks, case.folder / "delta", layout=case.layout, encoding=encoding, jobs=jobs)
    assert tree(case.folder / "delta") == tree(case.folder / "dense-delta")


def test_a_base_may_be_shards_too(case: Case) -> None:
    """A single shard is thought of then; the delta leads to the tensors of the target all the same."""
    result = diff(case.ranks, case.dense, base_layout=case.layout)
    assert result.changed_elements == 0
    both = diff(case.ranks, case.ranks, layout=case.layout, base_layout=case.layout)
    assert both.same


def test_shards_can_be_what_is_compared_with(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(case.dense, against=case.ranks, against_layout=case.layout).matches
    assert verify(case.ranks, layout=case.layout, against=case.ranks, against_layout=case.layout).matches
    assert not verify(case.base, against=case.ranks, against_layout=case.layout).matches
    command = ["verify", str(case.dense), "--against", str(case.ranks), "--against-layout", str(case.layout)]
    assert main(command) == 0
    assert main([*command[:2], *command[4:]]) == 2
    assert "--against-layout needs --against" in capsys.readouterr().err
    with pytest.raises(UsageError, match="a layout of what is compared with needs that"):
        verify(case.dense, against_layout=case.layout)


def test_every_dtype_is_read(tmp_path: Path) -> None:
    tensors = every_dtype()
    base = write_checkpoint(tmp_path / "base", tensors)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    said = {}
    for name, tensor in tensors.items():
        said[name] = local(tensor, [[name, 0, 0, [[array_of(tensor).size, 1, 1]]]])
    (ranks / "a.safetensors").write_bytes(shard_bytes(tensors))
    layout = tmp_path / "layout.json"
    layout.write_bytes(layout_bytes(layout_document(tensors, {"a.safetensors": said})))
    assert diff(base, ranks, layout=layout).same


def test_verify_says_where_shards_differ(case: Case) -> None:
    assert verify(case.ranks, against=case.dense, layout=case.layout).matches
    found = verify(case.ranks, against=case.base, layout=case.layout)
    assert not found.matches and found.checked_tensors == 7
    assert {each.tensor: each.first_index for each in found.differences} == {
        "q": (0, 0), "up": (33, 16), "down": (1, 0), "norm": (1,), "step": ()
    }  # fmt: skip


def test_verify_compares_shards_with_a_delta(case: Case) -> None:
    """What lies beside a dense checkpoint need not lie beside shards; what does, counts."""
    diff(case.base, case.dense, case.folder / "delta")
    assert verify(case.ranks, delta=case.folder / "delta", layout=case.layout).matches
    (case.ranks / "config.json").write_bytes(b"[]\n")
    found = verify(case.ranks, delta=case.folder / "delta", layout=case.layout)
    assert [(each.path, each.kind) for each in found.sidecars] == [("config.json", "bytes")]
    (case.ranks / "config.json").write_bytes(SIDECARS["config.json"])
    case.hold("rank-0.safetensors", norm=case.base_tensors["norm"])
    case.hold("rank-1.safetensors", norm=case.base_tensors["norm"])
    found = verify(case.ranks, delta=case.folder / "delta", layout=case.layout)
    assert [each.tensor for each in found.differences] == ["norm"]


def test_sidecars_are_those_of_the_base_but_for_own_ones(case: Case) -> None:
    (case.ranks / "config.json").write_bytes(b'{"new": 1}\n')
    (case.ranks / "step.txt").write_bytes(b"2\n")
    diff(case.base, case.ranks, case.folder / "delta", layout=case.layout)
    apply(case.folder / "delta", case.base, to=case.folder / "out")
    files = tree(case.folder / "out")
    assert files["config.json"] == b'{"new": 1}\n' and files["step.txt"] == b"2\n"
    assert files["tokenizer/vocab.txt"] == SIDECARS["tokenizer/vocab.txt"]


def test_a_weight_map_beside_shards_is_not_that_of_the_target(case: Case) -> None:
    """It names tensors of the shards; those of the target lie in the files of the base."""
    (case.ranks / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"q": "rank-0.safetensors"}}')
    assert diff(case.base, case.ranks, layout=case.layout).files_changed == ()
    diff(case.base, case.ranks, case.folder / "delta", layout=case.layout)
    apply(case.folder / "delta", case.base)
    assert tree(case.base) == tree(case.dense)
    assert diff(case.dense, case.ranks, layout=case.layout).same


def test_skipped_tensors_are_unchanged_and_not_counted_as_verified(case: Case) -> None:
    del case.document["shards"]["rank-1.safetensors"]["step"]
    case.document["skipped"] = ["step"]
    case.say()
    case.hold("rank-1.safetensors", step=None)
    assert diff(case.base, case.ranks, layout=case.layout).changed_elements == 7
    found = verify(case.ranks, against=case.dense, layout=case.layout)
    assert found.matches and found.checked_tensors == 6
    with pytest.raises(UnsupportedError, match="skips tensors, and there is no base to take them from: step"):
        diff(case.ranks, case.dense, base_layout=case.layout)


def test_shards_in_subfolders_are_read(case: Case) -> None:
    (case.ranks / "tp-1").mkdir()
    (case.ranks / "rank-1.safetensors").rename(case.ranks / "tp-1/model.safetensors")
    (case.ranks / "tp-1/notes.txt").write_bytes(b"beside a rank's shard, and nobody's")
    case.document["shards"]["tp-1/model.safetensors"] = case.document["shards"].pop("rank-1.safetensors")
    case.say()
    assert verify(case.ranks, against=case.dense, layout=case.layout).matches


def test_tensors_need_not_be_aligned(case: Case) -> None:
    for path, (held, _) in case.files.items():
        shifted = {"scratch": held["scratch"], **held}
        assert next(iter(shifted)) == "scratch" and len(shifted["scratch"][2]) % 2
        (case.ranks / path).write_bytes(shard_bytes(shifted))
    assert verify(case.ranks, against=case.dense, layout=case.layout).matches


# What is refused


def box(case: Case, name: str, path: str = "rank-0.safetensors", number: int = 0) -> list[Any]:
    found: list[Any] = case.document["shards"][path][name]["boxes"][number]
    return found


def test_a_missing_shard_is_named(case: Case) -> None:
    (case.ranks / "rank-1.safetensors").unlink()
    case.refused(r"ranks: shards of the layout are missing: rank-1\.safetensors")


def test_a_missing_shard_that_no_layout_names_leaves_a_gap(case: Case) -> None:
    (case.ranks / "rank-1.safetensors").unlink()
    del case.document["shards"]["rank-1.safetensors"]
    case.say()
    error = case.refused(r"layout .*layout\.json: tensor q: element \[0, 24\] is in no shard")
    assert error.hint == "is the shard of a rank missing?"


def test_a_gap_is_named_by_its_first_element(case: Case) -> None:
    box(case, "down.T")[3][0][0] = 31
    case.say()
    case.refused(r"tensor down: element \[31, 0\] is in no shard")


def test_a_tensor_in_no_shard_is_named(case: Case) -> None:
    del case.document["shards"]["rank-1.safetensors"]["step"]
    case.say()
    case.hold("rank-1.safetensors", step=None)
    case.refused(r"tensor step: is in no shard")


def test_an_overlap_is_named_with_both_shards(case: Case) -> None:
    box(case, "gate_up", "rank-1.safetensors")[1] -= COLUMNS
    case.say()
    case.refused(
        r"tensor gate: element \[31, 0\] is in gate_up of rank-0\.safetensors and in gate_up of rank-1\.safetensors, "
        "which overlap in part"
    )


def test_swapped_ranks_are_seen_where_replicas_tell(case: Case) -> None:
    """Where two shards have the same form, only what both hold tells them apart."""
    case.hold("rank-1.safetensors", norm=case.base_tensors["norm"])
    old, new = (int(array_of(tensors["norm"])[1]) for tensors in (case.tensors, case.base_tensors))
    case.refused(
        rf"tensor norm: element 1 is 0x{old:08x} in norm of rank-0\.safetensors, but 0x{new:08x} in norm of rank-1"
    )


def test_swapped_shards_of_other_forms_are_refused(case: Case) -> None:
    first, second = case.ranks / "rank-0.safetensors", case.ranks / "rank-1.safetensors"
    first.rename(case.ranks / "x")
    second.rename(first)
    (case.ranks / "x").rename(second)
    case.refused(r"rank-0\.safetensors: tensors are in no rule of layout .*: step, none")


def test_a_local_tensor_that_is_absent_is_named(case: Case) -> None:
    case.hold("rank-0.safetensors", q=None)
    case.refused(r"rank-0\.safetensors: tensor q of layout .* is missing")


def test_an_unknown_local_tensor_is_named(case: Case) -> None:
    case.hold("rank-0.safetensors", lora=tensor_of("F32", (2,)))
    case.refused(r"rank-0\.safetensors: tensors are in no rule of layout .*: lora")


def test_a_shard_of_no_rule_is_named(case: Case) -> None:
    (case.ranks / "rank-2.safetensors").write_bytes(shard_bytes({"x": tensor_of("U8", (1,))}))
    error = case.refused(r"rank-2\.safetensors: is in no rule of layout")
    assert error.hint is not None and "--skip 'rank-2.safetensors'" in error.hint
    assert verify(case.ranks, against=case.dense, layout=case.layout, skip=["rank-2.safetensors"]).matches


@pytest.mark.parametrize(
    ("tensor", "found"),
    [(tensor_of("F16", (66, 24)), r"F16 \[66, 24\]"), (tensor_of("BF16", (24, 66)), r"BF16 \[24, 66\]")],
)
def test_a_form_that_is_another_is_named(case: Case, tensor: TensorData, found: str) -> None:
    case.hold("rank-0.safetensors", q=tensor)
    case.refused(rf"rank-0\.safetensors: tensor q is {found}, BF16 \[66, 24\] expected by layout")


def test_canonical_tensors_are_those_of_the_base(case: Case) -> None:
    case.document["tensors"]["q"]["shape"] = [32, 96]
    case.say()
    case.refused(r"layout\.json: tensor q is BF16 \[32, 96\], in .*base it is BF16 \[64, 48\]")
    case.document["tensors"]["q"]["shape"] = [64, 48]
    case.document["tensors"]["extra"] = {"dtype": "F32", "shape": [0]}
    case.say()
    case.refused(r"layout\.json: tensor extra is not in .*base")
    del case.document["tensors"]["extra"], case.document["tensors"]["none"]
    case.say()
    case.refused(r"layout\.json: tensors of .*base are in no shard: none")


def test_malformed_shards_and_unsafe_names_are_refused(case: Case) -> None:
    (case.ranks / "rank-1.safetensors").write_bytes(b"\0" * 7)
    case.refused(r"rank-1\.safetensors: has 7 bytes, too few for a safetensors file")


def test_files_beside_the_shards_are_judged_as_those_of_a_checkpoint(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case.ranks / "pytorch_model.bin").write_bytes(b"x")
    case.refused(r"pytorch_model\.bin: would be a second copy of the weights")
    (case.ranks / "pytorch_model.bin").unlink()
    monkeypatch.setattr(checkpoints, "MAX_SIDECARS_BYTES", 9)
    (case.ranks / "large.txt").write_bytes(b"0123456789")
    with pytest.raises(DamagedError, match=r"its files beside the shards have \d+ bytes, more than the 9 allowed"):
        open_any(case.ranks, layout=case.layout)


def test_a_folder_in_which_an_apply_was_stopped_is_not_read(case: Case) -> None:
    (case.ranks / ".dcr").mkdir()
    (case.ranks / ".dcr/in-progress").write_bytes(b"{}")
    case.refused("ranks", IncompleteError)


def test_a_folder_without_shards_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"checkpoint .*: holds no shards: it has no \*\.safetensors file"):
        open_shards(tmp_path)
    with pytest.raises(NotFoundError, match=r"target .*no such folder"):
        open_shards(tmp_path / "none", what="target")


def test_shards_that_change_while_they_are_read_are_a_conflict(case: Case) -> None:
    laid = open_any(case.ranks, layout=case.layout, like=open_checkpoint(case.base))
    os.utime(case.ranks / "rank-0.safetensors", ns=(1, 1))
    with laid.reader() as reader:
        with pytest.raises(ConflictError, match=r"rank-0\.safetensors: changed while reading"):
            reader.read_into(laid.by_name["q"], 0, bytearray(48))
        with pytest.raises(ConflictError):
            reader.check_unchanged()


def test_replicas_that_are_written_meanwhile_are_a_conflict(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was read before, and the other one after a step."""
    shard = case.ranks / "rank-1.safetensors"
    data, compare = shard.read_bytes(), Gatherer._compare

    def write(self: Gatherer, *given: Any) -> None:
        shard.write_bytes(data[:-200] + bytes(200))
        compare(self, *given)

    monkeypatch.setattr(Gatherer, "_compare", write)
    for work in (
        lambda: diff(case.base, case.ranks, layout=case.layout, jobs=1),
        lambda: verify(case.ranks, against=case.base, layout=case.layout, jobs=1),
        lambda: check_layout(case.layout, case.ranks, deep=True, jobs=1),
    ):
        shard.write_bytes(data)
        with pytest.raises(ConflictError, match=r"rank-1\.safetensors: changed while reading"):
            work()
    monkeypatch.undo()
    with pytest.raises(DamagedError, match="tensor norm"):
        diff(case.base, case.ranks, layout=case.layout)


def test_the_base_that_stands_for_the_files_must_not_change_either(case: Case) -> None:
    laid = open_any(case.ranks, layout=case.layout, like=open_checkpoint(case.base))
    (case.base / "config.json").write_bytes(b"[]")
    with laid.reader() as reader, pytest.raises(ConflictError, match=r"config\.json"):
        reader.check_unchanged()


def test_ranges_of_a_shard_are_those_of_its_tensors(case: Case) -> None:
    base = open_checkpoint(case.dense)
    laid = open_any(case.ranks, layout=case.layout, like=base)
    with laid.reader() as reader, base.reader() as dense:
        for number, shard in enumerate(base.shards):
            begin = len(shard.header.raw)
            data = np.zeros(shard.size - begin, np.uint8)
            reader.read_shard_into(number, begin, data)
            assert data.tobytes() == (case.dense / shard.path).read_bytes()[begin:]
            part, wanted = np.zeros(1000, np.uint8), np.zeros(1000, np.uint8)
            reader.read_shard_into(number, begin + 2000, part)
            dense.read_shard_into(number, begin + 2000, wanted)
            assert np.array_equal(part, wanted)
        with pytest.raises(ValueError, match="are not all in tensor 'q'"):
            reader.read_into(laid.by_name["q"], 1, bytearray(4))
        assert reader.read_file("config.json") == SIDECARS["config.json"]


def test_dense_folders_are_not_taken_for_shards_of_ranks(case: Case, tmp_path: Path) -> None:
    assert not is_sharded(case.dense)
    assert not is_sharded(case.ranks)
    assert not is_sharded(tmp_path / "none")
    write_checkpoint(tmp_path / "damaged", {})
    (tmp_path / "damaged/model.safetensors").write_bytes(b"\xff" * 20)
    assert not is_sharded(tmp_path / "damaged")


# The commands


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main([str(argument) for argument in (*arguments, "--json")])
    return code, json.loads(capsys.readouterr().out)


def test_commands_take_layouts(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    delta = case.folder / "delta"
    code, result = run(capsys, "diff", case.base, case.ranks, "-o", delta, "--layout", case.layout)
    assert (code, result["changed_elements"]) == (0, 8)
    code, result = run(capsys, "verify", case.ranks, "--against", case.dense, "--layout", case.layout)
    assert (code, result["matches"]) == (0, True)
    code, result = run(capsys, "verify", case.ranks, "--against", case.base, "--layout", case.layout)
    assert (code, result["matches"]) == (1, False)
    code, result = run(capsys, "verify", case.ranks, "--delta", delta, "--layout", case.layout)
    assert (code, result["matches"]) == (0, True)
    code, result = run(capsys, "diff", case.ranks, case.dense, "--base-layout", case.layout)
    assert (code, result["changed_elements"]) == (0, 0)


@pytest.mark.parametrize(
    ("change", "code", "match"),
    [
        (lambda case: case.layout.unlink(), 3, "no such file"),
        (lambda case: case.layout.write_bytes(b"{"), 4, "is not valid JSON"),
        (lambda case: (case.ranks / "rank-0.safetensors").unlink(), 4, "rank-0.safetensors"),
        (lambda case: shutil.rmtree(case.ranks), 3, "no such folder"),
    ],
)
def test_commands_refuse_by_name(
    case: Case, capsys: pytest.CaptureFixture[str], change: Callable[[Case], object], code: int, match: str
) -> None:
    change(case)
    found, result = run(capsys, "diff", case.base, case.ranks, "-o", case.folder / "delta", "--layout", case.layout)
    assert found == code and match in result["error"]["message"]
    assert not (case.folder / "delta").exists()


@pytest.mark.parametrize("is_noted", [False, True])
def test_inspect_says_what_shards_are_parts_of(case: Case, capsys: pytest.CaptureFixture[str], is_noted: bool) -> None:
    given = ["--layout", str(case.layout)]
    if is_noted:
        given, note = [], case.ranks / ".dcr" / "layout.json"
        note.parent.mkdir()
        case.layout = case.layout.rename(note)
    assert main(["inspect", str(case.ranks), *given, "--digest", "--tensors", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    dense = inspect(case.dense, digest=True, tensors=True)
    assert found["laid"] == {"layout": f"layout {case.layout}", "local_tensors": 12} and dense.laid is None
    assert [shard["tensors"] for shard in found["shards"]] == [5, 7]
    assert (found["tensors"], found["elements"]) == (dense.tensors, dense.elements)
    assert found["state"]["content"] == f"blake3:{dense.state.content.hex()}"  # type: ignore[union-attr]
    assert [row["digest"] for row in found["rows"]] == [row.digest for row in dense.rows]
    shards = {row["name"]: row["shard"] for row in found["rows"]}
    assert shards["gate"] == "rank-0.safetensors, rank-1.safetensors"
    assert (shards["step"], shards["none"]) == ("rank-1.safetensors", "")
    assert main(["inspect", str(case.ranks), *given]) == 0
    assert f"ranks      2 shards, 12 local tensors, by layout {case.layout}" in capsys.readouterr().out


def test_the_tiny_pair_is_read_through_no_layout(tiny_pair: tuple[Path, Path]) -> None:
    assert len(tiny_tensors()[0]) == len(open_any(tiny_pair[0]).tensors)
