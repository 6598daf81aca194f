"""relay: what a relay hands on is what its parent holds, fetched once, and never anything else."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import pytest

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.commit import commit
from dcr_cli.delta.payload import encode_payload
from dcr_cli.errors import ConflictError, TransportError, WrongBaseError
from dcr_cli.pull import pull
from dcr_cli.push import push
from dcr_cli.relay import answering, children
from dcr_cli.relay.rights import Rights
from dcr_cli.status import status
from dcr_cli.store.backend import Answer, Backend, MissingRootError, TransientError
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.store import Store
from dcr_cli.verify_remote import verify_remote
from pushed import states
from receivers import tree
from relays import chained, relay_process, relaying, store_of
from store_wrappers import Allows, FailsCalls, FlipsAByte, Records, Truncates, Wrapped
from strategies import write_checkpoint

PAYLOADS = "versions/*/payloads/*"
# Of commits, before a digest.
MEMBERS = (b'"previous":"blake3:', b'"manifest":{"blake3":"blake3:', b'"content":"blake3:')
READ, WRITE = "reads-0123456789abcdef", "writes-0123456789abcdef"


class Waits(Wrapped):
    """Bodies of objects whose keys match a pattern come to half, and go on when they may."""

    def __init__(self, backend: Backend, pattern: str) -> None:
        super().__init__(backend)
        self.pattern = pattern
        self.go_on = threading.Event()
        self.is_half = threading.Event()

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if not fnmatchcase(key, self.pattern):
            return answer
        return replace(answer, chunks=self._slowly(b"".join(answer.chunks)))

    def _slowly(self, data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        self.is_half.set()
        assert self.go_on.wait(60)
        yield data[len(data) // 2 :]


class Replaces(Wrapped):
    """An object is another one, so many times."""

    def __init__(self, backend: Backend, key: str, data: bytes, times: int) -> None:
        super().__init__(backend)
        self.key, self.data, self.times = key, data, times

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        answer = super().read(key, begin, size)
        if key != self.key or not self.times:
            return answer
        self.times -= 1
        return replace(answer, chunks=iter((self.data,)))


def replaced(remote: Path, key: str, data: bytes, times: int = 10**6) -> Store:
    """A folder as a parent that holds another object, of the same length, in the place of one."""
    return store_of(remote, lambda backend: Replaces(backend, key, data, times))


def with_another_digit(data: bytes, member: bytes) -> bytes:
    """A document in which the first digit of a digest is another one."""
    at = data.index(member) + len(member)
    return data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :]


def checkpoints(folder: Path, count: int) -> list[Path]:
    """So many successive checkpoints."""
    found = []
    for number, state in enumerate(states(count), 1):
        sidecars = {"config.json": f'{{"step": {number}}}\n'.encode()}
        found.append(write_checkpoint(folder / f"v{number}", state, shards=2, sidecars=sidecars))
    return found


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A folder with three versions, and the checkpoints that they were published from."""
    sources = checkpoints(tmp_path / "sources", 3)
    for source in sources:
        push(source, tmp_path / "remote", baseline=tmp_path / "baseline", jobs=1)
    return tmp_path / "remote", sources


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def keys_of(remote: Path, pattern: str) -> list[str]:
    return sorted(str(path.relative_to(remote)) for path in remote.glob(pattern))


def last_payload(remote: Path) -> str:
    return keys_of(remote, PAYLOADS)[-1]


class TestReading:
    def test_a_receiver_ends_with_the_bytes_of_the_remote(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, sources = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            for version in (1, 2, 3):
                pull(relay.url, tmp_path / "copy", version=version, jobs=1)
                assert {name: data for name, data in tree(tmp_path / "copy").items() if name[:4] != ".dcr"} == tree(
                    sources[version - 1]
                )

    def test_all_objects_are_the_parent_s(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            for path in sorted(remote.rglob("*")):
                if path.is_file():
                    assert relay.get(str(path.relative_to(remote))) == path.read_bytes()
            assert verify_remote(relay.url, deep=True).matches

    def test_each_object_is_fetched_once(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        records = Records(LocalBackend(str(remote)))
        with relaying([store_of(remote, lambda _: records)], tmp_path / "spool") as relay:
            for number in range(3):
                pull(relay.url, tmp_path / f"copy{number}", jobs=1)
        bodies = [key for name, key in records.calls if name == "read" and ("payloads" in key or "files/" in key)]
        assert len(bodies) == len(set(bodies)) > 4

    def test_many_who_ask_at_once_cost_one_request(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        key = last_payload(remote)
        waits = Waits(LocalBackend(str(remote)), PAYLOADS)
        records = Records(waits)
        with (
            relaying([store_of(remote, lambda _: records)], tmp_path / "spool") as relay,
            ThreadPoolExecutor(8) as pool,
        ):
            asked = [pool.submit(relay.get, key) for _ in range(8)]
            assert waits.is_half.wait(60)
            waits.go_on.set()
            assert {future.result() for future in asked} == {(remote / key).read_bytes()}
        assert records.calls.count(("read", key)) == 1

    def test_bytes_are_forwarded_while_they_come_but_for_the_last(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        key = last_payload(remote)
        data = (remote / key).read_bytes()
        waits = Waits(LocalBackend(str(remote)), PAYLOADS)
        with relaying([store_of(remote, lambda _: waits)], tmp_path / "spool") as relay:
            connection = http.client.HTTPConnection(urlsplit(relay.url).netloc, timeout=60)
            connection.request("GET", f"/{key}")
            answer = connection.getresponse()
            assert int(answer.headers["Content-Length"]) == len(data)
            assert answer.read(len(data) // 2) == data[: len(data) // 2]
            waits.go_on.set()
            assert answer.read() == data[len(data) // 2 :]
            connection.close()

    @pytest.mark.parametrize("is_kept", [True, False])
    def test_ranges(self, tmp_path: Path, published: tuple[Path, list[Path]], is_kept: bool) -> None:
        remote, _ = published
        key = last_payload(remote)
        data = (remote / key).read_bytes()
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            if is_kept:
                relay.get(key)
            for asked, expected in (
                ("bytes=3-", data[3:]),
                ("bytes=0-0", data[:1]),
                ("bytes=5-10", data[5:11]),
                (f"bytes={len(data) - 1}-{len(data) + 7}", data[-1:]),
                ("bytes=-4", data[-4:]),
            ):
                status, headers, found = relay.ask("GET", key, Range=asked)
                assert (status, found) == (206, expected)
                begin = data.index(expected) if len(expected) > 4 else int(headers["content-range"][6:].split("-")[0])
                assert headers["content-range"] == f"bytes {begin}-{begin + len(expected) - 1}/{len(data)}"
            for asked in ("bytes=1-0", "bytes=0-1,3-4", "lines=1-2"):
                assert relay.ask("GET", key, Range=asked)[::2] == (200, data)
            status, headers, _ = relay.ask("GET", key, Range=f"bytes={len(data)}-")
            assert (status, headers["content-range"]) == (416, f"bytes */{len(data)}")

    def test_heads_say_what_the_parent_says(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        key = last_payload(remote)
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            relay.get(key)
            status, headers, _ = relay.ask("HEAD", key)
            assert (status, int(headers["content-length"])) == (200, (remote / key).stat().st_size)
            assert "last-modified" in headers
            # A prune has taken it: who publishes has to see that, although it is kept here.
            (remote / key).unlink()
            assert relay.ask("HEAD", key)[0] == 404

    def test_what_is_kept_and_cached(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            for key, cache in (
                ("dcr.json", "public, max-age=31536000, immutable"),
                (last_payload(remote), "public, max-age=31536000, immutable"),
                ("commits/0000000002.json", "no-store"),
                ("next.json", "no-store"),
            ):
                assert relay.ask("GET", key)[1]["cache-control"] == cache

    def test_it_serves_what_it_keeps_without_its_parent_and_no_absence(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            pull(relay.url, tmp_path / "copy", jobs=1)
        with relaying([store_of(remote, lambda each: FailsCalls(each, 10**6))], tmp_path / "spool") as relay:
            assert relay.get(last_payload(remote)) == (remote / last_payload(remote)).read_bytes()
            assert relay.get("commits/0000000003.json") == (remote / "commits/0000000003.json").read_bytes()
            status, headers, data = relay.ask("GET", "commits/0000000004.json")
            assert (status, headers["retry-after"]) == (503, "2")
            assert data == b"no parent answers, or there is no room\n"
            assert relay.ask("GET", "healthz")[::2] == (503, b"no parent answers\n")


class TestDamage:
    @pytest.mark.parametrize("offset", [0, 9, 200, 10**9])
    @pytest.mark.parametrize("pattern", [PAYLOADS, "versions/*/manifest.zst", "anchors/*/files/*.safetensors"])
    def test_a_body_that_is_not_right_is_cut_and_had_from_the_next_parent(
        self, tmp_path: Path, published: tuple[Path, list[Path]], pattern: str, offset: int
    ) -> None:
        remote, _ = published
        key = keys_of(remote, pattern)[-1]
        damaged = store_of(remote, lambda backend: FlipsAByte(backend, pattern, offset))
        with relaying([damaged, store_of(remote)], tmp_path / "spool") as relay:
            data = (remote / key).read_bytes()
            found = None
            for _ in range(3):
                try:
                    found = relay.get(key)
                    break
                except (http.client.IncompleteRead, ConnectionError):
                    continue
            assert found == data

    @pytest.mark.parametrize("pattern", [PAYLOADS, "versions/*/manifest.zst", "anchors/*/files/*.safetensors"])
    def test_it_is_never_whole_where_there_is_no_other_parent(
        self, tmp_path: Path, published: tuple[Path, list[Path]], pattern: str
    ) -> None:
        remote, _ = published
        key = keys_of(remote, pattern)[-1]
        with relaying(
            [store_of(remote, lambda backend: FlipsAByte(backend, pattern, 10**9))], tmp_path / "spool"
        ) as relay:
            for _ in range(4):
                try:
                    status, _, _ = relay.ask("GET", key)
                    assert status == 502
                except (http.client.IncompleteRead, ConnectionError):
                    pass
        assert not any((remote / key).stat().st_size == path.stat().st_size for path in (tmp_path / "spool").rglob("*"))

    def test_bodies_that_end_early_are_gone_on_with(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        key = last_payload(remote)
        cut = store_of(remote, lambda backend: Truncates(backend, 10**6, 100))
        with relaying([cut, store_of(remote)], tmp_path / "spool") as relay:
            assert relay.get(key) == (remote / key).read_bytes()

    def test_a_commit_that_is_not_right_is_none(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        (remote / "commits/0000000004.json").write_bytes(b"<html>sign in</html>")
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            status, _, data = relay.ask("GET", "commits/0000000004.json")
            assert (status, data) == (502, b"what the parents have of it is not right\n")
            until(lambda: relay.status()["head"] == 3)

    def test_an_anchor_s_document_is_the_one_that_its_commit_names(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, sources = published
        (key,) = keys_of(remote, "anchors/*.json")
        data = (remote / key).read_bytes()
        wrong = replaced(remote, key, with_another_digit(data, b'"blake3":"blake3:'))
        with relaying([wrong], tmp_path / "wrong") as relay:
            assert relay.ask("GET", key)[0] == 502
        with relaying([wrong, store_of(remote)], tmp_path / "spool") as relay:
            assert relay.get(key) == data
            pull(relay.url, tmp_path / "copy", version=1, jobs=1)
        assert tree(tmp_path / "copy") == tree(sources[0])

    @pytest.mark.parametrize(
        ("version", "member"),
        [(version, member) for version in (1, 2, 3) for member in MEMBERS if version > 1 or b"previous" not in member],
    )
    def test_a_commit_that_came_wrong_once_is_not_wrong_for_ever(
        self, tmp_path: Path, published: tuple[Path, list[Path]], version: int, member: bytes
    ) -> None:
        remote, sources = published
        key = f"commits/{version:010d}.json"
        data = (remote / key).read_bytes()
        once = replaced(remote, key, with_another_digit(data, member), times=1)
        with relaying([once], tmp_path / "spool") as relay:
            until(lambda: relay.status()["head"] == 3)
            for asked in [key, *keys_of(remote, "*/*.json"), *keys_of(remote, "versions/*/manifest.zst")]:
                with suppress(ConnectionError, http.client.HTTPException):
                    relay.ask("GET", asked)
            # Of the newest nothing but what it names, and what it follows, says that it is wrong.
            if version < 3 or b"content" not in member:
                assert relay.get(key) == data
                pull(relay.url, tmp_path / "copy", jobs=1)
                assert tree(tmp_path / "copy") == tree(sources[2])

    def test_a_history_that_came_wrong_once_is_not_wrong_for_ever(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        data = (remote / "dcr.json").read_bytes()
        once = replaced(remote, "dcr.json", with_another_digit(data, b'"history":"'), times=1)
        with relaying([once], tmp_path / "spool") as relay:
            until(lambda: relay.ask("GET", "dcr.json")[::2] == (200, data))
            until(lambda: relay.ask("GET", "commits/0000000003.json")[0] == 200)

    def test_what_only_a_newer_dcr_understands_is_no_fault_of_the_relay(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        (key,) = keys_of(remote, "anchors/*.json")
        newer = (remote / key).read_bytes().replace(b'"requires":[]', b'"requires":["x"]')
        commit_key = "commits/0000000001.json"
        named = (remote / commit_key).read_bytes()
        before, after = (object_digest(each).hex().encode() for each in ((remote / key).read_bytes(), newer))
        (remote / key).write_bytes(newer)
        (remote / commit_key).write_bytes(
            named.replace(before, after).replace(b'"bytes":%d}' % (len(newer) - 3), b'"bytes":%d}' % len(newer))
        )
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            assert relay.get(key) == newer
            (file,) = keys_of(remote, "anchors/*/files/config.json")
            assert relay.ask("GET", file)[0] == 502

    def test_a_payload_of_another_version_is_none(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        first, last = keys_of(remote, PAYLOADS)[0], last_payload(remote)
        (remote / last).write_bytes((remote / first).read_bytes())
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            assert relay.ask("GET", last)[0] == 502

    def test_a_payload_that_its_manifest_does_not_name_is_dropped(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        made = push(checkpoints(tmp_path / "more", 4)[3], remote, baseline=tmp_path / "baseline", prepare=True, jobs=1)
        key = f"versions/{made.version:010d}-{made.id}/payloads/000000.safetensors"
        right = (remote / key).read_bytes()
        # One that says the same of itself, as a publisher who was stopped may have left it.
        history = json.loads((remote / "dcr.json").read_bytes())["history"]
        identity = {"history": history, "version": str(made.version), "id": made.id}
        other = encode_payload(0, bytes(64), identity)
        (remote / key).write_bytes(other)
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            until(lambda: other in [path.read_bytes() for path in (tmp_path / "spool" / "kept").iterdir()])
            assert relay.get(key) == other
            (remote / key).write_bytes(right)
            commit(remote)
            assert relay.get(f"commits/{made.version:010d}.json")
            assert relay.get(key) == right


class TestSpool:
    def test_what_was_kept_is_checked_before_it_is_served(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        key = last_payload(remote)
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            data = relay.get(key)
        for path in (tmp_path / "spool" / "kept").iterdir():
            if path.stat().st_size == len(data):
                path.write_bytes(data[:-1] + b"\xff")
        document = (remote / "commits/0000000003.json").read_bytes()
        (place,) = [path for path in (tmp_path / "spool" / "kept").iterdir() if path.read_bytes() == document]
        place.unlink()
        place.mkdir()
        (tmp_path / "spool" / "new" / "7").write_bytes(b"half")
        (tmp_path / "spool" / "kept" / "what").write_bytes(b"else")
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            assert relay.get(key) == data
            assert relay.get("commits/0000000003.json") == document
        assert place.read_bytes() == document
        assert sorted(path.name for path in (tmp_path / "spool").iterdir()) == ["kept", "lock", "new"]
        assert not (tmp_path / "spool" / "kept" / "what").exists()

    def test_it_holds_no_more_than_its_limit(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool", limit=40_000) as relay:
            for number in range(2):
                pull(relay.url, tmp_path / f"copy{number}", jobs=1)
            assert relay.status()["spool"]["bytes"] <= 40_000
        kept = sum(path.stat().st_size for path in (tmp_path / "spool" / "kept").iterdir())
        assert 0 < kept <= 40_000

    def test_what_no_disk_has_room_for_is_handed_on_all_the_same(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, sources = published
        with relaying([store_of(remote)], tmp_path / "spool", limit=10) as relay:
            pull(relay.url, tmp_path / "copy", jobs=1)
            assert relay.status()["spool"]["objects"] == 0
        assert (tmp_path / "copy" / "config.json").read_bytes() == (sources[2] / "config.json").read_bytes()

    def test_it_is_one_relay_s(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with (
            relaying([store_of(remote)], tmp_path / "spool"),
            pytest.raises(ConflictError),
            relaying([store_of(remote)], tmp_path / "spool"),
        ):
            pass

    def test_it_is_of_one_history(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, sources = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            relay.get("dcr.json")
        push(sources[0], tmp_path / "other", baseline=tmp_path / "other-baseline", jobs=1)
        with pytest.raises(WrongBaseError), relaying([store_of(tmp_path / "other")], tmp_path / "spool"):
            pass


class TestParents:
    def test_one_that_fails_is_passed_over(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        dead = store_of(remote, lambda backend: FailsCalls(backend, 10**6))
        with relaying([dead, store_of(remote)], tmp_path / "spool") as relay:
            pull(relay.url, tmp_path / "copy", jobs=1)
            assert [parent["is_answering"] for parent in relay.status()["parents"]] == [False, True]
            assert relay.get("healthz") == b"ok\n"

    def test_one_of_another_history_is_none(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, sources = published
        push(sources[0], tmp_path / "other", baseline=tmp_path / "other-baseline", jobs=1)
        with relaying([store_of(remote), store_of(tmp_path / "other")], tmp_path / "spool") as relay:
            history = json.loads(relay.get("dcr.json"))["history"]
            assert history == json.loads((remote / "dcr.json").read_bytes())["history"]
            until(lambda: relay.status()["head"] == 3)
            for path in remote.rglob("*.json"):
                path.unlink()
            (remote / "dcr.json").write_bytes(b"x")
            assert relay.ask("GET", "commits/0000000009.json")[0] in (404, 502, 503)
            assert relay.ask("GET", "commits/0000000001.json")[0] == 200

    def test_nothing_of_what_a_parent_says_is_repeated(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published

        class Tells(Wrapped):
            def called(self, name: str, key: str) -> None:
                raise OSError("hunter2SECRET")

        class Fails(FailsCalls):
            pass

        from dcr_cli.store.backend import PermanentError

        class Refuses(Wrapped):
            def called(self, name: str, key: str) -> None:
                raise PermanentError("hunter2SECRET")

        with relaying([store_of(remote, Refuses)], tmp_path / "spool") as relay:
            for key in ("dcr.json", "next.json", last_payload(remote), "acks/", "status"):
                _, headers, data = relay.ask("GET", key)
                assert b"SECRET" not in data + str(headers).encode()


class TestPublishing:
    def test_a_tree_with_no_store_but_a_folder(self, tmp_path: Path) -> None:
        sources = checkpoints(tmp_path / "sources", 3)
        with chained(tmp_path / "root", tmp_path, 3) as relays:
            for number, source in enumerate(sources, 1):
                result = push(source, relays[0].url, baseline=tmp_path / "baseline", jobs=1)
                assert result.version == number
                pulled = pull(relays[2].url, tmp_path / "copy", receiver="r1", jobs=1)
                assert pulled.version == number
                assert (tmp_path / "copy" / "config.json").read_bytes() == (source / "config.json").read_bytes()
            told = status(relays[0].url)
            assert told.receivers is not None
            assert [(each.receiver, each.version, each.stage) for each in told.receivers] == [("r1", 3, "applied")]
        assert verify_remote(tmp_path / "root", deep=True).matches

    def test_one_of_two_publishers_wins(self, tmp_path: Path) -> None:
        sources = checkpoints(tmp_path / "sources", 3)
        with chained(tmp_path / "root", tmp_path, 2) as relays:
            push(sources[0], relays[1].url, baseline=tmp_path / "one", jobs=1)
            pull(relays[1].url, tmp_path / "two", jobs=1)

            def publish(number: int) -> int:
                baseline = tmp_path / ("one", "two")[number]
                try:
                    return push(sources[1 + number], relays[number].url, baseline=baseline, jobs=1).version or 0
                except ConflictError:
                    return 0

            with ThreadPoolExecutor(2) as pool:
                assert sorted(pool.map(publish, range(2))) in ([0, 2], [2, 3])

    def test_creates_are_exclusive(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        data = (remote / "commits/0000000003.json").read_bytes()
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            assert relay.ask("PUT", "commits/0000000003.json", data, If_None_Match="*")[0] == 412
            assert relay.ask("PUT", "commits/0000000003.json", data)[0] == 204
            other = (remote / "commits/0000000002.json").read_bytes()
            assert relay.ask("PUT", "commits/0000000003.json", other)[0] == 422
            assert relay.ask("PUT", "commits/0000000004.json", data, If_None_Match="*")[0] == 422
            assert relay.ask("PUT", "dcr.json", (remote / "dcr.json").read_bytes(), If_None_Match="*")[0] == 412
            assert relay.ask("PUT", "next.json", b"anything")[0] == 204
            key = last_payload(remote)
            payload = (remote / key).read_bytes()
            assert relay.ask("PUT", key, payload)[0] == 204
            assert relay.ask("PUT", key, payload, If_None_Match="*")[0] == 412
            assert relay.ask("PUT", key, payload[:-1] + b"?")[0] == 422
            manifest = keys_of(remote, "versions/*/manifest.zst")[0]
            assert relay.ask("PUT", manifest, b"another")[0] == 409
            assert (remote / manifest).read_bytes() != b"another"

    def test_a_payload_is_handed_out_while_it_is_put(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        source = checkpoints(tmp_path / "more", 4)[3]
        made = push(source, remote, baseline=tmp_path / "baseline", prepare=True, jobs=1)
        key = f"versions/{made.version:010d}-{made.id}/payloads/000000.safetensors"
        data = (remote / key).read_bytes()
        (remote / key).unlink()
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            until(lambda: relay.status()["next"] is not None)
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as publisher:
                publisher.sendall(f"PUT /{key} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
                publisher.sendall(data[:-1])
                while relay.ask("HEAD", key, Prefer="wait=1")[0] != 200:
                    pass
                connection = http.client.HTTPConnection(urlsplit(relay.url).netloc, timeout=60)
                connection.request("GET", f"/{key}")
                answer = connection.getresponse()
                publisher.sendall(data[-1:])
                assert answer.read() == data
                connection.close()
                assert publisher.recv(64).startswith(b"HTTP/1.1 204")
            assert (remote / key).read_bytes() == data

    def test_who_asks_whether_to_go_on_is_told(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with (
            relaying([store_of(remote)], tmp_path / "spool", rights=Rights(None, WRITE)) as relay,
            socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as publisher,
        ):
            head = "PUT /next.json HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n"
            publisher.sendall(f"{head}Authorization: Bearer {WRITE}\r\n\r\n".encode())
            assert publisher.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
            publisher.sendall(b"x")
            assert publisher.recv(4096).startswith(b"HTTP/1.1 204 No Content\r\n")
            publisher.sendall(f"{head}\r\n".encode())
            assert publisher.recv(4096).startswith(b"HTTP/1.1 403 ")

    def test_who_is_too_slow_is_let_go(
        self, tmp_path: Path, published: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote, _ = published
        monkeypatch.setattr(answering, "_STALLED_SECONDS", 0.3)
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as publisher:
                publisher.sendall(b"PUT /next.json HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
                publisher.settimeout(0.05)
                answer = b""
                while not answer:
                    # Each byte comes soon after the one before.
                    publisher.sendall(b"x")
                    with suppress(TimeoutError):
                        answer = publisher.recv(64)
            assert answer.startswith(b"HTTP/1.1 400")

    def test_who_breaks_off_has_put_nothing(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        key = last_payload(remote)
        data = (remote / key).read_bytes()
        (remote / key).unlink()
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as publisher:
                publisher.sendall(f"PUT /{key} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
                publisher.sendall(data[: len(data) // 2])
            while not any('"PUT"' in line for line in relay.lines):
                time.sleep(0.01)
            assert not (remote / key).exists()
            assert relay.ask("PUT", key, data)[0] == 204
            assert relay.get(key) == data


class TestWaiting:
    def test_a_commit_wakes_all_who_wait(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        source = checkpoints(tmp_path / "more", 4)[3]
        with chained(remote, tmp_path, 3) as relays, ThreadPoolExecutor(6) as pool:
            push(source, relays[0].url, baseline=tmp_path / "baseline", prepare=True, jobs=1)
            while any(relay.status()["next"]["state"] != "prepared" for relay in relays):
                time.sleep(0.01)
            asked = [
                pool.submit(relay.ask, "HEAD", "commits/0000000004.json", Prefer="wait=60")
                for relay in relays
                for _ in range(2)
            ]
            commit(relays[0].url)
            for future in asked:
                found, headers, _ = future.result(30)
                assert headers["preference-applied"] == "wait" and found in (200, 404)
            assert relays[2].ask("HEAD", "commits/0000000004.json", Prefer="wait=60")[0] == 200

    def test_a_prepared_version_is_fetched_before_its_commit(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        source = checkpoints(tmp_path / "more", 4)[3]
        with chained(remote, tmp_path, 2) as relays:
            made = push(source, relays[0].url, baseline=tmp_path / "baseline", prepare=True, jobs=1)
            wanted = {
                path.read_bytes()
                for path in (remote / f"versions/{made.version:010d}-{made.id}").rglob("*")
                if path.suffix in (".safetensors", ".zst")
            }
            end = time.monotonic() + 30
            kept: set[bytes] = set()
            while not wanted <= kept:
                assert time.monotonic() < end
                kept = {path.read_bytes() for path in (tmp_path / "relay-1" / "kept").iterdir()}

    def test_nothing_is_waited_for_that_is_not_being_made(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            place = "0000000009-" + "0" * 32
            for key in (f"versions/{place}/payloads/000000.safetensors", f"anchors/{place}.json", "acks/x"):
                status, headers, _ = relay.ask("HEAD", key, Prefer="wait=60")
                assert status == 404 and "preference-applied" not in headers
            status, headers, _ = relay.ask("HEAD", "commits/0000000004.json", Prefer="wait=1")
            assert (status, headers["preference-applied"]) == (404, "wait")


class TestRights:
    def test_no_token_is_shown(self) -> None:
        assert READ not in repr(Rights(READ, WRITE)) and WRITE not in repr(Rights(READ, WRITE))

    def test_tokens(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        data = b"anything"
        with relaying([store_of(remote)], tmp_path / "spool", rights=Rights(READ, WRITE)) as relay:
            for key in ("dcr.json", "status", "metrics", "acks/", "nothing"):
                for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {READ}"}):
                    status, headers, told = relay.ask("GET", key, **wrong)
                    assert (status, told) == (401, b"a token is needed\n")
                    assert headers["www-authenticate"] == 'Bearer realm="dcr"'
            assert relay.get("healthz") == b"ok\n"
            for token in (READ, WRITE):
                assert relay.ask("GET", "dcr.json", Authorization=f"Bearer {token}")[0] == 200
            assert relay.ask("GET", "dcr.json", Authorization=f"bearer  {READ}")[1]["cache-control"].startswith(
                "private"
            )
            assert relay.ask("PUT", "next.json", data)[0] == 401
            assert relay.ask("PUT", "next.json", data, Authorization=f"Bearer {READ}")[0] == 403
            assert relay.ask("PUT", "next.json", data, Authorization=f"Bearer {WRITE}")[0] == 204
            pull(relay.url, tmp_path / "copy", storage_options={"token": READ}, receiver="r1", jobs=1)
            with pytest.raises(TransportError):
                push(tmp_path / "copy", relay.url, baseline=tmp_path / "b", storage_options={"token": READ}, jobs=1)
        assert list((remote / "acks").rglob("r1.applied"))
        assert not any(READ in line or WRITE in line for line in relay.lines)

    def test_who_has_a_token_to_read_and_there_is_none_to_write(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool", rights=Rights(READ)) as relay:
            assert relay.ask("PUT", "next.json", b"x", Authorization=f"Bearer {READ}")[0] == 403


class TestLimits:
    def test_requests_that_are_none_of_ours(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            for key in (
                "",
                "..",
                "../remote/dcr.json",
                "%2e%2e/dcr.json",
                "commits/",
                "versions",
                "commits/1.json",
                "a%00b",
            ):
                assert relay.ask("GET", key)[0] == 404, key
            for method in ("POST", "DELETE", "PATCH", "OPTIONS"):
                assert relay.ask(method, "dcr.json")[0] == 405
            assert relay.ask("PUT", "prune.json", b"x")[0] == 404
            assert relay.ask("PUT", "commits/0000000009.json", bytes(70_000))[0] == 413
            assert relay.ask("PUT", "status/x", b"{}")[0] == 400
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as other:
                other.sendall(
                    b"PUT /next.json HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
                )
                assert other.recv(64).startswith(b"HTTP/1.1 411")
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as other:
                other.sendall(b"GET /dcr.json HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
                assert b" 400 " in other.recv(64)

    def test_no_more_connections_than_are_allowed(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool", most_connections=8) as relay:
            place = urlsplit(relay.url).hostname, urlsplit(relay.url).port
            idle = [socket.create_connection(place) for _ in range(8)]
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                relay.ask("GET", "healthz")
            for each in idle:
                each.close()
            for _ in range(100):
                try:
                    assert relay.get("healthz") == b"ok\n"
                    break
                except (ConnectionError, http.client.HTTPException):
                    time.sleep(0.02)


class TestTelling:
    def test_status_metrics_and_log(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            pull(relay.url, tmp_path / "copy", version=2, receiver="r1", jobs=1)
            found = relay.status()
            assert (found["relay"], found["head"], found["spool"]["limit"]) == ("spool", 3, 1 << 30)
            (child,) = [each for each in found["children"] if each["kind"] == "receiver"]
            assert child["name"] == "r1" and child["sent_bytes"] > 10_000
            metrics = relay.get("metrics").decode()
            assert "dcr_relay_head_version 3\n" in metrics and 'dcr_relay_parent_up{parent="0"} 1\n' in metrics
            document = {"format": "dcr-1", "requires": [], "relay": "below", "children": []}
            body = json.dumps(document).encode()
            assert relay.ask("PUT", "status/below", body, Dcr_Relay="below")[0] == 204
            assert relay.ask("PUT", "status/below", body, Dcr_Relay="other")[0] == 400
            (below,) = [each for each in relay.status()["children"] if each["kind"] == "relay" and each["status"]]
            assert below["status"] == document
            with mock.patch.object(children, "_MOST_BYTES", len(body) + 10):
                named = body.replace(b'"below"', b'"other"')
                assert relay.ask("PUT", "status/other", named, Dcr_Relay="other")[0] == 413
                assert relay.ask("PUT", "status/below", body, Dcr_Relay="below")[0] == 204
        for line in relay.lines:
            assert {"time", "method", "path", "status", "bytes", "seconds", "child", "address"} == set(json.loads(line))

    def test_who_has_ended_is_gone(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published

        def is_gone(kind: str) -> bool | None:
            found = [each["is_gone"] for each in relay.status()["children"] if each["kind"] == kind]
            return found[0] if found else None

        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            pull(relay.url, tmp_path / "copy", receiver="r1", jobs=1)
            until(lambda: is_gone("receiver") is True)
            with relay_process([relay.url], tmp_path / "below") as (url, process):
                until(lambda: is_gone("relay") is False)
                pull(url, tmp_path / "copy", receiver="r1", jobs=1)
                assert 'dcr_relay_children{kind="relay"} 1\n' in relay.get("metrics").decode()
                process.send_signal(signal.SIGTERM)
                until(lambda: is_gone("relay") is True)
            assert 'dcr_relay_children{kind="relay"} 0\n' in relay.get("metrics").decode()


class TestWhatIsNotThere:
    """That a parent has nothing, or lets nobody see it, is told apart from that it does not answer."""

    def test_a_root_that_goes_is_a_parent_that_does_not_answer(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        gone = Missing(LocalBackend(str(remote)))
        with relaying([store_of(remote, lambda _: gone)], tmp_path / "spool") as relay:
            until(lambda: relay.status()["head"] == 3)
            gone.is_missing = True
            for key in ("commits/0000000004.json", last_payload(remote), "next.json"):
                assert relay.ask("GET", key)[0] == 503, key
            assert relay.ask("GET", "commits/0000000003.json")[0] == 200
            # The watch goes on once it is back.
            gone.is_missing = False
            push(checkpoints(tmp_path / "more", 4)[3], remote, baseline=tmp_path / "baseline", jobs=1)
            until(lambda: relay.status()["head"] == 4)
        with relaying([store_of(remote, Missing.at_once), store_of(remote)], tmp_path / "other") as relay:
            assert relay.get(last_payload(remote)) == (remote / last_payload(remote)).read_bytes()

    def test_rights_that_are_taken_away_are_no_absence(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        allows = Allows(LocalBackend(str(remote)), get=["*"])
        with relaying([store_of(remote, lambda _: allows)], tmp_path / "spool") as relay:
            # What may not be listed is denied where it is not there.
            assert relay.ask("GET", "commits/0000000004.json")[0] == 404
            allows.rights["read"] = ()
            status, _, data = relay.ask("GET", "commits/0000000004.json")
            assert (status, data) == (503, b"no parent answers, or there is no room\n")
            assert relay.ask("GET", "healthz")[0] == 503
            assert any("access is denied" in line for line in relay.lines if '"fault"' in line)

    def test_a_version_that_was_seen_does_not_go(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        shutil.copytree(remote, tmp_path / "behind")
        (tmp_path / "behind/commits/0000000003.json").unlink()
        fails = Fails(LocalBackend(str(remote)))
        parents = [store_of(remote, lambda _: fails), store_of(tmp_path / "behind")]
        with relaying(parents, tmp_path / "spool", limit=10) as relay:
            until(lambda: relay.status()["head"] == 3)
            fails.is_dead = True
            assert relay.ask("GET", "commits/0000000003.json")[0] == 503
            assert relay.ask("GET", "commits/0000000002.json")[0] == 200


class TestPutting:
    def test_what_is_refused_is_given_to_nobody(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        made = push(checkpoints(tmp_path / "more", 4)[3], remote, baseline=tmp_path / "baseline", prepare=True, jobs=1)
        key = f"versions/{made.version:010d}-{made.id}/payloads/000000.safetensors"
        right = (remote / key).read_bytes()
        history = json.loads((remote / "dcr.json").read_bytes())["history"]
        other = encode_payload(0, bytes(64), {"history": history, "version": str(made.version), "id": str(made.id)})
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            assert relay.get(key) == right
            assert relay.ask("PUT", key, other)[0] == 409
            assert relay.get(key) == right
        assert (remote / key).read_bytes() == right

    def test_nobody_waits_for_what_is_put_in_the_place_of_another(
        self, tmp_path: Path, published: tuple[Path, list[Path]]
    ) -> None:
        remote, _ = published
        key = last_payload(remote)
        right = (remote / key).read_bytes()
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            until(lambda: relay.status()["head"] == 3)
            with socket.create_connection((urlsplit(relay.url).hostname, urlsplit(relay.url).port)) as publisher:
                publisher.sendall(f"PUT /{key} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(right)}\r\n\r\n".encode())
                publisher.sendall(right[:-1])
                assert relay.get(key) == right

    def test_of_two_that_are_put_at_once_one_is(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        key = keys_of(remote, "versions/*/manifest.zst")[-1].replace("0000000003", "0000000004")
        with relaying([store_of(remote)], tmp_path / "spool") as relay, ThreadPoolExecutor(8) as pool:
            bodies = [bytes([number]) * 5000 for number in range(8)]
            answers = list(pool.map(lambda body: relay.ask("PUT", key, body)[0], bodies))
            assert sorted(answers) == [204] + [409] * 7
            assert (remote / key).read_bytes() == bodies[answers.index(204)]

    def test_the_first_parent_alone_is_written_to(self, tmp_path: Path, published: tuple[Path, list[Path]]) -> None:
        remote, _ = published
        shutil.copytree(remote, tmp_path / "mirror")
        fails = Fails(LocalBackend(str(remote)))
        parents = [store_of(remote, lambda _: fails), store_of(tmp_path / "mirror")]
        with relaying(parents, tmp_path / "spool") as relay:
            until(lambda: relay.status()["head"] == 3)
            fails.is_dead = True
            place = keys_of(remote, "versions/*/manifest.zst")[-1]
            for key, body in (("next.json", b"x"), (place, b"x")):
                assert relay.ask("PUT", key, body)[0] == 503
                assert (tmp_path / "mirror" / key).read_bytes() == (remote / key).read_bytes()
            assert relay.get(last_payload(remote)) == (remote / last_payload(remote)).read_bytes()


class TestBugs:
    def test_one_is_logged_and_nothing_is_taken_for_whole(
        self, tmp_path: Path, published: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote, _ = published
        with relaying([store_of(remote)], tmp_path / "spool") as relay:
            until(lambda: relay.status()["head"] == 3)
            monkeypatch.setattr("dcr_cli.relay.reading.range_of", lambda *_: 1 / 0)
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                relay.ask("GET", "dcr.json")
            assert any('"status": 500' in line and "ZeroDivisionError" in line for line in relay.lines)
            monkeypatch.undo()
            assert relay.get("dcr.json") == (remote / "dcr.json").read_bytes()


class Missing(Wrapped):
    """Its root may be missing."""

    is_missing = False

    @classmethod
    def at_once(cls, backend: Backend) -> Missing:
        found = cls(backend)
        found.is_missing = True
        return found

    def called(self, name: str, key: str) -> None:
        if self.is_missing:
            raise MissingRootError("its bucket is not there")


class Fails(Wrapped):
    """It may not answer."""

    is_dead = False

    def called(self, name: str, key: str) -> None:
        if self.is_dead:
            raise TransientError("answers with status 503")
