"""What relays say of themselves, as `dcr status` reads and tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcr_cli.cli import main
from dcr_cli.errors import DamagedError, TransportError, UnsupportedError
from dcr_cli.push import push
from dcr_cli.remote.relay import RelayChild, RelayNext, RelayParent, RelaySpool, RelayStatus, decode_relay, read_relay
from dcr_cli.report.relays import relay_lines
from dcr_cli.status import status
from dcr_cli.store.opening import open_store
from dcr_cli.store.retry import Patience
from pushed import states
from relay_stand_in import StandIn, stand_in
from strategies import write_checkpoint


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with stand_in() as server:
        yield server


def members(**changes: Any) -> dict[str, Any]:
    """What a relay without children says."""
    return {
        "format": "dcr-1",
        "requires": [],
        "relay": "eu",
        "started": "2031-02-03T04:05:06Z",
        "now": "2031-02-03T05:05:06Z",
        "history": "1" * 32,
        "head": 12,
        "next": {"version": 13, "id": "2" * 32, "state": "streaming", "more": 1},
        "parents": [
            {"shown": "https://relay.example/a", "is_used": False, "is_answering": False, "more": 1},
            {"shown": "s3://bucket/a", "is_used": True, "is_answering": True},
        ],
        "spool": {"objects": 4, "bytes": 5 << 20, "limit": 1 << 30, "more": 1},
        "received_bytes": 6 << 20,
        "sent_bytes": 7 << 20,
        "children": [],
        "more": {"than": "is known"},
        **changes,
    }


def child(**changes: Any) -> dict[str, Any]:
    return {
        "name": "rollout-1",
        "kind": "receiver",
        "address": "10.0.0.1",
        "version": 11,
        "lag": 1,
        "sent_bytes": 3 << 20,
        "seen_seconds": 2.5,
        "status": None,
        "more": 1,
        **changes,
    }


def tree() -> dict[str, Any]:
    """A relay with a receiver and a relay, which has a receiver of its own."""
    gone = child(name="rollout-2", version=None, lag=None, address="", is_gone=True)
    below = members(relay="eu-2", children=[gone])
    return members(children=[child(), child(name="eu-2", kind="relay", lag=0, version=12, status=below)])


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_all_that_is_said() -> None:
    found = decode_relay(encoded(tree()), "relay/status")
    assert found == RelayStatus(
        relay="eu",
        started="2031-02-03T04:05:06Z",
        now="2031-02-03T05:05:06Z",
        history="1" * 32,
        head=12,
        next=RelayNext(13, "2" * 32, "streaming"),
        parents=(RelayParent("https://relay.example/a", False, False), RelayParent("s3://bucket/a", True, True)),
        spool=RelaySpool(4, 5 << 20, 1 << 30),
        received_bytes=6 << 20,
        sent_bytes=7 << 20,
        children=(
            RelayChild("rollout-1", "receiver", "10.0.0.1", 11, 1, 3 << 20, 2.5, False, None),
            RelayChild("eu-2", "relay", "10.0.0.1", 12, 0, 3 << 20, 2.5, False, found.children[1].status),
        ),
    )
    below = found.children[1].status
    assert below is not None and below.relay == "eu-2"
    assert [(each.name, each.version, each.lag, each.is_gone) for each in below.children] == [
        ("rollout-2", None, None, True)
    ]


def test_a_relay_that_knows_nothing_yet() -> None:
    document = members(history=None, head=0, next=None, parents=[], spool={"objects": 0, "bytes": 0, "limit": None})
    found = decode_relay(encoded(document), "relay/status")
    assert (found.history, found.head, found.next, found.spool.limit) == (None, 0, None, None)


@pytest.mark.parametrize(
    "document",
    [
        [],
        members(format="dcr-0"),
        members(requires=None),
        members(relay=1),
        members(head=-1),
        members(head=True),
        members(history=1),
        members(next=[]),
        members(next={"version": 1, "id": "a"}),
        members(parents={}),
        members(parents=["s3://bucket"]),
        members(parents=[{"shown": "a", "is_used": 1, "is_answering": True}]),
        members(spool={"objects": 1, "bytes": 1}),
        members(spool=None),
        members(received_bytes=1.5),
        members(children=[1]),
        *[
            members(children=[child(**changes)])
            for changes in (
                {"name": None},
                {"kind": "parent"},
                {"version": "1"},
                {"lag": -1},
                {"seen_seconds": True},
                {"seen_seconds": -1},
                {"seen_seconds": None},
                {"is_gone": None},
                {"sent_bytes": None},
            )
        ],
        {key: value for key, value in members().items() if key != "history"},
    ],
)
def test_what_is_not_said_so(document: Any) -> None:
    with pytest.raises(DamagedError):
        decode_relay(encoded(document), "relay/status")


def test_what_needs_a_newer_dcr() -> None:
    for document in (members(format="dcr-2"), members(requires=["more"])):
        with pytest.raises(UnsupportedError):
            decode_relay(encoded(document), "relay/status")


@pytest.mark.parametrize("below", [1, {}, members(format="dcr-2"), members(head="1")])
def test_what_a_child_says_wrongly_is_only_left_out(below: Any) -> None:
    document = members(children=[child(kind="relay", status=below)])
    (found,) = decode_relay(encoded(document), "relay/status").children
    assert found.name == "rollout-1" and found.status is None


def test_trees_that_are_too_deep() -> None:
    document = members()
    for _ in range(10):
        document = members(children=[child(kind="relay", status=document)])
    with pytest.raises(DamagedError):
        decode_relay(encoded(document), "relay/status")


class TestAsking:
    @pytest.fixture
    def remote(self, server: StandIn, tmp_path: Path) -> str:
        push(
            write_checkpoint(tmp_path / "v1", states(1)[0], sidecars={"config.json": b"{}"}),
            server.url,
            baseline=tmp_path / "baseline",
        )
        return server.url

    def test_a_relay(self, server: StandIn, remote: str) -> None:
        server.put("status", encoded(tree()))
        found = status(remote)
        assert found.relay == decode_relay(encoded(tree()), "")
        assert found.head == 1

    def test_other_servers(self, server: StandIn, remote: str) -> None:
        assert status(remote).relay is None
        for data in (b"", b"ok\n", b"{}", b"<html>"):
            server.put("status", data)
            assert status(remote).relay is None
        server.put("status", encoded(tree()))
        for fault in ("401", "403", "405", "page 200", "page 404"):
            server.faults[:] = [fault]
            with open_store(remote) as store:
                assert read_relay(store) is None
        server.faults[:] = ["503"] * 100
        with open_store(remote, patience=Patience(deadline_seconds=0.0)) as store, pytest.raises(TransportError):
            read_relay(store)

    def test_other_remotes_are_not_asked(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as store:
            store.put("status", encoded(tree()))
            before = store.traffic.requests
            assert read_relay(store) is None
            assert store.traffic.requests == before

    def test_the_command(self, server: StandIn, remote: str, capsys: pytest.CaptureFixture[str]) -> None:
        server.put("status", encoded(tree()))
        assert main(["status", remote, "--json"]) == 0
        relay = json.loads(capsys.readouterr().out)["relay"]
        assert relay["children"][1]["status"]["children"][0]["name"] == "rollout-2"
        assert relay["parents"][1] == {"shown": "s3://bucket/a", "is_used": True, "is_answering": True}
        assert main(["status", remote]) == 0
        assert "\n    rollout-2 " in capsys.readouterr().out


def test_what_people_read() -> None:
    lines = [line.text for line in relay_lines(decode_relay(encoded(tree()), ""))]
    assert lines == [
        "relay eu, started 2031-02-03T04:05:06Z",
        "  parent https://relay.example/a: not used, does not answer",
        "  parent s3://bucket/a: used",
        "  version 12; received 6.29 MB, sent 7.34 MB; spool 4 objects, 5.24 MB of 1.07 GB",
        "  child        kind      address   version  behind     sent           seen",
        "  rollout-1    receiver  10.0.0.1       11       1  3.15 MB        2 s ago",
        "  eu-2         relay     10.0.0.1       12       0  3.15 MB        2 s ago",
        "    rollout-2  receiver  -               ?       ?  3.15 MB  2 s ago, gone",
    ]


def test_names_break_no_line() -> None:
    document = members(relay="a\nb", children=[child(name="c\nd", address="\x1b[2J")])
    text = "\n".join(line.text for line in relay_lines(decode_relay(encoded(document), "")))
    assert len(text.splitlines()) == 6 and "\x1b" not in text
    assert [line.text for line in relay_lines(decode_relay(encoded(members()), ""))][-1] == "  no children"
