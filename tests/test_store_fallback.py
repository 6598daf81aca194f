"""Several backends as one: the first that answers serves, and one that fails costs little, and comes back."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from dcr_cli.errors import ConflictError, NotFoundError, TransportError, UnsupportedError, UsageError
from dcr_cli.store.backend import (
    Answer,
    Backend,
    DeniedError,
    FaultError,
    MissingRootError,
    PermanentError,
    Readable,
    TransientError,
)
from dcr_cli.store.calls import RefusedError
from dcr_cli.store.fallback import BEHIND_SECONDS, PASSED_OVER_SECONDS, FallbackBackend, order
from dcr_cli.store.local import LocalBackend
from dcr_cli.store.memory import MemoryBackend
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from relay_stand_in import StandIn, stand_in
from store_contract import BIG, MOST, Clock, Place, StoreContract
from store_wrappers import LosesTheAnswer, Records, Truncates, Wrapped


class Ails(Records):
    """Fails each call with `fault` while there is one."""

    fault: FaultError | None = None

    def called(self, name: str, key: str) -> None:
        super().called(name, key)
        if self.fault is not None:
            raise self.fault


class Scene:
    """Two ways to one remote, `first` and `second`, and a third that leads to another place."""

    def __init__(self) -> None:
        name = uuid4().hex
        self.clock = Clock()
        self.first, self.second = Ails(MemoryBackend(name)), Ails(MemoryBackend(name))

    def open(self, *backends: Backend, deadline_seconds: float = 0.0) -> Store:
        several = FallbackBackend(backends or (self.first, self.second), clock=lambda: self.clock.now)
        return Store(several, "test://remote", patience=self.clock.patience(deadline_seconds=deadline_seconds))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_order() -> None:
    """It is that of the backends; those that are passed over come last, and are asked when all others fail."""
    never = float("-inf")
    assert order([never, never, never], 100.0) == [0, 1, 2]
    assert order([101.0, never, never], 100.0) == [1, 2, 0]
    assert order([100.0, never, never], 100.0) == [0, 1, 2]
    assert order([101.0, 99.0, 130.0], 100.0) == [1, 0, 2]
    assert order([110.0, 105.0, 101.0], 100.0) == [0, 1, 2]


@pytest.mark.parametrize("fault", [TransientError("is down"), PermanentError("is odd"), MissingRootError("no bucket")])
def test_one_that_fails_is_passed_over_and_comes_back(scene: Scene, fault: FaultError) -> None:
    store = scene.open()
    store.put("a", b"1")
    assert len(scene.first.calls) == 1 and not scene.second.calls
    scene.first.fault = fault
    for _ in range(3):
        assert store.get("a", most_bytes=MOST) == b"1"
    assert len(scene.first.calls) == 2 and len(scene.second.calls) == 3
    scene.clock.now += PASSED_OVER_SECONDS
    assert store.get("a", most_bytes=MOST) == b"1"
    assert len(scene.first.calls) == 3 and len(scene.second.calls) == 4
    scene.first.fault = None
    assert store.get("a", most_bytes=MOST) == b"1"
    assert len(scene.first.calls) == 3
    scene.clock.now += PASSED_OVER_SECONDS
    assert store.get("a", most_bytes=MOST) == b"1"
    assert len(scene.first.calls) == 4 and len(scene.second.calls) == 5
    # Where another one answers nobody waits.
    assert scene.clock.waits == []


def test_what_is_an_answer_is_asked_of_nobody_else(scene: Scene) -> None:
    store = scene.open()
    assert store.get("a", most_bytes=MOST) is None
    assert store.stat("a") is None
    scene.first.fault = DeniedError("status 403")
    with pytest.raises(RefusedError, match="access is denied"):
        store.get("a", most_bytes=MOST)
    assert not scene.second.calls


def test_one_that_is_passed_over_is_asked_when_the_others_fail(scene: Scene) -> None:
    store = scene.open()
    store.put("a", b"1")
    scene.first.fault = TransientError("is down")
    assert store.get("a", most_bytes=MOST) == b"1"
    scene.first.fault, scene.second.fault = None, TransientError("is down too")
    assert store.get("a", most_bytes=MOST) == b"1"


@pytest.mark.parametrize(
    ("first", "second", "is_retryable", "facts"),
    [
        (TransientError("one"), TransientError("two"), True, "two"),
        (TransientError("one"), PermanentError("two"), True, "one"),
        (PermanentError("one"), TransientError("two"), True, "two"),
        (PermanentError("one"), PermanentError("two"), False, "two"),
    ],
)
def test_when_all_fail(scene: Scene, first: FaultError, second: FaultError, is_retryable: bool, facts: str) -> None:
    scene.first.fault, scene.second.fault = first, second
    with pytest.raises(TransportError, match=facts) as caught:
        scene.open().get("a", most_bytes=MOST)
    assert caught.value.retryable is is_retryable
    scene.first.fault = scene.second.fault = MissingRootError("no such bucket")
    with pytest.raises(NotFoundError):
        scene.open().get("a", most_bytes=MOST)


def test_a_body_that_breaks_off_is_gone_on_with_by_another_one(scene: Scene) -> None:
    """Whose tag is another one."""

    class Breaks(Records):
        def read(self, key: str, begin: int, size: int | None) -> Answer:
            answer = super().read(key, begin, size)
            return replace(answer, chunks=self._broken(answer.chunks), tag="first")

        def _broken(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
            yield next(chunks)
            raise PermanentError("broke off")

    class Tags(Records):
        def read(self, key: str, begin: int, size: int | None) -> Answer:
            return replace(super().read(key, begin, size), tag="second")

    first, second = Breaks(scene.first), Tags(scene.second)
    store = scene.open(first, second, deadline_seconds=10)
    store.put("a", BIG)
    assert b"".join(store.stream("a", size=len(BIG))) == BIG
    assert [name for name, _ in first.calls] == ["write", "read"]
    assert [name for name, _ in second.calls] == ["read"]


def test_a_body_that_ends_early_is_too(scene: Scene) -> None:
    first = Records(Truncates(scene.first, 100, 7))
    store = scene.open(first, scene.second, deadline_seconds=10)
    store.put("a", BIG)
    assert b"".join(store.stream("a", size=len(BIG))) == BIG
    assert [name for name, _ in first.calls] == ["write", "read"]


def test_an_object_of_another_size_elsewhere_is_another_one(scene: Scene) -> None:
    first, second = Truncates(MemoryBackend(uuid4().hex), 100, 7), MemoryBackend(uuid4().hex)
    first.write("a", b"1234567890", 10)
    second.write("a", b"12345678901", 11)
    with pytest.raises(ConflictError, match="was replaced"):
        list(scene.open(first, second, deadline_seconds=10).stream("a"))


def test_a_create_whose_answer_is_lost(scene: Scene) -> None:
    store = scene.open(LosesTheAnswer(scene.first), scene.second)
    assert store.put_if_absent("a", b"ours")
    assert ("create", "a") in scene.second.calls
    store = scene.open(LosesTheAnswer(scene.first, lambda: scene.second.write("b", b"theirs", 6)), scene.second)
    assert not store.put_if_absent("b", b"ours")


def test_a_stream_is_written_whole_by_another_one(scene: Scene) -> None:
    class Half(Wrapped):
        def write(self, key: str, data: bytes | Readable, size: int) -> None:
            assert not isinstance(data, bytes)
            data.read(size // 2)
            raise PermanentError("broke off")

    store = scene.open(Half(scene.first), scene.second, deadline_seconds=10)
    store.put("a", io.BytesIO(BIG))
    assert scene.second.calls[0] == ("write", "a") and len(scene.clock.waits) == 1
    assert b"".join(store.stream("a")) == BIG
    with pytest.raises(RefusedError):
        scene.open(Half(scene.first), Half(scene.second), deadline_seconds=10).put("b", io.BytesIO(BIG))


def test_a_mirror_that_is_only_read_is_not_dead(scene: Scene) -> None:
    class ReadOnly(Ails):
        def called(self, name: str, key: str) -> None:
            super().called(name, key)
            if name in ("write", "create"):
                raise UnsupportedError("test://mirror", "can only be read")

    mirror = ReadOnly(scene.first)
    store = scene.open(mirror, scene.second)
    assert store.put_if_absent("a", b"1")
    assert store.get("a", most_bytes=MOST) == b"1"
    assert mirror.calls[-1] == ("read", "a")
    # What the other one cannot do now it may do later.
    scene.second.fault = TransientError("is down")
    with pytest.raises(TransportError) as caught:
        store.put_if_absent("b", b"1")
    assert caught.value.retryable
    with pytest.raises(UnsupportedError, match="can only be read"):
        scene.open(mirror).put_if_absent("b", b"1")


def test_one_that_cannot_create_is_passed_by(scene: Scene) -> None:
    class Cannot(Wrapped):
        can_create = False

    store = scene.open(Cannot(scene.first), scene.second)
    assert store.put_if_absent("a", b"1")
    assert ("create", "a") not in scene.first.calls
    with pytest.raises(UnsupportedError):
        scene.open(Cannot(scene.first)).put_if_absent("b", b"1")


def test_the_other_calls(scene: Scene) -> None:
    store = scene.open()
    scene.first.fault = TransientError("is down")
    store.put("a", b"12")
    status = store.stat("a")
    assert status is not None and status.size == 2
    assert [entry.key for entry in store.list()] == ["a"]
    assert store.leftovers() == ()
    store.delete("a")
    assert store.stat("a") is None
    assert not store.wait("a", 30)
    store.close()


class TestTurnTo:
    """What somebody has seen: whoever lacks it is behind."""

    WAYS = (
        lambda store, key: store.get(key, most_bytes=MOST, is_seen=True),
        lambda store, key: store.get_range(key, 0, 1, is_seen=True),
        lambda store, key: b"".join(store.stream(key, is_seen=True)),
    )

    @pytest.mark.parametrize("read", WAYS)
    def test_one_that_has_it(self, scene: Scene, read: Callable[[Store, str], bytes]) -> None:
        ahead = Ails(MemoryBackend(uuid4().hex))
        store = scene.open(scene.first, ahead)
        ahead.write("commits/2", b"1", 1)
        ahead.calls.clear()
        assert store.get("commits/2", most_bytes=MOST) is None
        assert store.turns == 0
        assert read(store, "commits/2") == b"1"
        assert store.turns == 1
        assert store.get("commits/2", most_bytes=MOST) == b"1"
        scene.clock.now += PASSED_OVER_SECONDS
        assert store.get("commits/2", most_bytes=MOST) == b"1"
        # It serves all the same where the other one fails, and is asked again later.
        ahead.fault = TransientError("is down")
        assert store.get("commits/2", most_bytes=MOST) is None
        scene.clock.now += BEHIND_SECONDS
        assert store.get("commits/2", most_bytes=MOST) is None

    def test_none_has_it(self, scene: Scene) -> None:
        store = scene.open()
        scene.second.fault = DeniedError("status 403")
        assert store.get("commits/2", most_bytes=MOST, is_seen=True) is None
        for read in self.WAYS[1:]:
            with pytest.raises(NotFoundError):
                read(store, "commits/2")
        assert store.turns == 0
        scene.first.calls.clear()
        assert store.get("commits/2", most_bytes=MOST) is None
        assert len(scene.first.calls) == 1

    def test_one_that_may_have_it_does_not_answer(self, scene: Scene) -> None:
        for down in (scene.first, scene.second):
            down.fault = TransientError("is down")
            with pytest.raises(TransportError, match="is down, and what answers instead is behind") as caught:
                scene.open(deadline_seconds=100).get("commits/2", most_bytes=MOST, is_seen=True)
            assert caught.value.retryable and scene.clock.waits == []
            down.fault = None

    def test_one_alone_is_not_asked(self, scene: Scene) -> None:
        store = Store(scene.first, "test://remote")
        assert store.get("commits/2", most_bytes=MOST, is_seen=True) is None
        assert scene.first.calls == [("read", "commits/2")]


class TestContract(StoreContract):
    """Of several, of which the first is dead."""

    rounds = 10

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        class Dead(Place):
            def open(self) -> Store:
                dead = Ails(LocalBackend(self.url))
                dead.fault = TransientError("is down")
                return Store(FallbackBackend((dead, LocalBackend(self.url))), self.url)

        return Dead(str(tmp_path))


class TestOpening:
    @pytest.fixture
    def relays(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StandIn, StandIn]]:
        for name in ("http_proxy", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        with stand_in() as first, stand_in() as second:
            yield first, second

    def test_options_hold_for_the_same_protocol(
        self, relays: tuple[StandIn, StandIn], tmp_path: Path, scene: Scene
    ) -> None:
        for relay in relays:
            relay.token = "word"
        first, second = relays
        (tmp_path / "b").write_bytes(b"3")
        second.put("a", b"2")
        options: dict[str, object] = {"token": "word"}
        patience = scene.clock.patience(deadline_seconds=0)
        with open_store(first.url, options, fallbacks=[second.url, tmp_path], patience=patience) as store:
            assert store.shown == first.url
            first.faults[:] = ["503"]
            assert store.get("a", most_bytes=MOST) == b"2"
            second.faults[:] = ["503"]
            first.faults[:] = []
            scene.clock.now += 1
            # Before the one that is passed over comes the folder.
            assert store.get("b", most_bytes=MOST) == b"3"
        with pytest.raises(UsageError):
            open_store(first.url, fallbacks=["s3://"])

    def test_one_that_is_gone(self, relays: tuple[StandIn, StandIn], scene: Scene) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            gone = f"http://127.0.0.1:{listener.getsockname()[1]}"
        relays[0].put("a", b"1")
        with open_store(gone, fallbacks=[relays[0].url], patience=scene.clock.patience()) as store:
            assert store.get("a", most_bytes=MOST) == b"1"
        assert scene.clock.waits == []

    def test_to_connect_takes_little_where_there_are_others(
        self, relays: tuple[StandIn, StandIn], scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is answered may take as long as ever."""
        asked: list[object] = []
        connect = socket.create_connection

        def connecting(address: tuple[str, int], timeout: float, *rest: object) -> socket.socket:
            asked.append(timeout)
            if address[1] == relays[0].server_port:
                raise TimeoutError
            made = connect(address, timeout)
            made_sockets.append(made)
            return made

        made_sockets: list[socket.socket] = []
        monkeypatch.setattr(socket, "create_connection", connecting)
        relays[1].put("a", b"1")
        with open_store(relays[0].url, fallbacks=[relays[1].url], patience=scene.clock.patience()) as store:
            assert store.get("a", most_bytes=MOST) == b"1"
            assert made_sockets[0].gettimeout() == 30.0
        assert asked == [5.0, 5.0]
        patience = scene.clock.patience(deadline_seconds=0)
        with (
            open_store(relays[0].url, patience=patience) as store,
            pytest.raises(TransportError, match="did not answer in 30 s"),
        ):
            store.get("a", most_bytes=MOST)
        assert asked[2:] == [30.0]
