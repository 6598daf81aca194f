"""What status tells of a remote, and what it says where it may not look."""

from __future__ import annotations

import time

import pytest

from dcr_cli.errors import NotFoundError
from dcr_cli.remote.hint import GIVEN_UP, PREPARED, STREAMING
from dcr_cli.remote.keys import STAGED, Place
from dcr_cli.status import Making, Stored, status
from histories import CREATED, DAY, HISTORY, PUBLISHER, Objects, empty_state, new_remote, publish, serve

OWN = "e" * 32


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    objects = new_remote()
    monkeypatch.setattr(time, "time", lambda: objects.now)
    return objects


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> str:
    return serve(monkeypatch, objects)


def test_what_lies_there(objects: Objects, url: str) -> None:
    publish(objects, "addDd")
    objects.set("notes", b"?")
    objects.set("acks/notes", b"?")
    result = status(url)
    assert (result.remote, result.history, result.encodings) == (url, HISTORY, ("context", "gap", "whole"))
    assert (result.head, result.kind, result.target) == (5, "delta", empty_state(5))
    assert (result.created, result.publisher, result.signers) == (CREATED, PUBLISHER, None)
    assert (result.deltas, result.anchors, result.making, result.receivers) == ((2, 3, 4, 5), (1, 4), None, ())
    by_kind = {each.kind: each for each in result.stored}
    assert by_kind["deltas"] == Stored("deltas", 16, 4 * (len("manifest 2") + len("digests") + 2 * len("payload 2 0")))
    assert by_kind["anchors"].objects == 4 and by_kind["commits"].objects == 5
    assert (result.unknown, result.not_listed) == (("acks/notes",), ())


def test_receivers_by_their_newest_word(objects: Objects, url: str) -> None:
    publisher = publish(objects, "adddd")
    publisher.acknowledge(4, "b")
    objects.now += DAY
    publisher.acknowledge(2, "a")
    publisher.acknowledge(3, "a", STAGED)
    publisher.acknowledge(4, "b", STAGED)
    objects.now += 60
    found = {each.receiver: each for each in status(url).receivers or ()}
    assert list(found) == ["a", "b"]
    assert [(each.version, each.stage, each.lag, each.age_seconds) for each in found.values()] == [
        (3, "staged", 2, 60.0), (4, "applied", 1, DAY + 60),
    ]  # fmt: skip
    assert found["a"].signers == () and not found["a"].is_built


def test_a_word_that_cannot_be_read_counts_by_its_key(objects: Objects, url: str) -> None:
    publisher = publish(objects, "ad")
    objects.set(f"acks/{publisher.place(2)}/a.applied", b"nonsense")
    receivers = status(url).receivers
    assert receivers is not None and [(each.receiver, each.version) for each in receivers] == [("a", 2)]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_what_is_being_made(objects: Objects, url: str, is_prepared: bool) -> None:
    publisher = publish(objects, "ad")
    place, state = Place(3, OWN), PREPARED if is_prepared else STREAMING
    publisher.begin(place, state, is_prepared=is_prepared)
    publisher.acknowledge(3, "a", STAGED, own=OWN)
    assert status(url).making == Making(3, OWN, state, is_prepared, 1, CREATED)


@pytest.mark.parametrize(("version", "state"), [(2, STREAMING), (3, GIVEN_UP)])
def test_what_was_made_is_not_being_made(objects: Objects, url: str, version: int, state: str) -> None:
    publish(objects, "ad").begin(Place(version, OWN), state)
    assert status(url).making is None


def test_where_nothing_may_be_listed(objects: Objects, url: str) -> None:
    publisher = publish(objects, "ad")
    publisher.begin(Place(3, OWN), STREAMING)
    objects.denied = frozenset({"list", "write", "absent"})
    result = status(url)
    assert (result.head, result.making) == (2, Making(3, OWN, STREAMING, False, None, CREATED))
    assert (result.deltas, result.anchors, result.receivers, result.stored) == (None, None, None, ())
    assert result.not_listed == ("versions/", "anchors/", "commits/", "acks/")


def test_no_versions_and_no_remote(objects: Objects, url: str) -> None:
    result = status(url)
    assert (result.head, result.kind, result.target, result.deltas) == (0, None, None, ())
    objects.objects.clear()
    with pytest.raises(NotFoundError):
        status(url)
