"""The log of commits: the newest version in few requests, each commit after the one before, what somebody has seen."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dcr_cli.errors import DamagedError, DcrError, NotFoundError, TransportError, UsageError, WrongBaseError
from dcr_cli.remote.history import History, check_can_begin, encode_history, read_history, require_history
from dcr_cli.remote.keys import HISTORY_KEY, MOST_VERSION, commit_key, version_of_commit
from dcr_cli.remote.log import Known, Log
from dcr_cli.remote.signing import Trust
from dcr_cli.store.backend import AbsentError, Answer, Backend, DeniedError
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from remotes import CREATED, HISTORY, OTHER_HISTORY, PUBLISHER, commit, signing_key, version, write_log
from store_wrappers import DeniesTheAbsent, Wrapped


class Counts(Wrapped):
    """Remembers which keys were read, in order."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.keys: list[str] = []
        self.lock = threading.Lock()

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        with self.lock:
            self.keys.append(key)
        return super().read(key, begin, size)


class HasCommits(Wrapped):
    """Whatever is asked for, commits up to `last` are there."""

    def __init__(self, backend: Backend, last: int) -> None:
        super().__init__(backend)
        self.last = last

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        number = version_of_commit(key)
        if number is None or number > self.last:
            raise AbsentError
        return Answer(0, 1, 1, iter((b"x",)))


class DeniesAll(Wrapped):
    def read(self, key: str, begin: int, size: int | None) -> Answer:
        raise DeniedError("status 403")


@pytest.fixture
def backend() -> Backend:
    backend = MemoryBackend("test-log")
    for entry in list(backend.entries("")):
        backend.remove(entry.key)
    return backend


@pytest.fixture
def store(backend: Backend) -> Store:
    return Store(backend, "memory://test-log")


@pytest.mark.parametrize("known", [0, 1, 41, 999_999])
def test_newest_takes_few_requests(backend: Backend, known: int) -> None:
    for new in (*range(70), 127, 128, 129, 1000, 65_535, 65_536, 1_000_003):
        counts = Counts(HasCommits(backend, known + new))
        assert Log(Store(counts, "memory://test-log"), HISTORY).newest(known) == known + new
        assert len(counts.keys) <= max(1, 2 * new.bit_length())
        assert len(set(counts.keys)) == len(counts.keys)
        assert counts.keys[0] == commit_key(known + 1)


def test_newest_ends_where_numbers_end(backend: Backend) -> None:
    for known in (0, 1, MOST_VERSION - 3, MOST_VERSION - 1, MOST_VERSION):
        counts = Counts(HasCommits(backend, 1 << 60))
        assert Log(Store(counts, "memory://test-log"), HISTORY).newest(known) == MOST_VERSION
        assert len(counts.keys) <= 70
        assert all(version_of_commit(key) is not None for key in counts.keys)


def test_denied_means_absent_only_when_asked(store: Store, backend: Backend) -> None:
    log = write_log(store, 5)
    careful = Log(Store(DeniesTheAbsent(backend), "memory://test-log"), HISTORY)
    assert careful.newest(0) == careful.newest(2) == 5
    assert careful.read(6, is_denied_absent=True) is None
    with pytest.raises(TransportError, match="access is denied"):
        careful.read(6)
    assert careful.check_known(Known(HISTORY, 5, log[4].blake3), "rollout") == log[4]
    with pytest.raises(WrongBaseError, match="ends below version 6"):
        careful.check_known(Known(HISTORY, 6, log[4].blake3), "rollout")
    # Where nothing can be read, it is not known that the log ends.
    with pytest.raises(TransportError, match="access is denied"):
        Log(Store(DeniesAll(backend), "memory://test-log"), HISTORY).check_known(Known(HISTORY, 5, b""), "rollout")


def test_a_log_that_was_begun_anew_is_another_history(store: Store) -> None:
    seen = write_log(store, 3)[2]
    store.delete(commit_key(3))
    store.put(HISTORY_KEY, encode_history(History(OTHER_HISTORY, ("gap",), CREATED, PUBLISHER)))
    with pytest.raises(WrongBaseError, match=f"rollout follows history {HISTORY}, the remote holds {OTHER_HISTORY}"):
        Log(store, HISTORY).check_known(Known(HISTORY, 3, seen.blake3), "rollout")


def test_reading_one_version(store: Store) -> None:
    log = write_log(store, 2)
    reader = Log(store, HISTORY)
    assert reader.history == HISTORY
    assert reader.read(2) == reader.require(2) == log[1]
    assert reader.read(3) is None
    with pytest.raises(NotFoundError, match=r"commits/0000000003.json: there is no version 3"):
        reader.require(3)
    for data in (b"", b"{}", b"<html>", b"\0" * 65_537):
        store.put(commit_key(3), data)
        with pytest.raises(DamagedError, match=r"memory://test-log/commits/0000000003.json: "):
            reader.read(3)


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b'<?xml version="1.0" encoding="UTF-8"?>\n<Error>\n<Code>NoSuchKey</Code></Error>', "looks like XML"),
        (b"<!DOCTYPE html>\n<html>log in</html>\n", "looks like HTML"),
        (b'{\n  "error": {"code": 404}\n}\n', "looks like JSON of several lines"),
        (b'{"message":"not found"}', "names no format, as a web service's error"),
        (b'{"error":{"code":404}}\n', "names no format, as a web service's error"),
    ],
)
def test_what_servers_answer_instead_of_a_commit(store: Store, data: bytes, facts: str) -> None:
    store.put(commit_key(1), data)
    with pytest.raises(DamagedError, match=facts):
        Log(store, HISTORY).read(1)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 33, 48])
def test_following(store: Store, backend: Backend, count: int) -> None:
    log = write_log(store, count + 1)
    counts = Counts(backend)
    assert Log(Store(counts, "memory://test-log"), HISTORY).following(log[0], count + 1) == log[1:]
    assert sorted(counts.keys) == [commit_key(number) for number in range(2, count + 2)]
    if count:
        assert Log(store, HISTORY).following(log[-1], count + 1) == []


def test_a_log_that_goes_on_for_ever_takes_no_memory(store: Store, backend: Backend) -> None:
    """The last version is what the remote says; what does not follow ends it, soon."""
    first = write_log(store, 20)[0]
    counts = Counts(backend)
    with pytest.raises(DamagedError, match=r"0000000021.json: is not there, although version 9999999999 is"):
        Log(Store(counts, "memory://test-log"), HISTORY).following(first, MOST_VERSION)
    assert len(counts.keys) <= 48


def test_every_change_of_a_log_is_seen(store: Store) -> None:
    """Whichever byte of whichever commit below the newest one is another, it is refused."""
    log = write_log(store, 4)
    reader = Log(store, HISTORY)
    for published in log[1:-1]:
        key = commit_key(published.version.number)
        for at in range(0, len(published.data), 7):
            changed = bytearray(published.data)
            changed[at] ^= 1
            store.put(key, bytes(changed))
            with pytest.raises(DcrError):
                reader.following(log[0], 4)
        store.put(key, published.data)
    assert reader.following(log[0], 4) == log[1:]
    for one, other in ((2, 3), (3, 4), (4, 2)):
        store.put(commit_key(one), log[other - 1].data)
        with pytest.raises(DamagedError, match="is the commit of version"):
            reader.following(log[0], 4)
        store.put(commit_key(one), log[one - 1].data)


def test_trust_in_every_commit(store: Store) -> None:
    own, other = signing_key(), signing_key(1)
    log = write_log(store, 3, own)
    trusting = Log(store, HISTORY, Trust(frozenset([own.public])))
    assert trusting.following(log[0], 3) == log[1:]
    with pytest.raises(WrongBaseError, match="not signed by a trusted key"):
        Log(store, HISTORY, Trust(frozenset([other.public]))).following(log[0], 3)
    # Somebody who may write, but has no key, makes a log of their own that goes on from a true commit.
    forged = commit(store, version(2, previous=log[0].blake3))
    commit(store, version(3, previous=forged.blake3))
    assert len(Log(store, HISTORY).following(log[0], 3)) == 2
    with pytest.raises(WrongBaseError, match=r"0000000002.json: is not signed by a trusted key"):
        trusting.following(log[0], 3)


def test_a_folder_that_is_not_there_is_no_remote_without_versions(tmp_path: Path) -> None:
    """A disk that is not mounted is no news of a log, and no place to begin one in."""
    with open_store(tmp_path / "mount/run") as away:
        with pytest.raises(NotFoundError, match=r"mount/run: no such folder"):
            require_history(away)
        with pytest.raises(NotFoundError, match=r"no such folder"):
            Log(away, HISTORY).check_known(Known(HISTORY, 3, b""), "a receiver")
        with pytest.raises(NotFoundError, match=r"there is no folder .*/mount to make it in") as caught:
            check_can_begin(away)
        assert f"mkdir -p {tmp_path}/mount" in str(caught.value.hint)
        (tmp_path / "mount").mkdir()
        check_can_begin(away)
        (tmp_path / "mount/run").mkdir()
        with pytest.raises(NotFoundError, match=r"holds no versions"):
            require_history(away)
        (tmp_path / "mount/run/model.safetensors").touch()
        with pytest.raises(UsageError, match=r"is a checkpoint, and no remote") as swapped:
            require_history(away)
        assert "REMOTE comes first in dcr pull" in str(swapped.value.hint)


def test_histories(store: Store) -> None:
    assert read_history(store) is None
    with pytest.raises(NotFoundError, match=r"holds no versions: it has no dcr.json") as caught:
        require_history(store)
    assert caught.value.hint == "dcr push CHECKPOINT memory://test-log makes one"
    history = History(HISTORY, ("gap", "whole"), CREATED, PUBLISHER)
    store.put(HISTORY_KEY, encode_history(history))
    assert read_history(store) == require_history(store) == history
