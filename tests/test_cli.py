"""The commands as people and scripts call them: output, exit codes, JSON, signals, and hostile surroundings."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commands import Ran, Run, is_failure
from dcr_cli import __version__, process
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.cli import COMMANDS, main
from dcr_cli.cli.options import commands as commands_by_name
from dcr_cli.cli.session import Session
from dcr_cli.errors import DamagedError, IncompleteError
from dcr_cli.layout.box import whole_box
from dcr_cli.layout.document import encode_layout
from dcr_cli.layout.layout import Form, Layout, LocalTensor, Placement
from dcr_cli.layout.opening import forms_of
from dcr_cli.push import push
from dcr_cli.stopping import Stopped
from dcr_cli.store import opening
from dcr_cli.store.retry import Patience
from faults import watching
from receivers import fresh_copy, tree
from strategies import INDEX, tensor_of, with_changes, write_checkpoint

ESCAPE = "\x1b"


@pytest.fixture
def delta(tiny_pair: tuple[Path, Path], tmp_path: Path) -> Path:
    assert main(["diff", *map(str, tiny_pair), "-o", str(tmp_path / "delta"), "-q"]) == 0
    return tmp_path / "delta"


# Standard output is buffered, as it is for people.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def spawn(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own; its output is captured unless it is told to go elsewhere."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": ENVIRONMENT}
    command = [sys.executable, "-m", "dcr_cli", *map(str, arguments)]
    ran: subprocess.CompletedProcess[bytes] = subprocess.run(command, timeout=60, **(streams | options))
    return ran


# Every command: for people, as JSON, quietly; those that make layouts of models are test_families.py's, the one that
# runs until it is stopped is test_relay_command.py's.

OF_MODELS = [f"layout {name}" for name in ("fp8", "megatron", "vllm-sharded-state", "probe")]
# Those that need engines are test_engine.py's.
ON_A_PAIR = [name for name in COMMANDS if name not in (*OF_MODELS, "relay", "reload")]


def commands(pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> dict[str, tuple[str | Path, ...]]:
    return {
        "diff": ("diff", *pair),
        "apply": ("apply", delta, pair[0], "--to", tmp_path / "out"),
        "verify": ("verify", pair[0], "--against", pair[0]),
        "show": ("show", delta),
        "inspect": ("inspect", pair[0]),
        "push": ("push", pair[0], tmp_path / "new-remote"),
        **{name: (name, tmp_path / "remote") for name in ("commit", "log", "status", "prune")},
        "anchor": ("anchor", pair[0], tmp_path / "remote"),
        "pull": ("pull", tmp_path / "remote", tmp_path / "receiver"),
        "layout show": ("layout", "show", layout_of_itself(pair[0], tmp_path)),
        "layout check": ("layout", "check", layout_of_itself(pair[0], tmp_path), pair[0]),
        "layout compose": ("layout", "compose", *2 * (layout_of_itself(pair[0], tmp_path),)),
    }


def layout_of_itself(checkpoint: Path, folder: Path) -> Path:
    """A layout of a checkpoint's own shards, in which everything lies as it is."""
    opened = open_checkpoint(checkpoint)
    shards: dict[str, dict[str, LocalTensor]] = {shard.path: {} for shard in opened.shards}
    for tensor in opened.tensors:
        form = Form(tensor.dtype.name, tensor.shape)
        boxes = (Placement(tensor.name, whole_box(tensor.elements)),) if tensor.elements else ()
        shards[opened.shards[tensor.shard].path][tensor.name] = LocalTensor(form, boxes)
    (folder / "layout.json").write_bytes(encode_layout(Layout("its own", forms_of(opened), shards)))
    return folder / "layout.json"


@pytest.fixture
def remote(tiny_pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A remote with a version, and one that is prepared."""
    push(tiny_pair[0], tmp_path / "remote")
    push(tiny_pair[1], tmp_path / "remote", base=tiny_pair[0], prepare=True)
    return tmp_path / "remote"


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("command", ON_A_PAIR)
def test_for_people_a_command_prints_plain_lines(
    command: str, run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path
) -> None:
    ran = run(*commands(tiny_pair, delta, tmp_path)[command])
    assert ran.code == 0 and ran.out.endswith("\n") and ran.err == ""
    assert ESCAPE not in ran.out and "\r" not in ran.out


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("command", ON_A_PAIR)
def test_json_is_one_document(
    command: str, run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path
) -> None:
    ran = run(*commands(tiny_pair, delta, tmp_path)[command], "--json")
    assert ran.code == 0 and ran.err == "" and ran.out.count("\n") == 1 and ran.out.isascii()
    assert ran.json["command"] == command
    assert ran.json["ok"] is True and ran.json["exit_code"] == 0 and ran.json["seconds"] >= 0
    assert "error" not in ran.json


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("command", ON_A_PAIR)
def test_quiet_is_quiet(command: str, run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    assert run(*commands(tiny_pair, delta, tmp_path)[command], "-q") == Ran(0, "", "")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "relay"])
@pytest.mark.parametrize("bare", [False, True])
def test_json_of_a_failure_is_one_document(command: str, bare: bool, run: Run, tmp_path: Path) -> None:
    of_two = ("diff", "apply", "push", "pull", "anchor", "layout compose", *OF_MODELS)
    arguments = 2 if command in of_two and command != "layout megatron" else 1
    nowhere: list[str | Path] = [] if bare else [tmp_path / f"nowhere-{number}" for number in range(arguments)]
    nowhere += ["--engine", "vllm=http://localhost:9"] if command == "reload" and not bare else []
    ran = run(*command.split(), *nowhere, "--json")
    code = 2 if bare else 3
    error = ran.json["error"]
    assert (ran.code, ran.json["exit_code"], ran.json["ok"], ran.json["command"]) == (code, code, False, command)
    assert error["class"] == ("UsageError" if bare else "NotFoundError")
    assert set(error) == {"class", "message", "hint", "retryable"} and error["retryable"] is False
    assert ran.err.splitlines()[0] == f"dcr: {error['message']}"


@pytest.mark.parametrize("command", [(), *(tuple(name.split()) for name in COMMANDS)])
def test_help(command: tuple[str, ...], run: Run) -> None:
    for option in ("--help", "-h"):
        ran = run(*command, option)
        assert ran.code == 0 and ran.err == "" and "Usage: dcr" in ran.out
        assert not command or all(o in ran.out for o in ("--json", "--quiet", "--verbose", "--no-progress", "--jobs"))


@pytest.mark.parametrize("group", [(), ("layout",)])
def test_the_list_of_commands_cuts_no_sentence(group: tuple[str, ...], run: Run) -> None:
    listed = run(*group, "--help").out.partition("Commands:")[2].splitlines()
    assert len(listed) > 5 and not [line for line in listed if line.endswith("...")]


def test_the_list_of_commands_does_not_look_at_their_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many commands it would take too long."""

    def unreadable(session: Session, option: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
        """Be listed."""
        return 0

    monkeypatch.setitem(commands_by_name, "inspect", unreadable)
    assert "inspect  Be listed." in run("--help").out
    assert run("inspect", "--help").code == process.INTERNAL_ERROR


def test_version(run: Run) -> None:
    assert run("--version") == Ran(0, f"dcr {__version__}\n", "")
    assert run("diff", "--version") == Ran(0, f"dcr {__version__}\n", "")
    assert run("diff", "--json", "--version").json["version"] == __version__


def test_verbose_says_which_kernels_are_used(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    ran = run("verify", tiny_pair[0], "--against", tiny_pair[0], "-v", "-j", "3")
    assert re.search(r"^kernels: (native|reference) \(.+\)$", ran.err, re.MULTILINE) and "jobs: 3" in ran.err


def test_apply_says_what_becomes_of_links(run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    """A shard that is a link is replaced; the folder that a link led to is kept or removed, and that is said."""
    cache = fresh_copy(tiny_pair[0], tmp_path / "cache")
    for path in cache.glob("*.safetensors"):
        path.unlink()
        path.symlink_to(tiny_pair[0] / path.name)
    for options, is_done in ((["-n"], False), ([], True)):
        ran = run("apply", delta, cache, "--in-place", *options)
        assert "2 shards could not be patched in place: a link, " in ran.out
        assert any(path.is_symlink() for path in cache.glob("*.safetensors")) is not is_done
    fresh_copy(tiny_pair[0], tmp_path / "v1")
    (tmp_path / "link").symlink_to("v1")
    assert f"previous   kept: {tmp_path / 'v1'}\n" in run("apply", delta, tmp_path / "link", "--aside").out
    assert run("diff", tiny_pair[1], tiny_pair[0], "-o", tmp_path / "back").code == 0
    back = ("apply", tmp_path / "back", tmp_path / "link", "--aside")
    assert "previous   would be removed\n" in run(*back, "-n").out
    assert "previous   removed\n" in run(*back).out


def test_a_pattern_that_leaves_nothing_out_is_told(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    base, target = tiny_pair
    for command in (["inspect", base], ["diff", base, target], ["verify", base, "--against", base]):
        ran = run(*command, "--skip", "tokeniser/", "--skip", "tokenizer/", "--skip", "conf?g.json")
        assert (ran.code, ran.err) == (0, "note: --skip tokeniser/ matches nothing\n")
        assert run(*command, "--skip", "tokeniser/", "-q").err == ""
    assert run("inspect", base, "--skip", ".dcr", "--json").json["ok"]


def test_one_element_is_one(run: Run, tmp_path: Path) -> None:
    assert "1 element, 2 B" in run("inspect", write_checkpoint(tmp_path / "one", {"a": tensor_of("BF16", (1,))})).out


def test_hints_fit_the_command(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    base, target = tiny_pair
    assert is_failure(run("show", base), 3, "is a checkpoint", f"dcr inspect {base}")
    assert is_failure(run("verify", base, "--delta", target), 3, "is a checkpoint", "by --against")
    assert is_failure(run("apply", base, target), 3, "is a checkpoint", "dcr apply DELTA CHECKPOINT")
    assert is_failure(run("apply", delta, base, "--to", base), 2, "the checkpoint itself", "leave out --to")
    assert is_failure(run("inspect", base / "none"), 3, "no such folder", "spelling")
    assert is_failure(run("inspect", base.parent), 3, "holds no checkpoint", f"did you mean {base}?")
    assert is_failure(run("apply", delta, base / "none"), 3, "no such folder", "spelling")


def test_shards_that_are_no_safetensors_are_named(run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What PyTorch's distributed checkpoint writes of its own."""
    pickles, layout = tmp_path / "pickles", tmp_path / "layout.json"
    pickles.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (pickles / name).write_bytes(b"\x80\x02")
    layout.write_bytes(encode_layout(Layout("", forms_of(open_checkpoint(tiny_pair[0])), {})))
    for arguments in (
        ("inspect", pickles),
        ("diff", tiny_pair[0], pickles),
        ("diff", tiny_pair[0], pickles, "--layout", layout),
        ("push", pickles, tmp_path / "remote"),
        ("layout", "show", pickles),
    ):
        ran = run(*arguments)
        assert is_failure(ran, 3, "holds *.distcp files of PyTorch's distributed", "HuggingFaceStorageWriter"), ran.err


def test_a_remote_is_told_from_a_checkpoint(run: Run, tiny_pair: tuple[Path, Path], remote: Path) -> None:
    for arguments in (["inspect", remote], ["verify", remote]):
        assert is_failure(run(*arguments), 3, "is a remote, not a checkpoint", "dcr pull REMOTE CHECKPOINT")
    swapped = run("push", remote, tiny_pair[0])
    assert is_failure(swapped, 2, "holds a checkpoint, and is no remote", "dcr push CHECKPOINT REMOTE")


def test_hints_for_damage(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    base, target = tiny_pair
    (base / "notes.txt").symlink_to("nothing")
    assert is_failure(run("inspect", base), 4, "leads to no file", "--skip 'notes.txt'")
    (base / "notes.txt").unlink()
    (base / INDEX).write_text("{")
    assert is_failure(run("inspect", base), 4, "is not valid JSON", "copy or download it again")
    shard = next(target.glob("*.safetensors"))
    shard.write_bytes(b"1234")
    assert is_failure(run("inspect", target), 4, "too few for a safetensors file", "copy or download it again")
    (delta / "commit.json").write_text("{")
    assert is_failure(run("show", delta), 4, "is not valid JSON", "copy")


# diff


def test_diff_fields(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    found = run("diff", *tiny_pair, "--json").json
    assert (found["tensors"], found["elements"], found["changed_elements"], found["changed_tensors"]) == (
        4,
        16384,
        5,
        3,
    )
    assert found["dense_bytes"] == 32768 and found["delta_bytes"] > 0
    assert found["added"] == found["removed"] == found["replaced"] == found["moved"] == []
    assert re.fullmatch("blake3:[0-9a-f]{64}", found["base"]["content"]) and found["base"] != found["target"]
    assert "rows" not in found and sum(found["encodings"].values()) == 3
    assert len(run("diff", *tiny_pair, "--json", "--stat").json["rows"]) == 4


def test_diff_exit_code_is_asked_for(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    assert run("diff", *tiny_pair).code == 0
    assert run("diff", *tiny_pair, "--exit-code", "-q") == Ran(1, "", "")
    assert run("diff", tiny_pair[0], tiny_pair[0], "--exit-code").code == 0
    found = run("diff", *tiny_pair, "--exit-code", "--json").json
    assert (found["ok"], found["exit_code"]) == (False, 1) and "error" not in found


def test_diff_stat_lists_what_changed(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    out = run("diff", *tiny_pair, "--stat").out
    assert "layers.0.weight" in out and "layers.1.weight" not in out


def test_diff_refuses_an_output_that_is_taken(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    assert is_failure(run("diff", *tiny_pair, "-o", delta), 6, "delta: exists", "another name")


def test_what_is_refused_leaves_no_file_open(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for arguments in (["diff", *tiny_pair, "-o", delta], ["apply", delta, delta], ["show", tiny_pair[0]]):
        assert run(*arguments).code > 1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("encoding", ["auto", "context", "gap", "whole"])
def test_diff_encoding(encoding: str, run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = run("diff", *tiny_pair, "-o", tmp_path / "delta", "--encoding", encoding, "--json").json
    assert encoding == "auto" or set(found["encodings"]) == {encoding}
    assert run("verify", tiny_pair[1], "--delta", tmp_path / "delta").code == 0


def test_diff_skip(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    (tiny_pair[1] / "pytorch_model.bin").write_bytes(b"a second copy")
    assert is_failure(run("diff", *tiny_pair), 4, "second copy", "--skip")
    assert run("diff", *tiny_pair, "--skip", "*.bin", "--skip", "nothing").code == 0


# apply


def test_apply_then_verify(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    assert run("apply", delta, tiny_pair[0]).code == 0
    assert run("verify", tiny_pair[0], "--against", tiny_pair[1]).code == 0
    assert run("verify", tiny_pair[0]).code == 0
    assert run("verify", tiny_pair[0], "--delta", delta).code == 0
    again = run("apply", delta, tiny_pair[0])
    assert again.code == 0 and "already" in again.out


def test_diff_dry_run_writes_nothing(run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    ran = run("diff", *tiny_pair, "-o", tmp_path / "delta", "-n")
    assert ran.code == 0
    assert re.search(r"^  (context|gap) +3 tensors, \d+ B$", ran.out, re.MULTILINE)
    assert f"to {tmp_path / 'delta'} would be written; nothing was" in ran.out
    found = run("diff", *tiny_pair, "-o", tmp_path / "delta", "--dry-run", "--json").json
    assert found["dry_run"] and found["encoding_bytes"].keys() == found["encodings"].keys()
    assert not (tmp_path / "delta").exists()
    assert "would be written; nothing was" in run("diff", *tiny_pair, "-n").out


def test_apply_dry_run_changes_nothing(run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    before = {path: path.read_bytes() for path in tiny_pair[0].rglob("*") if path.is_file()}
    ran = run("apply", delta, tiny_pair[0], "--dry-run")
    assert ran.code == 0 and "would" in ran.out
    assert run("apply", delta, tiny_pair[0], "-n", "--json").code == 0
    assert {path: path.read_bytes() for path in tiny_pair[0].rglob("*") if path.is_file()} == before


def test_apply_to_leaves_the_base_alone(run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    assert run("apply", delta, tiny_pair[0], "--to", tmp_path / "out").code == 0
    assert run("verify", tmp_path / "out", "--against", tiny_pair[1]).code == 0
    assert run("verify", tiny_pair[0], "--against", tiny_pair[1]).code == 1


def test_apply_in_place_and_aside(run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    os.rename(tiny_pair[0], tmp_path / "v1")
    shutil.copytree(tmp_path / "v1", tmp_path / "copy")
    (tmp_path / "current").symlink_to("v1")
    assert run("apply", delta, tmp_path / "copy", "--in-place").code == 0
    assert run("apply", delta, tmp_path / "current", "--aside", "--keep-previous").code == 0
    for name in ("copy", "current"):
        assert run("verify", tmp_path / name, "--against", tiny_pair[1]).code == 0


def test_apply_refuses_a_wrong_base(run: Run, delta: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", {"w": tensor_of("BF16", (8,))})
    assert is_failure(run("apply", delta, other), 5, "other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--in-place", "--aside"], "--in-place and --aside"),
        (["--to", "x", "--in-place"], "--to and --in-place"),
        (["--keep-previous"], "needs --aside"),
        (["--to", ""], "empty path"),
    ],
)
def test_apply_options_that_contradict(options: list[str], message: str, run: Run, tmp_path: Path) -> None:
    assert is_failure(run("apply", tmp_path, tmp_path, *options), 2, message)


# verify


def test_verify_tells_the_difference(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    ran = run("verify", tiny_pair[0], "--against", tiny_pair[1])
    assert ran.code == 1 and ran.err == "" and "first at element 64 [1, 0]: 0x" in ran.out
    found = run("verify", tiny_pair[0], "--against", tiny_pair[1], "--json").json
    assert (found["ok"], found["exit_code"], found["matches"]) == (False, 1, False)
    assert (found["checked_tensors"], found["checked_bytes"]) == (4, 32768)
    assert found["extra"] == found["missing"] == []
    assert [(d["tensor"], d["count"], d["first_flat"], d["first_index"]) for d in found["differences"]] == [
        ("layers.0.weight", 3, 0, [0, 0]),
        ("layers.2.weight", 1, 64, [1, 0]),
        ("layers.3.weight", 1, 1000, [15, 40]),
    ]


def test_verify_lists_only_so_many(run: Run, tmp_path: Path) -> None:
    tensors = {f"t{number:03}": tensor_of("U8", (4,), number) for number in range(100)}
    write_checkpoint(tmp_path / "a", tensors)
    write_checkpoint(tmp_path / "b", {name: with_changes(tensor, [0]) for name, tensor in tensors.items()})
    ran = run("verify", tmp_path / "a", "--against", tmp_path / "b")
    assert ran.code == 1 and "80 more tensors" in ran.out and len(ran.out.splitlines()) == 22
    assert len(run("verify", tmp_path / "a", "--against", tmp_path / "b", "--json").json["differences"]) == 100


def test_verify_of_nothing_is_no(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {})
    assert run("verify", tmp_path / "a", "--against", tmp_path / "a") == Ran(1, "no match: nothing was compared\n", "")


def test_verify_without_a_record_is_not_found(run: Run, tiny_pair: tuple[Path, Path]) -> None:
    assert is_failure(run("verify", tiny_pair[0]), 3, "no record", "--against")


# Usage


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "a command is missing", "dcr --help"),
        (["nonsense"], "no such command 'nonsense'", "dcr --help"),
        (["--nonsense"], "no such option: --nonsense", "dcr --help"),
        (["-j", "2", "diff", "a", "b"], "arguments: no such option: -j", "after the command: dcr diff ... -j"),
        (["--json=", "diff", "a", "b"], "arguments: ", "after the command: dcr diff ... --json="),
        (["diff", "--jsn", "a", "b"], "diff: no such option: --jsn", "dcr diff --help"),
        (["diff"], "missing argument 'BASE'", "dcr diff --help"),
        (["diff", "a"], "missing argument 'TARGET'", "dcr diff --help"),
        (["diff", "a", "b", "c"], "unexpected extra argument", "dcr diff --help"),
        (["diff", "a", "b", "--nonsense"], "no such option: --nonsense", "dcr diff --help"),
        (["diff", "a", "b", "-o"], "requires an argument", "dcr diff --help"),
        (["diff", "a", "b", "-o", ""], "empty path", "a variable of the shell"),
        (["diff", "", "b"], "BASE: an empty path", "a variable of the shell"),
        (["diff", "a", "b", "--encoding", "zip"], "'zip' is not one of", "dcr diff --help"),
        (["diff", "a", "b", "--skip", ""], "empty pattern", "a variable of the shell"),
        (["diff", "a", "b", "-j", "0"], "--jobs: a number from 1 to 256 expected, found '0'", "leave it out"),
        (["diff", "a", "b", "--jobs", "-1"], "from 1 to 256 expected, found '-1'", ""),
        (["diff", "a", "b", "--jobs", "1000000000"], "from 1 to 256", ""),
        (["diff", "a", "b", "--jobs", "many"], "from 1 to 256 expected, found 'many'", ""),
        (["diff", "a", "b", "--jobs", "9" * 5000], "--jobs", ""),
        (["diff", "a", "b", "-q", "-v"], "--quiet and --verbose", "leave one of them out"),
        (
            ["verify", "a", "--against", "b", "--delta", "c"],
            "--against and --delta exclude each other",
            "leave one of them out",
        ),
        (["apply", "a", "b", "--inplace"], "no such option: --inplace", "perhaps --in-place is meant"),
        (["diff", "a", "b", "--out", "c"], "no such option: --out", "perhaps --output is meant"),
        (["apply", "a", "b", "--xyz"], "no such option: --xyz", "dcr apply --help"),
        (["help"], "no such command 'help'", "dcr --help lists the commands"),
        (["deploy", "a"], "no such command 'deploy'", "dcr --help lists the commands"),
        (["layout", "megatron", "a", "--tensor", "2"], "no such option: --tensor", "perhaps --tensors is meant"),
        (["veryfi", "a"], "no such command 'veryfi'", "perhaps verify is meant"),
        (["show", "\x1b[31mred\n", "b"], "unexpected extra argument", ""),
        (["layout"], "layout: a command is missing", "dcr layout --help"),
        (
            ["layot", "show", "a"],
            "arguments: no such command 'layot'",
            "layout is meant; dcr --help lists the commands",
        ),
        (
            ["layout", "shw"],
            "layout: no such command 'shw'",
            "perhaps layout show is meant; dcr layout --help lists its",
        ),
        (["layout", "xyz"], "layout: no such command 'xyz'", "dcr layout --help lists its commands"),
        (["layout", "--jsn"], "layout: no such option: --jsn", "dcr layout --help lists its commands"),
        (["layout", "-v", "shw"], "layout: no such option: -v", "perhaps layout show is meant; dcr layout --help"),
        (
            ["layout", "show", "a", "--jsn"],
            "layout show: no such option: --jsn",
            "perhaps --json is meant; dcr layout show",
        ),
        (
            ["layout", "--token=x", "show", "a"],
            "arguments: no such option",
            "the command: dcr layout show ... --token=",
        ),
        (
            ["-j", "2", "layout", "show", "a"],
            "arguments: no such option: -j",
            "after the command: dcr layout show ... -j",
        ),
        (["layout", "-j", "2", "check", "a"], "arguments: no such option: -j", "the command: dcr layout check ... -j"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, hint: str, run: Run, tiny_pair: tuple[Path, Path]) -> None:
    places = {"a": str(tiny_pair[0]), "b": str(tiny_pair[1])}
    ran = run(*(places.get(argument, argument) for argument in arguments))
    assert is_failure(ran, 2, message, hint)
    assert ESCAPE not in ran.err and "Did you mean" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (["push", "a", "foo://b"], 8, "served by dcr itself"),
        (["push", "a", "a::b"], 2, "by itself"),
        (["push", "a", "R", "--encodings", "zip"], 2, "context,gap,whole"),
        (["push", "a", "R", "--part", "1"], 2, "0/8 is the first of eight"),
        (["push", "a", "R", "--part", "8/8"], 2, "0/8 is the first of eight"),
        (["push", "a", "R", "--anchor-every", "0"], 2, "dcr push --help"),
        (["pull", "R", "a", "--version", "-1"], 2, "dcr log REMOTE lists them"),
        (["pull", "R", "a", "--receiver", "-"], 2, "such as the name of the host"),
        (["pull", "R", "a", "--exec-timeout", "0"], 2, "dcr pull --help"),
    ],
)
def test_what_cannot_be_meant_comes_with_a_hint(
    arguments: list[str], code: int, hint: str, run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    places = {"a": str(tiny_pair[0]), "R": str(tmp_path / "remote")}
    given = [places.get(argument, argument) for argument in arguments]
    assert is_failure(run(*given), code, "", hint)
    assert hint in run(*given, "--json").json["error"]["hint"]


@pytest.mark.parametrize(
    ("arguments", "command"), [(("--json", "diff"), "diff"), (("layout", "--json", "show"), "layout show")]
)
def test_json_before_the_command(
    arguments: tuple[str, ...], command: str, run: Run, tiny_pair: tuple[Path, Path]
) -> None:
    ran = run(*arguments, *tiny_pair)
    error = ran.json["error"]
    assert (ran.code, error["message"]) == (2, "arguments: no such option: --json")
    assert error["hint"] == f"options come after the command: dcr {command} ... --json"
    assert ran.json["command"] == command


def test_what_cannot_be_found_or_read_comes_with_a_hint(
    run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path
) -> None:
    base = tiny_pair[0]
    shard = base / "model-00001-of-00002.safetensors"
    assert is_failure(run("inspect", shard), 3, "is a file", f"give the folder that it lies in, {base}")
    assert is_failure(run("show", tmp_path / "nothing"), 3, "no such delta", "dcr diff BASE TARGET -o DELTA makes one")
    assert is_failure(run("diff", *tiny_pair, "-o", base / "delta"), 2, "inside", "another place for the delta")
    assert is_failure(run("diff", *tiny_pair, "-o", shard), 2, "inside", "another place for the delta")
    assert is_failure(run("apply", delta, tmp_path), 2, "inside", "have the delta elsewhere")
    assert is_failure(run("diff", *tiny_pair, "--skip", "model-00001*"), 2, "leaves out shard", "a narrower pattern")
    whole = shard.read_bytes()
    for rest in (whole[:-1], whole[:50], b""):
        shard.write_bytes(rest)
        assert is_failure(run("inspect", base), 4, "model-00001", "copy or download it again")
    shard.unlink()
    assert is_failure(run("inspect", base), 4, "which is not there", "copy all shards of the checkpoint")
    (base / INDEX).unlink()
    assert is_failure(run("inspect", base), 4, "is one of 2 shards", "copy all shards of the checkpoint")
    payload = delta / "payloads" / "000000.safetensors"
    whole = payload.read_bytes()
    for rest in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        payload.write_bytes(rest)
        assert is_failure(run("show", delta), 4, "000000.safetensors", "copy the whole delta again")
    payload.unlink()
    assert is_failure(run("show", delta), 4, "is missing", "copy the whole delta again")
    (delta / "digests.zst").unlink()
    assert is_failure(run("show", delta), 4, "is missing", "copy the whole delta again")


def test_names_that_look_like_options_are_taken_literally_after_dashes(
    run: Run, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("--version", "-o", "~", "@base", "*"):
        shutil.copytree(tiny_pair[0], tmp_path / name)
        assert run("verify", "--against", str(tiny_pair[0]), "--", name).code == 0


@pytest.mark.parametrize("command", ["diff", "apply", "verify"])
def test_a_pattern_that_is_not_utf_8(command: str, run: Run, tiny_pair: tuple[Path, Path], delta: Path) -> None:
    """It is refused before anything is read."""
    base, target = tiny_pair
    (delta / "manifest.zst").unlink()
    (target / "model-00001-of-00002.safetensors").unlink()
    arguments = {"diff": ("diff", base, target), "apply": ("apply", delta, base), "verify": ("verify", base)}[command]
    assert is_failure(run(*arguments, "--skip", "\udcff*"), 2, r"the pattern \udcff* is not UTF-8", "write ?")


def test_links_that_lead_in_a_circle(run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path) -> None:
    base, loop, circle = tiny_pair[0], tmp_path / "loop", "in a circle"
    loop.symlink_to("other")
    (tmp_path / "other").symlink_to("loop")
    for place in (loop, loop / "inside"):
        assert is_failure(run("apply", delta, place), 9, circle, "readlink")
        assert is_failure(run("apply", delta, place, "--aside"), 9, circle, "readlink")
        assert is_failure(run("apply", place, base), 9, circle, "readlink")
        assert is_failure(run("apply", delta, base, "--to", place), 2, circle, "another name")
        assert is_failure(run("diff", *tiny_pair, "-o", place), 2, circle, "another name")
        for arguments in (("inspect", place), ("show", place), ("verify", place), ("diff", place, base)):
            assert is_failure(run(*arguments), 9, "symbolic links", "readlink")
    assert sorted(os.listdir(tmp_path)) == ["base", "delta", "loop", "other", "target"]


# What goes wrong inside


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DamagedError("x", "y", hint="z"), 4, "dcr: x: y\nhint: z\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), 9, "dcr: /a/b: No space left on device\n"),
        (OSError(errno.EXDEV, "Cross-device link", "/a", None, "/b"), 9, "dcr: /a and /b: Cross-device link\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a"),
            9,
            "dcr: /a: Permission denied\nhint: run as a user who may, or have its mode changed\n",
        ),
        (MemoryError(), 9, "dcr: memory: not enough for this step\nhint: try fewer --jobs\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (KeyboardInterrupt(), 130, "dcr: stopped: by signal SIGINT\nhint: run the same command again\n"),
        (Stopped(signal.SIGTERM), 143, "dcr: stopped: by signal SIGTERM\nhint: run the same command again\n"),
        (Stopped(signal.SIGHUP), 129, "dcr: stopped: by signal SIGHUP\nhint: run the same command again\n"),
    ],
)
def test_errors_become_codes(
    error: BaseException, code: int, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("dcr_cli.checkpoint.checkpoint.Path", fail)
    assert run("inspect", tmp_path) == Ran(code, "", message)
    document = run("inspect", tmp_path, "--json").json
    assert (document["exit_code"], document["ok"]) == (code, False) and document["error"]["message"]


def test_a_bug_is_70_with_a_traceback(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcr_cli.checkpoint.checkpoint.Path", lambda path: 1 // 0)
    ran = run("inspect", tmp_path)
    assert ran.code == 70 and ran.out == ""
    assert ran.err.startswith("Traceback") and "dcr: internal error: ZeroDivisionError" in ran.err
    assert run("inspect", tmp_path, "--json").json["error"]["class"] == "ZeroDivisionError"


def test_a_traceback_of_an_error_is_asked_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in run("inspect", tmp_path / "nowhere").err
    monkeypatch.setenv("DCR_DEBUG", "1")
    ran = run("inspect", tmp_path / "nowhere")
    assert ran.code == 3 and ran.err.startswith("Traceback") and "\ndcr: " in ran.err


@pytest.mark.parametrize(
    "address",
    [
        "user:hunter2@host/path",
        "user:hunter2@host:path",
        "user:word/hunter2@host/path",
        "sftp://user:hunter2@127.0.0.1:1/path",
        "https://user:hunter2@127.0.0.1:1/path?sig=hunter2",
        "s3://key:hunter2@bucket/path?x=hunter2",
        "s3://key:hunter2@bucket:1/path",
        "ftp://user:hunter2@127.0.0.1:1/path",
        "https://user:hunter2@[bad/path",
    ],
)
def test_no_password_is_told(
    address: str, run: Run, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever an address stands, also where a path belongs, or a command; and with a traceback."""
    defaults = Patience.__init__.__defaults__
    assert defaults is not None
    monkeypatch.setattr(Patience.__init__, "__defaults__", (0.05, 0.01, 0.01, *defaults[3:]))
    monkeypatch.setattr(opening, "LOOK_SECONDS", 0.05)
    checkpoint = tiny_pair[0]
    for arguments in (
        ["push", checkpoint, address],
        ["push", address, checkpoint],
        ["pull", address, checkpoint / "new"],
        ["pull", checkpoint, address],
        ["log", address],
        ["status", address],
        ["prune", address],
        ["verify", "--remote", address],
        ["verify", checkpoint, "--remote", address],
        ["verify", address],
        ["show", address],
        ["show", f"{address}@3"],
        ["inspect", address],
        ["apply", address, checkpoint],
        ["diff", checkpoint, address],
        [address],
        ["log", address, address],
        ["log", "--lines", address, checkpoint],
        ["--json", "log", address],
    ):
        for debug, json_too in (("1", []), ("", ["--json"])):
            monkeypatch.setenv("DCR_DEBUG", debug)
            ran = run(*arguments, *json_too)
            assert ran.code in (2, 3, 7, 8)
            assert "hunter2" not in ran.out + ran.err
            assert address.startswith("user") <= (ran.code == 2)


# Surroundings


def test_a_closed_pipe_is_141_without_a_word(tiny_pair: tuple[Path, Path]) -> None:
    for arguments in (["inspect", tiny_pair[0]], ["inspect", tiny_pair[0], "--json"], ["--help"], ["--version"]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as closed:
            ran = spawn(*arguments, stdout=closed, stderr=subprocess.PIPE)
        assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_full_output_is_told_in_one_line(tiny_pair: tuple[Path, Path]) -> None:
    for arguments in (["inspect", tiny_pair[0]], ["inspect", tiny_pair[0], "--json"], ["--help"]):
        with open("/dev/full", "wb") as full:
            ran = spawn(*arguments, stdout=full, stderr=subprocess.PIPE)
        assert (ran.returncode, ran.stderr) == (9, b"dcr: standard output: No space left on device\n")


def test_a_failure_keeps_its_code_when_the_output_is_full(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = spawn("show", tmp_path, "--json", stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == 3 and ran.stderr.startswith(b"dcr: ")


def test_a_full_output_does_not_undo_an_apply(tiny_pair: tuple[Path, Path], delta: Path, run: Run) -> None:
    with open("/dev/full", "wb") as full:
        ran = spawn("apply", delta, tiny_pair[0], stdout=full, stderr=full)
    assert ran.returncode == 9
    assert run("verify", tiny_pair[0], "--against", tiny_pair[1]).code == 0


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_standard_streams(closed: list[int], tiny_pair: tuple[Path, Path], delta: Path, run: Run) -> None:
    script = f'exec "$@" {" ".join(f"{number}>&-" for number in closed)}'
    command = [sys.executable, "-m", "dcr_cli", "apply", str(delta), str(tiny_pair[0])]
    ran = subprocess.run(["/bin/sh", "-c", script, "sh", *command], capture_output=True, timeout=60)
    assert ran.returncode == (9 if 1 in closed else 0), ran.stderr
    assert run("verify", tiny_pair[0], "--against", tiny_pair[1]).code == 0


def test_no_file_gets_the_number_of_a_closed_stream() -> None:
    script = (
        "from dcr_cli.process import prepare_streams as f; import os; f(); print(os.open('/dev/null', os.O_RDONLY))"
    )
    command = ["/bin/sh", "-c", 'exec "$@" 0>&- 2>&-', "sh", sys.executable, "-c", script]
    assert int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) > 2


def test_what_an_encoding_has_not_is_escaped(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {"h\u00e4": tensor_of("U8", (4,))})
    ran = spawn("inspect", tmp_path / "a", "--tensors", env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii:strict"})
    assert ran.returncode == 0 and rb"h\xe4" in ran.stdout


def test_names_are_escaped_and_never_lost(tmp_path: Path) -> None:
    wild = 'h\u00e4\n\x1b[31m"\\\u202e'
    write_checkpoint(tmp_path / "a", {wild: tensor_of("U8", (4,))})
    write_checkpoint(tmp_path / "b", {wild: tensor_of("U8", (4,), 1)})
    for encoding in ("0", "1"):
        environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": encoding}
        command = ("verify", tmp_path / "a", "--against", tmp_path / "b")
        ran = spawn(*command, env=environment)
        assert ran.returncode == 1 and ran.stderr == b""
        assert ESCAPE.encode() not in ran.stdout and len(ran.stdout.splitlines()) == 2
        document = json.loads(spawn(*command, "--json", env=environment).stdout)
        assert document["differences"][0]["tensor"] == wild


def test_surrogates_in_arguments(tmp_path: Path) -> None:
    for environment in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}):
        ran = spawn("show", os.fsencode(tmp_path).decode() + "/\udcff\u00e4", env={**ENVIRONMENT, **environment})
        assert ran.returncode == 3 and ran.stderr.count(b"\n") <= 2 and b"Traceback" not in ran.stderr


def test_a_file_with_an_accent_is_read_in_an_ascii_locale(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    for checkpoint in tiny_pair:
        (checkpoint / "h\u00e4.txt").write_bytes(b"x")
    environment = {**ENVIRONMENT, "LC_ALL": "C", "PYTHONUTF8": "0"}
    ran = spawn("diff", *tiny_pair, "-o", tmp_path / "delta", env=environment)
    assert ran.returncode == 0, ran.stderr
    assert main(["show", str(tmp_path / "delta"), "-q"]) == 0
    assert spawn("apply", tmp_path / "delta", tiny_pair[0], env=environment).returncode == 0
    assert main(["verify", str(tiny_pair[0]), "--against", str(tiny_pair[1]), "-q"]) == 0


def test_without_home_and_without_a_current_folder(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "HOME"}
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    command = [sys.executable, "-m", "dcr_cli", "diff", *map(str, tiny_pair)]
    ran = subprocess.run(
        ["/bin/sh", "-c", script, "sh", str(gone), *command],
        env={**environment, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


def test_lines_are_not_wrapped(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 40)
    write_checkpoint(folder, {"w" * 300: tensor_of("U8", (4,))})
    ran = spawn("inspect", folder, "--tensors", env={**ENVIRONMENT, "COLUMNS": "20"})
    lines = ran.stdout.decode().splitlines()
    assert str(folder) in lines[0] and any("w" * 300 in line for line in lines)


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"COLUMNS": "1"}])
def test_on_a_terminal(environment: dict[str, str], tiny_pair: tuple[Path, Path]) -> None:
    plain = spawn("verify", tiny_pair[0], "--against", tiny_pair[1]).stdout.decode()
    inner, outer = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "dcr_cli", "verify", str(tiny_pair[0]), "--against", str(tiny_pair[1])],
        stdin=outer,
        stdout=outer,
        stderr=outer,
        env={**ENVIRONMENT, "TERM": "xterm-256color"} | environment,
    )
    os.close(outer)
    shown = b""
    while True:
        try:
            part = os.read(inner, 65536)
        except OSError:  # The other end of the terminal is gone.
            break
        if not part:
            break
        shown += part
    os.close(inner)
    assert child.wait(60) == 1
    text = shown.decode().replace("\r\n", "\n")
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == plain
    assert ("\x1b[" in text) == (environment.get("TERM") != "dumb")
    assert not ("NO_COLOR" in environment and re.search(r"\x1b\[[0-9;]*3[0-7]m", text))


@contextmanager
def hanging(folder: Path, last: str) -> Iterator[subprocess.Popen[bytes]]:
    """An inspect that hangs where it looks at the folder, and whose clean-up is `last`."""
    code = (
        "import sys, time, dcr_cli.cli, dcr_cli.checkpoint.checkpoint as module\n"
        "def stay():\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except BaseException:\n"
        "            pass\n"
        "def hang(*arguments):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        f"        {last}\n"
        "module.check_folder = hang\n"
        "sys.exit(dcr_cli.cli.main(['inspect', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals(number: signal.Signals, code: int, tiny_pair: tuple[Path, Path]) -> None:
    with hanging(tiny_pair[0], "pass") as child:
        begin = time.monotonic()
        child.send_signal(number)
        _, told = child.communicate(timeout=30)
    assert child.returncode == code and time.monotonic() - begin < 20
    assert told.splitlines()[0] == f"dcr: stopped: by signal {number.name}".encode()


@pytest.mark.parametrize("way", ["replace", "--in-place", "--aside", "--to"])
def test_a_stop_says_what_it_has_left(
    way: str, run: Run, tiny_pair: tuple[Path, Path], delta: Path, tmp_path: Path
) -> None:
    """As it was, incomplete, or at the target: whatever the step."""
    work = tmp_path / "work"
    work.mkdir()
    checkpoint = work / ("link" if way == "--aside" else "receiver")
    options = {"replace": [], "--to": ["--to", work / "out"]}.get(way, [way])
    said = set()
    for last in itertools.count(1, 4):
        shutil.rmtree(work)
        fresh_copy(tiny_pair[0], work / "receiver")
        (work / "link").symlink_to("receiver")
        steps = itertools.count(1)

        def stop(kind: str, path: str, other: str, steps: Iterator[int] = steps, last: int = last) -> None:
            if next(steps) >= last:
                raise Stopped(signal.SIGTERM)

        with watching(stop):
            ran = run("apply", delta, checkpoint, *options, "-j", "1")
        if ran.code == 0:
            break
        assert ran.code == 143
        try:
            open_checkpoint(checkpoint)
            left = "as it was" if tree(checkpoint) == tree(tiny_pair[0]) else "at the target"
        except IncompleteError:
            left = "incomplete now"
        assert ran.err.splitlines()[0] == f"dcr: stopped: by signal SIGTERM; {checkpoint} is {left}"
        said.add(left)
    assert "as it was" in said
    assert ("incomplete now" in said) == (way in ("replace", "--in-place"))


@pytest.mark.parametrize(
    "module", ["dcr_cli.cli", "typer", "dcr_cli.cli.local", "dcr_cli.process", "dcr_cli.inspect", "numpy"]
)
def test_an_interrupt_while_modules_are_imported(module: str, tiny_pair: tuple[Path, Path]) -> None:
    code = (
        "import runpy, signal, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupter())\n"
        "sys.argv[0] = 'dcr'\n"
        "runpy.run_module('dcr_cli', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "inspect", str(tiny_pair[0])]
    ran = subprocess.run(command, capture_output=True, timeout=60, env=ENVIRONMENT)
    assert (ran.returncode, ran.stdout) == (130, b"")
    assert ran.stderr in (b"", b"dcr: stopped: by signal SIGINT\nhint: run the same command again\n")


def test_a_second_signal_ends_a_command_that_will_not_end(tiny_pair: tuple[Path, Path]) -> None:
    with hanging(tiny_pair[0], "print('stopping', flush=True); stay()") as child:
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None and child.stdout.readline() == b"stopping\n"
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=30)
    assert child.returncode == 143


def test_an_ignored_signal_stays_ignored(tiny_pair: tuple[Path, Path]) -> None:
    """As under nohup."""
    code = (
        "import signal, sys, dcr_cli.cli, dcr_cli.checkpoint.checkpoint as module\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "check = module.check_folder\n"
        "module.check_folder = lambda *a: (signal.raise_signal(signal.SIGHUP), check(*a))\n"
        "sys.exit(dcr_cli.cli.main(['inspect', sys.argv[1], '-q']))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tiny_pair[0])], timeout=60).returncode == 0


def test_main_leaves_signal_handlers_as_they_were(run: Run) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run("--version")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("arguments", [("--help",), ("diff", "--help")])
def test_start_up_is_quick(arguments: tuple[str, ...]) -> None:
    """Help takes at most 0.2 s of a processor, in the best of several runs."""
    times = []
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-m", "dcr_cli", *arguments], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        times.append(usage.ru_utime + usage.ru_stime)
    assert min(times) <= 0.2
