"""Receivers of a remote to which several addresses lead, of which some are dead, behind, or of another history."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcr_cli.cli import main
from dcr_cli.errors import TransportError, UsageError, WrongBaseError
from dcr_cli.follow import follow
from dcr_cli.pull import pull
from dcr_cli.push import push
from pushed import states
from receivers import tree
from relay_stand_in import StandIn, stand_in
from strategies import write_checkpoint


@pytest.fixture
def remotes(tmp_path: Path) -> list[Path]:
    """One remote as it was when it had one version, two, and three."""
    found = []
    for number, state in enumerate(states(3), start=1):
        checkpoint = write_checkpoint(tmp_path / f"v{number}", state, sidecars={"config.json": b"{}"})
        push(checkpoint, tmp_path / "remote", baseline=tmp_path / "baseline")
        found.append(Path(shutil.copytree(tmp_path / "remote", tmp_path / f"remote-{number}")))
    return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with stand_in() as server:
        yield server


def serve(server: StandIn, remote: Path) -> None:
    """Have a server hold what a folder holds, and nothing else."""
    files = [path for path in remote.rglob("*") if path.is_file()]
    server.objects = {str(path.relative_to(remote)): path.read_bytes() for path in files}


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_remote_that_is_dead(remotes: list[Path], tmp_path: Path) -> None:
    """All goes to the other one, acknowledgements too; and the result names the one that was asked for."""
    dead = dead_address()
    result = pull(dead, tmp_path / "r", fallbacks=[dead_address(), remotes[2]], receiver="eu-1")
    assert (result.version, result.remote) == (3, dead)
    assert tree(tmp_path / "r") == tree(tmp_path / "v3")
    assert [path.name for path in remotes[2].glob("acks/*/*")] == ["eu-1.applied"]


def test_a_fallback_that_is_behind_is_no_log_that_went_backwards(
    remotes: list[Path], server: StandIn, tmp_path: Path
) -> None:
    """While REMOTE does not answer it may pass (7), and as soon as it does, all is well."""
    root = tmp_path / "r"
    serve(server, remotes[1])
    pull(server.url, root, fallbacks=[remotes[0]])
    before = tree(root)
    with pytest.raises(TransportError, match="what answers instead is behind") as caught:
        pull(dead_address(), root, fallbacks=[remotes[0]])
    assert caught.value.retryable and tree(root) == before
    assert pull(server.url, root, fallbacks=[remotes[0]]).already
    serve(server, remotes[2])
    assert pull(server.url, root, fallbacks=[remotes[0]]).version == 3
    # One that is behind the newest version, but not behind the receiver, has no news.
    assert pull(dead_address(), root, fallbacks=[remotes[2]]).already


def test_a_remote_that_is_behind_its_fallback(remotes: list[Path], server: StandIn, tmp_path: Path) -> None:
    """The receiver has seen more: what has that serves it."""
    root = tmp_path / "r"
    assert pull(dead_address(), root, fallbacks=[remotes[1]]).version == 2
    serve(server, remotes[0])
    assert pull(server.url, root, fallbacks=[remotes[1]]).already
    assert pull(server.url, root, fallbacks=[dead_address(), remotes[2]]).version == 3
    assert tree(root) == tree(tmp_path / "v3")


def test_a_log_that_did_go_backwards_is_seen(remotes: list[Path], server: StandIn, tmp_path: Path) -> None:
    root = tmp_path / "r"
    pull(remotes[1], root)
    serve(server, remotes[0])
    with pytest.raises(WrongBaseError, match="its log ends below version 2"):
        pull(server.url, root, fallbacks=[remotes[0]])


def test_objects_that_one_of_them_lacks(remotes: list[Path], server: StandIn, tmp_path: Path) -> None:
    """As a mirror to which commits came before what they bind."""
    root = tmp_path / "r"
    pull(remotes[0], root)
    serve(server, remotes[1])
    for key in [key for key in server.objects if key.startswith("versions/")]:
        del server.objects[key]
    with pytest.raises(TransportError, match="what answers instead is behind"):
        pull(server.url, root, fallbacks=[dead_address()])
    assert pull(server.url, root, fallbacks=[remotes[1]]).version == 2
    assert tree(root) == tree(tmp_path / "v2")


@pytest.mark.parametrize("is_new", [False, True])
def test_another_history_is_not_mixed_in(remotes: list[Path], server: StandIn, tmp_path: Path, is_new: bool) -> None:
    root = tmp_path / "r"
    push(tmp_path / "v3", tmp_path / "other", baseline=tmp_path / "other-baseline")
    if not is_new:
        pull(remotes[0], root)
        push(tmp_path / "v2", tmp_path / "other", baseline=tmp_path / "other-baseline")
    before = tree(root) if root.exists() else None
    serve(server, remotes[1])
    # It says which history it holds, and then goes away.
    server.faults[:] = ["", *["503"] * 50]
    with pytest.raises(WrongBaseError, match="is of history"):
        pull(server.url, root, fallbacks=[tmp_path / "other"])
    assert (tree(root) if root.exists() else None) == before


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fallback_of_another_history_is_none_however_long_that_is(
    remotes: list[Path], tmp_path: Path, count: int
) -> None:
    """It is not behind: waiting does not help."""
    root = tmp_path / "r"
    pull(remotes[1], root)
    for number in range(1, count + 1):
        push(tmp_path / f"v{number}", tmp_path / "other", baseline=tmp_path / "other-baseline")
    before = tree(root)
    with pytest.raises(WrongBaseError, match="history"):
        pull(dead_address(), root, fallbacks=[tmp_path / "other"])
    assert tree(root) == before


def test_one_that_is_behind_counts_before_one_of_another_history(remotes: list[Path], tmp_path: Path) -> None:
    pull(remotes[1], tmp_path / "r")
    push(tmp_path / "v1", tmp_path / "other", baseline=tmp_path / "other-baseline")
    with pytest.raises(TransportError, match="is behind"):
        pull(dead_address(), tmp_path / "r", fallbacks=[remotes[0], tmp_path / "other"])


def test_followers_fail_over_and_back(remotes: list[Path], server: StandIn, tmp_path: Path) -> None:
    serve(server, remotes[0])
    arrivals = follow(server.url, tmp_path / "r", tell=lambda error: None, fallbacks=[remotes[1]])
    assert next(arrivals).result.version == 1
    server.faults[:] = ["503"]
    assert next(arrivals).result.version == 2
    arrivals.close()  # type: ignore[attr-defined]


def test_the_command(remotes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [dead_address(), str(tmp_path / "r"), "--fallback", dead_address(), "--fallback", str(remotes[2])]
    assert main(["pull", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 3


@pytest.mark.parametrize("run", [pull, lambda *given, **options: next(follow(*given, tell=print, **options))])
def test_addresses_are_looked_at_first(tmp_path: Path, run: Callable[..., object]) -> None:
    for fallback in ("", tmp_path / "r", tmp_path / "r" / "in"):
        with pytest.raises(UsageError):
            run(tmp_path / "remote", tmp_path / "r", fallbacks=[fallback])
    assert not (tmp_path / "r").exists()
