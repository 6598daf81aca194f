"""What log tells of a remote's versions, that each has to follow the one before, and that getting is right enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_cli.errors import DamagedError, NotFoundError, TransportError, UsageError, WrongBaseError
from dcr_cli.log import log
from dcr_cli.remote.keys import Place, anchor_key, commit_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import load_signing_key
from dcr_cli.store.backend import AbsentError, Answer
from dcr_cli.store.store import Store
from histories import CREATED, HISTORY, PUBLISHER, Objects, Publisher, empty_state, id_of, new_remote, publish, serve

HEX = "0123456789abcdef" * 4


@pytest.fixture
def objects() -> Objects:
    return new_remote()


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, objects: Objects) -> str:
    return serve(monkeypatch, objects)


def test_the_newest_come_first(objects: Objects, url: str) -> None:
    publish(objects, "addDa")
    result = log(url)
    assert (result.remote, result.history, result.head) == (url, HISTORY, 5)
    assert [each.version for each in result.versions] == [5, 4, 3, 2, 1]
    assert [each.kind for each in result.versions] == ["anchor", "delta", "delta", "delta", "anchor"]
    assert [each.has_anchor for each in result.versions] == [True, True, False, False, True]
    newest = result.versions[0]
    assert (newest.id, newest.target, newest.created, newest.publisher) == (
        id_of(5), empty_state(5), CREATED, PUBLISHER,
    )  # fmt: skip
    assert newest.bytes == len(b"a shard of nothing") + len(objects.data(anchor_key(Place(5, id_of(5)))))
    assert newest.signers is None
    assert result.versions[1].bytes == len("manifest 4") + len("digests") + 2 * len("payload 4 0")


@pytest.mark.parametrize(("lines", "expected"), [(None, 24), (1, 1), (24, 24), (30, 24), (20, 20)])
def test_so_many_lines(objects: Objects, url: str, lines: int | None, expected: int) -> None:
    publish(objects, "a" + "d" * 23)
    assert [each.version for each in log(url, lines=lines).versions] == list(range(24, 24 - expected, -1))
    assert len(log(url).versions) == 20


def test_no_versions_yet(objects: Objects, url: str) -> None:
    assert (log(url).head, log(url).versions) == (0, ())


def test_no_remote(objects: Objects, url: str) -> None:
    objects.objects.clear()
    with pytest.raises(NotFoundError, match="holds no versions"):
        log(url)
    with pytest.raises(UsageError):
        log(url, lines=0)


def test_getting_is_right_enough(objects: Objects, url: str) -> None:
    """No listing, no writing, and what is absent is denied."""
    publish(objects, "addD")
    objects.denied = frozenset({"list", "write", "absent"})
    result = log(url)
    assert [each.version for each in result.versions] == [4, 3, 2, 1]
    assert {each.has_anchor for each in result.versions} == {None}


def test_a_version_that_follows_another_is_refused(objects: Objects, url: str) -> None:
    publish(objects, "adddd")
    other = new_remote()
    publisher = Publisher(other)
    for payloads in (1, 2, 3):
        publisher.empty_anchor() if payloads == 1 else publisher.empty_delta(payloads)
    objects.objects[commit_key(3)] = other.objects[commit_key(3)]
    with pytest.raises(DamagedError, match="does not follow the commit of version 3"):
        log(url)
    # Proven even if only the one after it is told.
    with pytest.raises(DamagedError, match="does not follow the commit of version 3"):
        log(url, lines=2)
    assert len(log(url, lines=1).versions) == 1


def test_another_history_is_refused(objects: Objects, url: str) -> None:
    publish(objects, "ad")
    objects.objects["dcr.json"] = new_remote("e" * 32).objects["dcr.json"]
    with pytest.raises(WrongBaseError, match="is of history"):
        log(url)


def test_signers(objects: Objects, url: str, tmp_path: Path) -> None:
    cryptography = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    private = cryptography.Ed25519PrivateKey.generate()
    (tmp_path / "key").write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    key = load_signing_key(tmp_path / "key")
    publisher = Publisher(objects)
    publisher.empty_anchor()
    publisher.key = key
    publisher.empty_delta()
    own = key.public.hex()
    assert [each.signers for each in log(url, trusted_keys=[own, HEX]).versions] == [(own,), ()]
    assert [each.signers for each in log(url, trusted_keys=[HEX]).versions] == [(), ()]


class Million(Objects):
    """A log of so many commits that they exist only when they are asked for."""

    head = 1_000_000

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        self.calls.append(("read", key))
        if not key.startswith("commits/") or int(key[8:-5]) > self.head:
            raise AbsentError
        return Answer(0, 2, 2, iter([b"{}"]))


@pytest.mark.parametrize("head", [0, 1, 2, 3, 9, 10, 11, 999_999, 1_000_000, 9_999_999_999])
def test_the_newest_of_very_many_is_found_in_few_requests(head: int) -> None:
    objects = Million()
    objects.head = head
    found = Log(Store(objects, "here"), HISTORY)
    assert found.newest(0) == head
    assert len(objects.calls) <= 2 * head.bit_length() + 2
    objects.calls.clear()
    assert found.newest(head) == head and len(objects.calls) <= 1
    objects.calls.clear()
    assert found.newest(max(0, head - 1)) == head and len(objects.calls) <= 2


def test_a_store_that_fails_is_no_end_of_the_log(objects: Objects, url: str) -> None:
    publish(objects, "ad")
    objects.denied = frozenset({"read"})
    with pytest.raises(TransportError):
        log(url)
