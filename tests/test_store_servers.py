"""The contract of stores on real servers, and what only those do."""

from __future__ import annotations

import gzip
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcr_cli.errors import NotFoundError, TransportError
from dcr_cli.store.opening import open_store
from real_servers import azurite_server, named_remote, nginx_server, openssh_server
from store_contract import MOST, Clock, Place, ReadContract, StoreContract


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    with openssh_server(tmp_path_factory.mktemp("ssh")) as options:
        yield options


class TestOpenSsh(StoreContract):
    rounds = 20

    @pytest.fixture
    def place(self, ssh: dict[str, object], tmp_path: Path) -> Place:
        return Place(f"sftp://127.0.0.1{tmp_path}/new/remote", ssh)

    def test_only_what_was_put_is_there(self, place: Place, tmp_path: Path) -> None:
        with place.open() as store:
            store.put("a/b", b"1")
            store.put("a/b", b"2")
            store.put_if_absent("a/c", b"1")
            store.put_if_absent("a/c", b"2")
        root = tmp_path / "new" / "remote"
        assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["a", "a/b", "a/c"]


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    with azurite_server(tmp_path_factory.mktemp("azurite")) as options:
        yield options


class TestAzurite(StoreContract):
    rounds = 10

    @pytest.fixture
    def place(self, azurite: dict[str, object], tmp_path: Path) -> Place:
        return Place(f"az://box/{tmp_path.name}", azurite)

    def test_no_container_is_not_an_empty_one(self, azurite: dict[str, object]) -> None:
        with open_store("az://nowhere/a", azurite) as store:
            with pytest.raises(NotFoundError, match="no such bucket"):
                store.get("a", most_bytes=MOST)
            with pytest.raises(NotFoundError, match="no such bucket"):
                store.stat("a")
            with pytest.raises(NotFoundError, match="no such bucket"):
                store.put_if_absent("a", b"1")

    def test_a_wrong_key_is_not_absence(self, azurite: dict[str, object]) -> None:
        wrong = {**azurite, "account_key": "aHVudGVyMg=="}
        with open_store("az://box/a", wrong) as store:
            for work in (
                lambda: store.get("a", most_bytes=MOST, is_denied_absent=True),
                lambda: store.stat("a", is_denied_absent=True),
            ):
                with pytest.raises(TransportError):
                    work()

    def test_an_address_with_its_account_and_a_connection_string(self, azurite: dict[str, object]) -> None:
        text = ";".join(
            f"{name}={azurite[ours]}"
            for name, ours in (
                ("AccountName", "account_name"),
                ("AccountKey", "account_key"),
                ("BlobEndpoint", "endpoint_url"),
            )
        )
        with open_store("az://box/connected", {"connection_string": text}) as store:
            assert store.put_if_absent("a", b"1")
            assert store.get("a", most_bytes=MOST) == b"1"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("served")
    with nginx_server(tmp_path_factory.mktemp("nginx"), root) as url:
        yield url, root


class TestNginx(ReadContract):
    @pytest.fixture
    def place(self, served: tuple[str, Path]) -> Place:
        return Place(served[0], writer=open_store(served[1]))

    def test_what_is_no_object(self, served: tuple[str, Path]) -> None:
        store = open_store(served[0], patience=Clock().patience(deadline_seconds=1))
        for key, facts, is_retryable in (
            ("denied", "access is denied: status 403", False),
            ("busy", "status 503", True),
            ("page", "a web page", False),
        ):
            with pytest.raises(TransportError, match=facts) as caught:
                store.get(key, most_bytes=MOST)
            assert caught.value.retryable is is_retryable

    def test_bytes_come_as_they_are_stored(self, served: tuple[str, Path]) -> None:
        """From a server that compresses for whoever takes it."""
        data = gzip.compress(bytes(1000), mtime=0) + bytes(10_000)
        with open_store(served[1]) as writer:
            writer.put("zipped/a.json", data)
        store = open_store(served[0])
        assert store.get("zipped/a.json", most_bytes=MOST) == data
        assert store.get_range("zipped/a.json", 3, 9000) == data[3:9003]


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    root = f"{named_remote()}/dcr-test-{secrets.token_hex(8)}"
    yield root
    with open_store(root) as store:
        for entry in store.list():
            store.delete(entry.key)
        assert store.list() == ()


class TestNamedRemote(StoreContract):
    """Whatever DCR_TEST_REMOTE names, below a prefix of its own, which is empty again afterwards."""

    rounds = 5

    @pytest.fixture
    def place(self, named: str, tmp_path: Path) -> Place:
        return Place(f"{named}/{tmp_path.name}")
