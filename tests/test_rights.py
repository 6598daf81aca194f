"""Rights: every command needs just those that FORMAT 13.10 says, from the table itself.

The store behaves as one that says of what is absent, to who may not list, that it may not be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import dcr_cli
from dcr_cli.anchor import anchor
from dcr_cli.commit import commit
from dcr_cli.errors import NotFoundError, TransportError, WrongBaseError
from dcr_cli.log import log
from dcr_cli.prune import prune
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.push_part import Rank, push_part
from dcr_cli.show import show
from dcr_cli.status import status
from dcr_cli.store.backend import Backend
from dcr_cli.verify import verify
from dcr_cli.verify_remote import verify_remote
from receivers import fresh_copy
from store_wrappers import Allows, wrapping
from strategies import write_tiny_steps

RIGHTS = ("get", "create", "put", "list", "delete")
KEYS = ("dcr.json", "next.json", "prune.json", "commits/", "versions/", "anchors/", "acks/")
CALLS = {
    "get": ("read", "status"),
    "create": ("create",),
    "put": ("write",),
    "list": ("entries",),
    "delete": ("remove",),
}
Row = dict[str, tuple[list[str], list[str]]]


def table() -> dict[str, Row]:
    """The table: for each command and right the patterns that it always needs, and those that options add."""
    text = (Path(dcr_cli.__file__).parent / "FORMAT.md").read_text()
    lines = text.split("### 13.10 Rights")[1].split("### 13.11")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert tuple(rows[0]) == ("command", *RIGHTS)
    found = {}
    for names, *cells in rows[2:]:
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = {right: patterns(cell) for right, cell in zip(RIGHTS, cells, strict=True)}
            if "with get" in cells[3]:
                found[name]["get"][1].append("acks/*")
    return found


def patterns(cell: str) -> tuple[list[str], list[str]]:
    always, *added = re.split(r"[;]? *\+ ", f" {cell}")
    return keys_in(always), [key for text in added for key in keys_in(text)]


def keys_in(text: str) -> list[str]:
    named = [key for key in re.findall(r"`([^`]+)`", text) if key in KEYS]
    if text.strip() == "all":
        return ["*"]
    if text.strip().startswith("all"):
        named = [key for key in KEYS if key not in named]
    return [f"{key}*" if key.endswith("/") else key for key in named]


@contextmanager
def rights_of(command: str, *, with_added: bool = False, uses_all: bool = False) -> Iterator[None]:
    """Meanwhile there are no other rights than those of a row; with `uses_all`, each of them is needed."""
    row = table()[command]
    given = {right: always + (added if with_added else []) for right, (always, added) in row.items()}
    used: set[tuple[str, str]] = set()

    class Uses(Allows):
        def called(self, name: str, key: str) -> None:
            super().called(name, key)
            used.update((right, key) for right, calls in CALLS.items() if name in calls)

    def wrap(backend: Backend) -> Allows:
        return Uses(backend, **given)

    with wrapping(wrap):
        yield
    if uses_all:
        named = {(right, key) for right, keys in given.items() for key in keys}
        assert named == {each for each in named if any(each[0] == r and fnmatchcase(k, each[1]) for r, k in used)}


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    return write_tiny_steps(tmp_path, 4)


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


def baseline_of(step: Path) -> Path:
    (found,) = (step.parent / ".dcr-baseline").iterdir()
    return found


def test_the_table_has_all_commands() -> None:
    assert set(table()) == {
        *("push", "pull", "log", "show", "verify", "status", "commit", "push --part", "anchor", "prune")
    }
    assert table()["pull"]["get"][0] == ["dcr.json", "next.json", "prune.json", "commits/*", "versions/*", "anchors/*"]
    assert table()["prune"]["delete"] == (["versions/*", "anchors/*", "acks/*", "prune.json"], [])


def test_push(steps: list[Path], remote: Path) -> None:
    with rights_of("push", uses_all=True):
        for step in steps[:3]:
            push(step, remote, anchor_every=2)
        push(steps[3], remote, prepare=True)
        push(steps[3], remote, prepare=True)


def test_push_from_behind(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    kept = fresh_copy(baseline_of(steps[0]), tmp_path / "kept")
    push(steps[1], remote)
    with rights_of("push"), pytest.raises((TransportError, WrongBaseError)):
        push(steps[2], remote, baseline=kept)
    with rights_of("push", with_added=True):
        push(steps[2], remote, baseline=kept)
    pull(remote, tmp_path / "receiver", receiver="host")
    with rights_of("push", with_added=True):
        assert push(steps[2], remote, baseline=kept, wait_applied=1).applied == ("host",)


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_pull(steps: list[Path], remote: Path, tmp_path: Path, mode: str) -> None:
    for step in steps[:2]:
        push(step, remote)
    with rights_of("pull"):
        pull(remote, tmp_path / "r", mode=mode)
        assert pull(remote, tmp_path / "r", mode=mode).already
    push(steps[2], remote)
    with rights_of("pull"):
        assert pull(remote, tmp_path / "r", mode=mode).version == 3
    with rights_of("pull"), pytest.raises(TransportError, match="denied"):
        pull(remote, tmp_path / "other", receiver="host")
    push(steps[3], remote, prepare=True)
    with rights_of("pull", with_added=True):
        assert pull(remote, tmp_path / "r", mode=mode, receiver="host").staged == 4


@pytest.mark.parametrize(
    "look",
    [
        lambda remote, checkpoint: log(remote),
        lambda remote, checkpoint: show(f"{remote}@2", deep=True),
        lambda remote, checkpoint: show(f"{remote}@1"),
        lambda remote, checkpoint: verify_remote(remote, deep=True),
        lambda remote, checkpoint: verify(checkpoint, remote=str(remote)),
    ],
)
def test_what_only_gets(steps: list[Path], remote: Path, look: Callable[[Path, Path], object]) -> None:
    for step in steps[:2]:
        push(step, remote)
    with rights_of("verify"):
        look(remote, steps[1])


def test_status(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    pull(remote, tmp_path / "r", receiver="host")
    with rights_of("status"):
        found = status(remote)
    assert found.receivers is not None and not found.not_listed


def test_commit(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    pull(remote, tmp_path / "r")
    push(steps[1], remote, prepare=True)
    pull(remote, tmp_path / "r", receiver="host")
    with rights_of("commit", uses_all=True):
        assert commit(remote, quorum=1).staged == ("host",)
        assert commit(remote).already


def test_commit_gives_up(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    push(steps[1], remote, prepare=True)
    with rights_of("commit"), pytest.raises(TransportError, match="denied"):
        commit(remote, 2)
    with rights_of("commit", with_added=True):
        assert not commit(remote, 2, abort=True).committed


def test_a_part(steps: list[Path], remote: Path) -> None:
    push(steps[0], remote)
    with rights_of("push --part", uses_all=True):
        assert push_part(steps[1], remote, Rank(0, 1)).version == 2


def test_a_part_from_elsewhere(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    push(steps[0], remote)
    kept = fresh_copy(baseline_of(steps[0]), tmp_path / "kept")
    with rights_of("push --part"):
        assert push_part(steps[1], remote, Rank(0, 1), base=steps[0], baseline=tmp_path / "home").version == 2
    push(steps[1], remote, no_delta=True)
    push(steps[2], remote, no_delta=True)
    with rights_of("push --part"):
        assert push_part(steps[3], remote, Rank(0, 1), base=steps[2], baseline=tmp_path / "home").version == 4
    with rights_of("push --part"), pytest.raises((TransportError, NotFoundError, WrongBaseError)):
        push_part(steps[0], remote, Rank(0, 1), baseline=kept)
    with rights_of("push --part", with_added=True):
        assert push_part(steps[0], remote, Rank(0, 1), baseline=kept).version == 5


def test_anchor(steps: list[Path], remote: Path) -> None:
    for step in steps[:2]:
        push(step, remote)
    with rights_of("anchor", uses_all=True):
        assert not anchor(steps[1], remote).already


def test_prune(steps: list[Path], remote: Path, tmp_path: Path) -> None:
    for number, step in enumerate(steps):
        push(step, remote, anchor_every=1)
        pull(remote, tmp_path / f"r{number}", receiver=f"host-{number}")
    # One that takes long, or takes the place of one that was killed, also puts prune.json.
    with rights_of("prune"):
        found = prune(remote, keep=1, keep_within=0, lease=0)
    assert {each.what for each in found.outlived} >= {"version", "anchor"}
