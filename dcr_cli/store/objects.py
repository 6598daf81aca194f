"""S3, Google Cloud Storage and Azure Blob Storage as backends, through obstore.

An exclusive create is one single put with the cloud's own condition: If-None-Match on S3 and Azure, a generation on
Google's. obstore retries nothing for us but what is sent in large requests, among them the parts of a multipart upload:
only it can send one of them again. Its threads do not outlive a fork, after which it would wait for them for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.stopping import check
from dcr_cli.store.backend import (
    CHUNK_BYTES,
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    OutsideError,
    PermanentError,
    Readable,
    Status,
    parts,
)
from dcr_cli.store.clouds import Cloud, cloud_of
from dcr_cli.store.location import Location
from dcr_cli.store.object_faults import RangeIgnoredError, TakenError, fault_of

T = TypeVar("T")
Heard = TypeVar("Heard")

_STORES: dict[str, Callable[..., S3Store | GCSStore | AzureStore]] = {
    "S3": S3Store,
    "GCS": GCSStore,
    "Azure": AzureStore,
}
# A body that comes may take for ever, if something of it comes every so often. What the library calls a time for
# reading runs while a body goes up too, so it is only for small ones; a large one has a time for all of it.
_READING = {
    "timeout": timedelta(days=1),
    "read_timeout": timedelta(seconds=30),
    "connect_timeout": timedelta(seconds=10),
}
# As many as the time allows: between them it waits up to 15 s.
_SENDING_RETRIES = {"max_retries": 20, "retry_timeout": timedelta(minutes=2)}
# A body that goes up has so long, and as long as it takes at so many bytes a second: as slow as that are eight of them
# that share a poor link.
_LEAST_SENDING_SECONDS = 30
_SLOWEST_BYTES_PER_SECOND = 64 << 10
_MOST_SMALL_BYTES = 1 << 20
_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME, or --storage-option account_name=NAME, names the account"
MOST_SINGLE_PUT_BYTES = 16 << 20
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000
MOST_OBJECT_BYTES = 5 << 40
_CONCURRENT_PARTS = 4
_MOST_CONCURRENT_BYTES = 256 << 20
# How long the library is waited for at a time.
_TICK_SECONDS = 0.5

# The process in which the library's threads run, from its first request on.
_process: int | None = None


class ObjectBackend:
    """The objects of a bucket whose names start with a prefix."""

    can_create = True

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        cloud = cloud_of(location, options)
        self._prefix = f"{cloud.prefix}/" if cloud.prefix else ""
        self._store = _open(location, cloud, _READING, {"max_retries": 0})
        self._senders = _Senders(location, cloud)
        self._shown = location.shown

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        is_ranged = begin > 0 or size is not None
        try:
            return self._read(key, begin, size, is_ranged=is_ranged)
        except RangeIgnoredError:
            pass
        return self._read(key, 0, None, is_ranged=False)

    def write(self, key: str, data: bytes | Readable, size: int) -> None:
        if size <= MOST_SINGLE_PUT_BYTES:
            whole = data if isinstance(data, bytes) else data.read(size)
            store = self._store if size <= _MOST_SMALL_BYTES else self._senders.of(size, retry=False)
            _asked(lambda: obstore.put(store, self._path(key), whole, use_multipart=False))
            return
        if size > MOST_OBJECT_BYTES:
            raise UnsupportedError(f"{self._shown}/{key}", f"has {size} bytes, an object at most {MOST_OBJECT_BYTES}")
        part_bytes, concurrent_parts = parts_of(size)
        sender = self._senders.of(part_bytes * concurrent_parts, retry=True)
        _asked(
            lambda: obstore.put(
                sender,
                self._path(key),
                parts(data, part_bytes),
                chunk_size=part_bytes,
                max_concurrency=concurrent_parts,
            )
        )

    def create(self, key: str, data: bytes) -> bool:
        try:
            _asked(lambda: obstore.put(self._store, self._path(key), data, mode="create", use_multipart=False))
        except TakenError:
            return False
        return True

    def status(self, key: str) -> Status | None:
        try:
            meta = _asked(lambda: obstore.head(self._store, self._path(key)))
        except (AbsentError, DeniedError):
            # The answer to a HEAD has no body to say whether it is the object, the bucket or the key that is wrong.
            try:
                meta = self._get(key, 0, 1, is_ranged=True).meta
            except AbsentError:
                return None
            except (OutsideError, RangeIgnoredError):
                meta = self._get(key, 0, None, is_ranged=False).meta
        return Status(meta["size"], meta["last_modified"].timestamp())

    def entries(self, prefix: str) -> Iterator[Entry]:
        pages = iter(obstore.list(self._store, (self._prefix + prefix) or None, chunk_size=1000))
        while (page := _asked(lambda: next(pages, None))) is not None:
            for meta in page:
                key = meta["path"].removeprefix(self._prefix)
                yield Entry(key, meta["size"], meta["last_modified"].timestamp())

    def remove(self, key: str) -> None:
        _asked(lambda: obstore.delete(self._store, self._path(key)))

    def leftovers(self, prefix: str) -> Iterator[Entry]:
        return iter(())

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return self._prefix + key

    def _read(self, key: str, begin: int, size: int | None, *, is_ranged: bool) -> Answer:
        result = self._get(key, begin, size, is_ranged=is_ranged)
        first, end = result.range
        return Answer(first, end - first, result.meta["size"], _chunks(result), result.meta["e_tag"])

    def _get(self, key: str, begin: int, size: int | None, *, is_ranged: bool) -> obstore.GetResult:
        chosen: Any = {"offset": begin} if size is None else (begin, begin + size)
        return _asked(
            lambda: obstore.get(self._store, self._path(key), options={"range": chosen} if is_ranged else None)
        )


class _Senders:
    """The stores that large bodies go up through, each with another time for a request. For any number of threads."""

    def __init__(self, location: Location, cloud: Cloud) -> None:
        self._location = location
        self._cloud = cloud
        self._lock = threading.Lock()
        self._stores: dict[tuple[int, bool], S3Store | GCSStore | AzureStore] = {}

    def of(self, under_way_bytes: int, *, retry: bool) -> S3Store | GCSStore | AzureStore:
        """One that gives a request the time of so many bytes; the library sends requests again itself if `retry`."""
        seconds = sending_seconds(under_way_bytes)
        with self._lock:
            store = self._stores.get((seconds, retry))
            if store is None:
                time = timedelta(seconds=seconds)
                times = {**_READING, "timeout": time, "read_timeout": time}
                retries = _SENDING_RETRIES if retry else {"max_retries": 0}
                store = self._stores[seconds, retry] = _open(self._location, self._cloud, times, retries)
            return store


def sending_seconds(size: int) -> int:
    """How long a request with a body of so many bytes may take; few different times, as each is a store's own."""
    seconds = -(-size // _SLOWEST_BYTES_PER_SECOND)
    return _LEAST_SENDING_SECONDS + (1 << max(0, seconds - 1).bit_length())


def parts_of(size: int) -> tuple[int, int]:
    """In parts of how many bytes a large object goes up, and how many of them at a time.

    The clouds take 10 000 parts; what is under way at a time is in memory.
    """
    part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
    return part_bytes, max(1, min(_CONCURRENT_PARTS, _MOST_CONCURRENT_BYTES // part_bytes))


def _open(
    location: Location, cloud: Cloud, times: Mapping[str, timedelta], retry_config: Any
) -> S3Store | GCSStore | AzureStore:
    arguments: dict[str, Any] = dict(cloud.settings)
    if cloud.profile is not None:
        arguments["credential_provider"] = _asking(location, cloud.profile)
    is_unknown = False
    try:
        return _STORES[cloud.kind](
            cloud.bucket,
            client_options={**times, **cloud.client_options},
            retry_config=retry_config,
            **arguments,
        )
    except UnknownConfigurationKeyError:
        is_unknown = True
    except (BaseError, ValueError, TypeError, OSError):
        pass
    # Raised here, because the library's own words may hold what the options do.
    names = ", ".join(sorted(cloud.settings)) or "none"
    facts = "one of them is not known" if is_unknown else "their values, or an account that is missing, make no sense"
    hint = _ACCOUNT if cloud.kind == "Azure" and "account_name" not in cloud.settings else None
    raise UsageError(location.shown, f"storage options {names}: {facts}", hint=hint)


def _asking(location: Location, profile: str) -> Any:
    try:
        provider = import_module("obstore.auth.boto3")
        session = import_module("boto3.session").Session(profile_name=profile)
    except ImportError:
        provider = None
    if provider is None:
        raise UnsupportedError(
            location.shown, f"the credentials of the AWS profile {profile} need boto3", hint="pip install boto3"
        )
    return provider.Boto3CredentialProvider(session)


def _chunks(result: obstore.GetResult) -> Iterator[bytes]:
    stream = iter(result.stream(min_chunk_size=CHUNK_BYTES))
    while (chunk := _asked(lambda: next(stream, None))) is not None:
        yield bytes(chunk)


def _asked(call: Callable[[], T]) -> T:
    """Return what obstore answers, or raise the fault that its error is, which then has no part of its text."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise PermanentError(
            "cannot be reached from a process made by fork after its parent had used such a store",
            hint="start processes by spawn, or open stores after the fork only",
        )
    try:
        return _heard(call)
    except (BaseError, FileNotFoundError) as error:
        fault = fault_of(error)
    raise fault


def _heard(call: Callable[[], T]) -> T:
    """Return what `call` returns, so that signals are heard meanwhile: the library keeps its thread until it is done.

    So the call is another thread's. After a signal that ends the waiting it goes on, and what it asks for may be done
    all the same.
    """
    outcome: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()

    def work() -> None:
        try:
            outcome.put(([call()], None))
        except BaseException as error:
            outcome.put(([], error))

    threading.Thread(target=work, daemon=True).start()
    values, error = _waited_for(outcome)
    if error is not None:
        raise error
    return values[0]


def _waited_for(outcome: SimpleQueue[Heard]) -> Heard:
    while True:
        try:
            # A signal that comes just before the wait begins does not end it.
            return outcome.get(timeout=_TICK_SECONDS)
        except Empty:
            check()
