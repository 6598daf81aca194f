"""The parts of a relay by themselves: what keys name, what requests ask for, what is kept, and who may do what."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.durable import hooks
from dcr_cli.errors import TransportError
from dcr_cli.relay import spool as spools
from dcr_cli.relay.arrival import Arrival, State
from dcr_cli.relay.children import Children, read_status
from dcr_cli.relay.kinds import Kind, named
from dcr_cli.relay.news import News
from dcr_cli.relay.parents import Parent, Parents, UnavailableError
from dcr_cli.relay.requests import key_of, range_of, wait_of
from dcr_cli.relay.rights import Right, Rights
from dcr_cli.relay.spool import MOST_LENT_BYTES, FullError, Kept, Label, Spool
from dcr_cli.remote.hint import Hint, encode_hint
from dcr_cli.remote.keys import Place
from dcr_cli.store.http_answers import length_of
from relays import store_of

ID = "0123456789abcdef" * 2
PLACE = f"0000000007-{ID}"


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "kind"),
        [
            ("dcr.json", Kind.HISTORY),
            ("next.json", Kind.HINT),
            ("commits/0000000007.json", Kind.COMMIT),
            (f"versions/{PLACE}/commit.json", Kind.PREPARED),
            (f"versions/{PLACE}/decision.json", Kind.DECISION),
            (f"versions/{PLACE}/manifest.zst", Kind.MANIFEST),
            (f"versions/{PLACE}/digests.zst", Kind.DIGESTS),
            (f"versions/{PLACE}/payloads/000012.safetensors", Kind.PAYLOAD),
            (f"versions/{PLACE}/parts/00003.json", Kind.PART),
            (f"versions/{PLACE}/parts/00003.zst", Kind.TABLE),
            (f"versions/{PLACE}/parts/unchanged.json", Kind.UNCHANGED),
            (f"anchors/{PLACE}.json", Kind.ANCHOR),
            (f"anchors/{PLACE}/files/a/b.safetensors", Kind.ANCHOR_FILE),
            (f"acks/{PLACE}/me.applied", Kind.ACKNOWLEDGEMENT),
        ],
    )
    def test_what_they_name(self, key: str, kind: Kind) -> None:
        found = named(key)
        assert found is not None and found.kind is kind
        assert found.version == (0 if kind in (Kind.HISTORY, Kind.HINT) else 7)

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "prune.json",
            "commits/7.json",
            "commits/0000000000.json",
            f"versions/{PLACE}/payloads/12.safetensors",
            f"versions/{PLACE}/payloads/0000012.safetensors",
            f"versions/{PLACE}/payloads/1000000.safetensors",
            f"versions/{PLACE}/payloads/000012.safetensors/x",
            f"versions/{PLACE}/other",
            f"anchors/{PLACE}/files/../x",
            f"anchors/{PLACE}/files/.hidden",
            f"acks/{PLACE}/me.seen",
            "/dcr.json",
            "./dcr.json",
        ],
    )
    def test_what_names_nothing(self, key: str) -> None:
        assert named(key) is None


class TestRequests:
    def test_paths(self) -> None:
        assert key_of("/a/b%20c%C3%A4?x=1") == "a/b c\xe4"
        assert key_of("a") is None and key_of("/%ff") is None

    def test_ranges(self) -> None:
        found = [range_of(text, 10) for text in (None, "bytes=2-3", "bytes=2-", "bytes=-3", "bytes=9-20", "x")]
        assert found == [(0, 10), (2, 4), (2, 10), (7, 10), (9, 10), (0, 10)]
        assert range_of("bytes=10-", 10) is None and range_of("bytes=0-", 0) is None and range_of(None, 0) == (0, 0)

    def test_preferences(self) -> None:
        found = [wait_of(text) for text in (None, "wait=5", "respond-async, wait=7", "wait=900", "wait=-1", "await=3")]
        assert found == [None, 5, 7, 60, None, None]

    def test_lengths(self) -> None:
        assert [length_of(text) for text in (None, "7", " 7 ", "-7", "+7", "\u0667", "9" * 19)] == [None, 7, 7] + [
            None
        ] * 4


class TestRights:
    READ, WRITE = "r" * 20, "w" * 20

    def test_what_tokens_allow(self) -> None:
        both, read, write, none = (
            Rights(self.READ, self.WRITE),
            Rights(self.READ),
            Rights(None, self.WRITE),
            Rights(is_open=True),
        )
        found = {
            shown: [rights.of(shown) for rights in (both, read, write, none)]
            for shown in (
                None,
                f"Bearer {self.READ}",
                f"Bearer {self.WRITE}",
                "Bearer -",
                "Bearer \udcff",
                "Bearer",
                "Basic !",
            )
        }
        nobody = [Right.NOTHING, Right.NOTHING, Right.READ, Right.WRITE]
        assert found == {
            None: nobody,
            f"Bearer {self.READ}": [Right.READ, Right.READ, Right.READ, Right.WRITE],
            f"Bearer {self.WRITE}": [Right.WRITE, Right.NOTHING, Right.WRITE, Right.WRITE],
            "Bearer -": nobody,
            "Bearer \udcff": nobody,
            "Bearer": nobody,
            "Basic !": nobody,
        }
        basic = base64.b64encode(f"me:{self.WRITE}".encode()).decode()
        assert both.of(f"Basic {basic}") is Right.WRITE


class TestSpool:
    @staticmethod
    def keep(spool: Spool, number: int, size: int = 100, version: int | None = None) -> Label:
        label = Label(f"key-{number}", 0, number if version is None else version)
        spool.write(label, bytes([number]) * size)
        return label

    def test_what_nobody_needs_goes_first_the_oldest_version_of_it_before_others(self, tmp_path: Path) -> None:
        with Spool(tmp_path / "spool", 400) as spool:
            spool.needed_from = 3
            labels = [self.keep(spool, number) for number in (3, 2, 1)]
            document = self.keep(spool, 9, version=0)
            assert [spool.find(label) is not None for label in (*labels, document)] == [True] * 4
            self.keep(spool, 4)
            assert [spool.find(label) is not None for label in (*labels, document)] == [True, True, False, True]
            self.keep(spool, 5)
            assert [spool.find(label) is not None for label in (*labels, document)] == [True, False, False, True]
            # Then what was used longest ago.
            self.keep(spool, 6)
            assert spool.find(Label("key-4", 0, 4)) is None
            assert [spool.find(label) is not None for label in (*labels, document)] == [True, False, False, True]

    def test_what_is_being_read_stays(self, tmp_path: Path) -> None:
        with Spool(tmp_path / "spool", 100) as spool:
            label = self.keep(spool, 1)
            kept = spool.find(label)
            assert kept is not None
            file = spool.open(kept)
            assert file is not None
            with pytest.raises(FullError):
                spool.begin(1)
            spool.close(kept)
            spool.drop(spool.begin(100))
            assert spool.find(label) is None and spool.holding.bytes == 0

    def test_what_was_read_stays_open_while_it_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spools, "_MOST_OPEN", 2)

        def lent(spool: Spool, label: Label) -> tuple[Kept, int]:
            kept = spool.find(label)
            assert kept is not None
            file = spool.open(kept)
            assert file is not None and os.pread(file.fd, 1000, 0) == bytes([label.version]) * 100
            spool.close(kept)
            return kept, file.fd

        with Spool(tmp_path / "spool", 1000) as spool:
            labels = [self.keep(spool, number) for number in (1, 2, 3)]
            kept, fd = lent(spool, labels[0])
            assert lent(spool, labels[0])[1] == fd
            others = [lent(spool, label)[0] for label in labels[1:]]
            # No more than so many, those that were read last.
            assert kept.file is None and all(each.file is not None for each in others)
            # Two at a time have one file, which is closed when both have read it.
            both = others[0]
            assert spool.open(both) is spool.open(both)
            spool.forget(both)
            spool.close(both)
            assert both.file is not None
            spool.close(both)
            assert both.file is None and spool.open(both) is None
            # What is removed, or cut, behind the spool's back, is not there.
            left = others[1]
            (tmp_path / "spool" / "kept" / left.file_name).unlink()
            assert left.file is not None and spool.open(left) is None
            assert left.file is None and not left.readers and spool.find(labels[2]) is None
            lent(spool, labels[0])
            os.truncate(tmp_path / "spool" / "kept" / kept.file_name, 99)
            assert spool.open(kept) is None and kept.file is None and spool.holding.objects == 0

    def test_what_became_another_is_gone(self, tmp_path: Path) -> None:
        with Spool(tmp_path / "spool", 1000) as spool:
            label = self.keep(spool, 1)
        (path,) = (tmp_path / "spool" / "kept").iterdir()
        path.write_bytes(b"\1" * 99 + b"\2")
        with Spool(tmp_path / "spool", 1000) as spool:
            kept = spool.find(label)
            assert kept is not None and not kept.is_checked and spool.holding.objects == 1
            assert not spool.check(kept) and spool.find(label) is None and not path.exists()
            assert spool.read(label) is None and spool.holding.bytes == 0

    def test_a_smaller_limit_holds_at_once(self, tmp_path: Path) -> None:
        with Spool(tmp_path / "spool", 1000) as spool:
            for number in range(1, 6):
                self.keep(spool, number)
        with Spool(tmp_path / "spool", 250) as spool:
            assert spool.holding.bytes == 200 and spool.versions() == [5, 4]


class TestArrivals:
    @staticmethod
    def arrive(spool: Spool, work: Callable[[Arrival], None], size: int = 10) -> tuple[Arrival, bytes]:
        """What a child is given of an object that comes so."""

        async def run() -> tuple[Arrival, bytes]:
            arrival = Arrival(spool, Label("key", 0, 1))
            arrival.open()
            asyncio.get_running_loop().run_in_executor(None, work, arrival)
            await arrival.known()
            found = b""
            while len(found) < size and (up_to := await arrival.reach(len(found), size)) > len(found):
                found += arrival.read(len(found), up_to - len(found))
            await arrival.ended()
            arrival.close()
            return arrival, found

        return asyncio.run(run())

    @pytest.mark.parametrize("state", [State.RIGHT, State.WRONG, State.FAILED])
    def test_the_last_byte_is_that_of_what_is_right(self, tmp_path: Path, state: State) -> None:
        def come(arrival: Arrival) -> None:
            arrival.announce(10)
            for part in (b"abc", b"defg", b"hij"):
                arrival.add(part)
            arrival.end(state, blake3=object_digest(b"abcdefghij"))

        with Spool(tmp_path / "spool", 1000) as spool:
            _, found = self.arrive(spool, come)
            assert found == b"abcdefghij" if state is State.RIGHT else len(found) < 10
            assert (spool.read(Label("key", 0, 1)) is not None) == (state is State.RIGHT)
            assert spool.holding.bytes == (10 if state is State.RIGHT else 0)

    def test_a_disk_that_becomes_full_is_done_without(self, tmp_path: Path) -> None:
        def full(kind: str, path: str, other: str) -> None:
            if kind == "write":
                raise OSError(errno.ENOSPC, "No space left on device")

        def come(arrival: Arrival) -> None:
            arrival.announce(10)
            arrival.add(b"abc")
            hooks.append(full)
            try:
                arrival.add(b"defg")
            finally:
                hooks.remove(full)
            arrival.add(b"hij")
            arrival.end(State.RIGHT, blake3=object_digest(b"abcdefghij"))

        with Spool(tmp_path / "spool", 1000) as spool:
            _, found = self.arrive(spool, come)
            assert found == b"abcdefghij"
            assert spool.holding.objects == 0 and spool.holding.bytes == 0
            # All the memory that was lent has come back.
            spool.lend_memory(MOST_LENT_BYTES)
            with pytest.raises(FullError):
                spool.lend_memory(1)


class TestParents:
    def test_one_that_failed_comes_last_until_it_has_answered(self, tmp_path: Path) -> None:
        for name in "abc":
            (tmp_path / name).mkdir()
        now, failure = [0.0], TransportError("a", "did not answer")
        heard: list[tuple[str, str | None]] = []
        parents = Parents(
            tuple(Parent(store_of(tmp_path / name), replaces=True) for name in "abc"),
            changed=lambda parent: heard.append((parent.shown, parent.fault)),
            clock=lambda: now[0],
        )

        def order() -> str:
            return "".join(parent.shown[-1] for parent in parents)

        assert order() == "abc"
        parents.failed(parents.all[0], failure)
        assert order() == "bc" and parents.is_answering and parents.first is parents.all[1]
        now[0] = 10.0
        assert order() == "bca"
        parents.look_again(parents.all[0])
        assert order() == "abc"
        assert heard == [("folder a", "did not answer"), ("folder a", None)]
        for parent in parents.all:
            parents.failed(parent, failure)
        assert not parents.is_answering and order() == ""

        def refuse(parent: Parent) -> None:
            raise UnavailableError

        with pytest.raises(UnavailableError):
            parents.ask(refuse)


class TestNews:
    def test_what_is_being_made_is_the_next_version(self) -> None:
        async def run() -> None:
            news = News()
            place = Place(3, ID)
            news.hinted(encode_hint(Hint(ID, place, "streaming", "")))
            assert news.making is None
            news.reached(2)
            assert news.making == place
            before = news.count
            news.saw_payload(place, 4)
            news.saw_payload(place, 2)
            assert news.has_payload(4) and news.has_payload(2) and not news.has_payload(3)
            assert news.count == before + 2
            news.lost_payload(place, 2)
            assert not news.has_payload(2)
            assert await news.after(before, 60) and not await news.after(news.count, 0.01)
            news.reached(3)
            assert news.making is None
            news.hinted(b"nothing that can be read")
            assert news.hint is None

        asyncio.run(run())


class TestChildren:
    def test_who_has_not_asked_for_long_is_forgotten(self) -> None:
        now = [0.0]
        children = Children(clock=lambda: now[0])
        relay = children.seen("below", None, "10.0.0.1", connection=1)
        receiver = children.seen(None, "r1", "10.0.0.2", connection=2)
        other = children.seen("no name!", None, "10.0.0.3", connection=2)
        assert (relay.kind, receiver.kind, other.kind, other.name) == ("relay", "receiver", "other", "10.0.0.3")
        relay.version, receiver.version = 7, 5
        children.sent(relay, 10)
        assert children.needed_from(9) == 6 and children.sent_bytes == 10
        now[0] = 599.0
        children.seen("below", None, "10.0.0.1", connection=1)
        now[0] = 700.0
        assert [child["name"] for child in children.documents(9)] == ["below"]
        assert children.needed_from(9) == 8

    def test_who_is_gone(self) -> None:
        now = [0.0]
        children = Children(clock=lambda: now[0])

        def gone() -> list[str]:
            return [child["name"] for child in children.documents(9) if child["is_gone"]]

        first = children.seen(None, "first", "a", connection=1)
        children.seen(None, "first", "a", connection=2)
        children.seen(None, "second", "b", connection=2)
        # Who has left is gone at once, but not before its last connection has ended.
        children.ended(2)
        assert gone() == ["second"]
        children.ended(1)
        assert gone() == ["second", "first"] or gone() == ["first", "second"]
        children.ended(1)
        children.seen(None, "first", "a", connection=3)
        assert gone() == ["second"]
        children.seen(None, "second", "b", connection=None)
        assert gone() == ["second"]
        # Of one that is silent nobody knows; while it is being answered it is there.
        now[0] = 90.0
        assert gone() == ["second"]
        now[0] = 90.5
        assert gone() == ["first", "second"]
        first.asking = 1
        assert gone() == ["second"]
        first.asking = 0
        children.sent(first, 1)
        assert gone() == ["second"] and children.documents(9)[0]["seen_seconds"] == 0.0
        # A connection that outlives what is known of who has used it.
        now[0] = 1000.0
        assert not children.documents(9)
        children.ended(3)

    def test_what_is_no_status(self) -> None:
        right = b'{"format": "dcr-1", "relay": "me"}'
        assert read_status(right, "me") is not None
        for data in (b"", b"[]", right[:-1], b'{"format": "dcr-1", "relay": "you"}', b'{"relay": "me"}', b"[" * 10_000):
            assert read_status(data, "me") is None


def test_what_is_kept_has_its_digest_in_its_name() -> None:
    kept = Kept("name", 1, 2, b"\1" * 32, is_checked=True)
    assert kept.file_name == f"name-{'01' * 32}"
