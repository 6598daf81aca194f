"""Opening a store: which backend an address is served by. A backend's library is imported only when it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcr_cli.errors import UnsupportedError, UsageError, install_hint
from dcr_cli.store.backend import Backend
from dcr_cli.store.fallback import FallbackBackend
from dcr_cli.store.http_headers import Caller
from dcr_cli.store.location import Location, locate
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from dcr_cli.store.traffic import Meter

# The extras of dcr that bring what a protocol needs; the other ones need what fsspec says.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
    **dict.fromkeys(("sftp", "ssh"), "sftp"),
}
_WITHOUT_OPTIONS = ("file", "memory")
# Other names of a protocol; what is said to the one is said to the other.
_SAME = {"https": "http", "s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "ssh": "sftp"}
# One that is dead is noticed soon where another one can be asked, or somebody waits for the answer.
_CONNECT_SECONDS, _LONG_CONNECT_SECONDS = 5.0, 30.0
# How long somebody who only looks is kept waiting by what does not answer: most often an address that was mistyped.
LOOK_SECONDS = 10.0


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    is_single_writer: bool = False,
    patience: Patience | None = None,
    limit_bytes_per_second: float | None = None,
    caller: Caller | None = None,
    fallbacks: Sequence[str | os.PathLike[str]] = (),
    has_others: bool = False,
    is_look: bool = False,
) -> Store:
    """Open the remote at a path or URL; whether anything is there is not looked at.

    `fallbacks` lead to the same remote, and are asked in their order where that one does not answer; those of the same
    protocol have the same storage options, others none. With `has_others` the caller has such ones itself, and no use
    for waiting long for one that does not answer. Nor has whoever only looks, with `is_look`: what does not answer is
    given up after ten seconds, and not after the two minutes that `patience` is by default.

    `storage_options` are the backend's, credentials among them; those not given come from where the backend's tools
    look for them. `limit_bytes_per_second` holds for all transfers of the store together, up and down. `caller` is who
    asks; only relays are told. UsageError for an address or option that cannot be understood, LocalError for a file of
    an option that cannot be read; UnsupportedError where a package is missing.
    """
    location = locate(url)
    options = dict(storage_options or {})
    if patience is None:
        patience = Patience(deadline_seconds=LOOK_SECONDS) if is_look else Patience()
    is_brief = has_others or is_look
    if fallbacks:
        given = [options_for(fallback, url, options) for fallback in fallbacks]
        backends = [_backend(location, options, caller, _CONNECT_SECONDS)]
        for fallback, its_options in zip(fallbacks, given, strict=True):
            backends.append(_backend(locate(fallback), its_options, caller, _CONNECT_SECONDS))
        backend: Backend = FallbackBackend(backends, clock=patience.clock)
    else:
        backend = _backend(location, options, caller, _CONNECT_SECONDS if is_brief else _LONG_CONNECT_SECONDS)
    meter = Meter(limit_bytes_per_second, clock=patience.clock, sleep=patience.sleep)
    return Store(
        backend,
        location.shown,
        patience=patience,
        is_single_writer=is_single_writer,
        meter=meter,
        folder=Path(location.path) if location.protocol == "file" else None,
    )


def options_for(
    url: str | os.PathLike[str], first: str | os.PathLike[str], options: Mapping[str, object]
) -> Mapping[str, object]:
    """The options of a remote among several, which were given for all that have the protocol of the first."""
    return options if _protocol(locate(url)) == _protocol(locate(first)) else {}


def _protocol(location: Location) -> str:
    return _SAME.get(location.protocol, location.protocol)


def _backend(
    location: Location, options: Mapping[str, object], caller: Caller | None, connect_seconds: float
) -> Backend:
    if options and location.protocol in _WITHOUT_OPTIONS:
        raise UsageError(location.shown, f"takes no storage options, not {next(iter(options))}")
    try:
        return _import_and_open(location, options, caller, connect_seconds)
    except ImportError as error:
        missing = error.name or "a package"
    extra = _EXTRAS.get(location.protocol)
    raise UnsupportedError(
        location.shown,
        f"{location.protocol}:// needs {missing}, which is not installed",
        hint=install_hint(extra) if extra is not None else f"pip install {missing}",
    )


def _import_and_open(
    location: Location, options: Mapping[str, object], caller: Caller | None, connect_seconds: float
) -> Backend:
    match location.protocol:
        case "file":
            from dcr_cli.store.local import LocalBackend

            return LocalBackend(location.path)
        case "memory":
            from dcr_cli.store.memory import MemoryBackend

            return MemoryBackend(location.host + location.path)
        case "http" | "https":
            from dcr_cli.store.http import HttpBackend

            return HttpBackend(location, options, caller=caller, connect_seconds=connect_seconds)
        case "s3" | "s3a" | "gs" | "gcs" | "az" | "abfs" | "abfss":
            from dcr_cli.store.objects import ObjectBackend

            return ObjectBackend(location, options)
        case "sftp" | "ssh":
            from dcr_cli.store.sftp import SftpBackend

            return SftpBackend(location, options)
        case _:
            from dcr_cli.store.other import OtherBackend

            return OtherBackend(location, options)
