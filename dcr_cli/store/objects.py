"""S3, Google Cloud Storage and Azure Blob Storage as backends, through obstore.

An exclusive create is one single put with the cloud's own condition: If-None-Match on S3 and Azure, a generation on
Google's. obstore retries nothing for us, but the parts of a multipart upload: only it can send one of them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.store.backend import (
    CHUNK_BYTES,
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    FaultError,
    MissingRootError,
    OutsideError,
    PermanentError,
    Status,
    TransientError,
    parts,
)
from dcr_cli.store.clouds import Cloud, cloud_of
from dcr_cli.store.location import Location

T = TypeVar("T")

_STORES: dict[str, Callable[..., S3Store | GCSStore | AzureStore]] = {
    "S3": S3Store,
    "GCS": GCSStore,
    "Azure": AzureStore,
}
# A request may take this long in all; one that moves nothing for the shorter time is given up.
_CLIENT_OPTIONS = {
    "timeout": timedelta(minutes=10),
    "read_timeout": timedelta(seconds=60),
    "connect_timeout": timedelta(seconds=10),
}
_PART_RETRIES = {"max_retries": 5, "retry_timeout": timedelta(minutes=2)}
MOST_SINGLE_PUT_BYTES = 16 << 20
_PART_BYTES = 8 << 20
_MOST_PARTS = 9_000
_MOST_OBJECT_BYTES = 5 << 40
_CONCURRENT_PARTS = 4

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
# The services that machines of a cloud get credentials from: asked when there are no others.
_METADATA = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google\.internal")
_NO_ROOT = frozenset(("NoSuchBucket", "ContainerNotFound"))
_NOT_OUR_KEY = frozenset(
    (
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "AuthenticationFailed",
        "QuotaExceeded",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    )
)
_TRANSIENT = frozenset((408, 409, 429, 500, 502, 503, 504))
_MAY_PASS = frozenset(("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "OperationAborted"))
_HINTS = {
    "ExpiredToken": "get new credentials",
    "RequestTimeTooSkewed": "set this machine's clock",
    "QuotaExceeded": "make room in the store",
}


class ObjectBackend:
    """The objects of a bucket whose names start with a prefix."""

    can_create = True

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        cloud = cloud_of(location, options)
        self._prefix = f"{cloud.prefix}/" if cloud.prefix else ""
        self._store = _open(location, cloud, {"max_retries": 0})
        self._uploader = _open(location, cloud, _PART_RETRIES)
        self._shown = location.shown

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        is_ranged = begin > 0 or size is not None
        try:
            return self._read(key, begin, size, is_ranged=is_ranged)
        except _RangeIgnoredError:
            pass
        return self._read(key, 0, None, is_ranged=False)

    def write(self, key: str, data: bytes | BinaryIO, size: int) -> None:
        if size <= MOST_SINGLE_PUT_BYTES:
            whole = data if isinstance(data, bytes) else data.read(size)
            _asked(lambda: obstore.put(self._store, self._path(key), whole, use_multipart=False))
            return
        if size > _MOST_OBJECT_BYTES:
            raise UnsupportedError(f"{self._shown}/{key}", f"has {size} bytes, an object at most {_MOST_OBJECT_BYTES}")
        part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
        _asked(
            lambda: obstore.put(
                self._uploader,
                self._path(key),
                parts(data, part_bytes),
                chunk_size=part_bytes,
                max_concurrency=_CONCURRENT_PARTS,
            )
        )

    def create(self, key: str, data: bytes) -> bool:
        try:
            _asked(lambda: obstore.put(self._store, self._path(key), data, mode="create", use_multipart=False))
        except _TakenError:
            return False
        return True

    def status(self, key: str) -> Status | None:
        try:
            meta = _asked(lambda: obstore.head(self._store, self._path(key)))
        except AbsentError:
            return None
        return Status(meta["size"], meta["last_modified"].timestamp())

    def entries(self, prefix: str) -> Iterator[Entry]:
        pages = iter(obstore.list(self._store, (self._prefix + prefix) or None, chunk_size=1000))
        while (page := _asked(lambda: next(pages, None))) is not None:
            for meta in page:
                key = meta["path"].removeprefix(self._prefix)
                yield Entry(key, meta["size"], meta["last_modified"].timestamp())

    def remove(self, key: str) -> None:
        _asked(lambda: obstore.delete(self._store, self._path(key)))

    def close(self) -> None:
        pass

    def _path(self, key: str) -> str:
        return self._prefix + key

    def _read(self, key: str, begin: int, size: int | None, *, is_ranged: bool) -> Answer:
        chosen: Any = {"offset": begin} if size is None else (begin, begin + size)
        result = _asked(
            lambda: obstore.get(self._store, self._path(key), options={"range": chosen} if is_ranged else None)
        )
        first, end = result.range
        return Answer(first, end - first, result.meta["size"], _chunks(result), result.meta["e_tag"])


class _TakenError(FaultError):
    """The condition of a put was not met."""


class _RangeIgnoredError(FaultError):
    """A range was asked for, and the whole object came."""


def _open(location: Location, cloud: Cloud, retry_config: Any) -> S3Store | GCSStore | AzureStore:
    arguments: dict[str, Any] = dict(cloud.settings)
    if cloud.profile is not None:
        arguments["credential_provider"] = _asking(location, cloud.profile)
    is_unknown = False
    try:
        return _STORES[cloud.kind](
            cloud.bucket,
            client_options={**_CLIENT_OPTIONS, **cloud.client_options},
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
    raise UsageError(location.shown, f"storage options {names}: {facts}")


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
    try:
        return call()
    except (BaseError, FileNotFoundError) as error:
        fault = _fault_of(error)
    raise fault


def _fault_of(error: BaseError | FileNotFoundError) -> FaultError:
    text = str(error)
    match, named = _STATUS.search(text), _CODE.search(text)
    status, code = int(match[1]) if match else 0, named[1] if named else ""
    reason = " ".join(filter(None, (f"status {status}" if status else "", code)))
    if _METADATA.search(text):
        return PermanentError("found no credentials", hint="set those of the cloud, or say that it is public: anon")
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return _TakenError(reason)
    if code in _NO_ROOT:
        return MissingRootError("there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return AbsentError()
    if code in _NOT_OUR_KEY or isinstance(error, UnauthenticatedError):
        return PermanentError(f"refuses: {reason}", hint=_HINTS.get(code, "check the credentials"))
    if isinstance(error, PermissionDeniedError):
        return DeniedError(reason)
    return _other_fault(text, status, code, reason)


def _other_fault(text: str, status: int, code: str, reason: str) -> FaultError:
    if status == 416:
        return OutsideError("ends before the range that was asked for")
    if "non-partial response" in text:
        return _RangeIgnoredError("ignores ranges")
    if code in _MAY_PASS or status in _TRANSIENT:
        return TransientError(f"answers with {reason}")
    if status in (301, 307) or "redirect" in text:
        return PermanentError("the bucket is in another region", hint="name it: storage option region")
    if status:
        return PermanentError(f"answers with {reason}")
    if "certificate" in text.lower():
        return PermanentError("its certificate is not to be trusted")
    if "HTTP error" in text or "HttpError" in text:
        return TransientError("did not answer" if "TimedOut" in text else "the connection broke")
    return PermanentError("answers with what is no answer of an object store")
