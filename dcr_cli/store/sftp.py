"""A folder behind SFTP as a backend, through paramiko.

A file is written beside its place under a name that starts with a dot. SFTP's own rename fails if something has the
new name: that is the exclusive create. Servers that have it get a rename over what is there for plain writes.
"""

from __future__ import annotations

import os
import posixpath
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import paramiko

from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.store.backend import (
    AbsentError,
    Answer,
    DeniedError,
    Entry,
    FaultError,
    OutsideError,
    PermanentError,
    Status,
    TransientError,
    parts,
)
from dcr_cli.store.location import Location

TIMEOUT_SECONDS = 30.0
# How much is read before the session is let go: another thread may need one, and servers take ten per connection.
_PART_BYTES = 8 << 20
_OPTIONS = ("username", "password", "port", "key_filename", "passphrase", "look_for_keys", "allow_agent", "known_hosts")


class SftpBackend:
    """The files below a folder of an SFTP server, which is made by the first write.

    Options are paramiko's (`username`, `password`, `port`, `key_filename`, `passphrase`, `look_for_keys`,
    `allow_agent`), and `known_hosts`: a file of host keys instead of the user's. A server whose key is in none is
    refused. The user's ~/.ssh/config says what a host's name, user, port and key files are.
    """

    can_create = True

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise UsageError(location.shown, f"storage option {unknown[0]} is not one of {', '.join(_OPTIONS)}")
        self._root = location.path or "/"
        self._host, self._arguments = _arguments(location, options)
        self._known_hosts = options.get("known_hosts")
        self._lock = threading.Lock()
        self._client: paramiko.SSHClient | None = None
        self._idle: list[paramiko.SFTPClient] = []

    def read(self, key: str, begin: int, size: int | None) -> Answer:
        with self._session() as session, session.open(self._path(key), "rb") as file:
            total = file.stat().st_size or 0
            tag = str(file.stat().st_mtime)
        if begin > total:
            raise OutsideError(f"has {total} bytes, at least {begin} expected")
        end = total if size is None else min(begin + size, total)
        return Answer(begin, end - begin, total, self._chunks(key, begin, end), tag)

    def write(self, key: str, data: bytes | BinaryIO, size: int) -> None:
        with self._session() as session, self._written(session, key, data) as new:
            _replace(session, new, self._path(key))

    def create(self, key: str, data: bytes) -> bool:
        with self._session() as session, self._written(session, key, data) as new:
            try:
                session.rename(new, self._path(key))
            except OSError:
                # The protocol has no word for "taken".
                if _status(session, self._path(key)) is None:
                    raise
                return False
            return True

    def status(self, key: str) -> Status | None:
        with self._session() as session:
            known = _status(session, self._path(key))
        if known is None or not stat.S_ISREG(known.st_mode or 0):
            return None
        return Status(known.st_size or 0, float(known.st_mtime or 0))

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._session() as session:
            yield from _walk(session, self._root, prefix)

    def remove(self, key: str) -> None:
        with self._session() as session:
            session.remove(self._path(key))

    def close(self) -> None:
        with self._lock:
            client, self._client, self._idle = self._client, None, []
        if client is not None:
            client.close()

    def _path(self, key: str) -> str:
        return posixpath.join(self._root, key)

    def _chunks(self, key: str, begin: int, end: int) -> Iterator[bytes]:
        for at in range(begin, end, _PART_BYTES):
            size = min(_PART_BYTES, end - at)
            with self._session() as session, session.open(self._path(key), "rb") as file:
                # Asks for all of it before the first of it has come.
                part: bytes = b"".join(file.readv([(at, size)]))
            yield part
            if len(part) < size:
                return

    @contextmanager
    def _written(self, session: paramiko.SFTPClient, key: str, data: bytes | BinaryIO) -> Iterator[str]:
        """Write a file of its own beside the place of `key`; it is removed unless it was given another name."""
        above = posixpath.dirname(self._path(key))
        new = posixpath.join(above, f".{secrets.token_hex(8)}.new")
        _make_folders(session, above)
        try:
            with session.open(new, "wxb") as file:
                file.set_pipelined(True)
                for part in parts(data):
                    file.write(part)
                file.flush()
                _sync(session, file)
            yield new
        finally:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.remove(new)

    # Sessions

    @contextmanager
    def _session(self) -> Iterator[paramiko.SFTPClient]:
        """Lend a session, which one thread at a time may use; whatever goes wrong in it becomes a fault."""
        fault: FaultError | None = None
        session = None
        is_whole = False
        try:
            session = self._take()
            yield session
            is_whole = True
        except (OSError, EOFError, paramiko.SSHException) as error:
            fault = _fault_of(error)
            is_whole = not isinstance(fault, TransientError)
        finally:
            if session is not None:
                self._give_back(session, is_whole=is_whole)
        if fault is not None:
            raise fault

    def _take(self) -> paramiko.SFTPClient:
        with self._lock:
            transport = None if self._client is None else self._client.get_transport()
            if self._client is None or transport is None or not transport.is_active():
                self._idle.clear()
                self._client = self._connect()
            if self._idle:
                return self._idle.pop()
            session = self._client.open_sftp()
            session.get_channel().settimeout(TIMEOUT_SECONDS)
            return session

    def _give_back(self, session: paramiko.SFTPClient, *, is_whole: bool) -> None:
        if is_whole:
            with self._lock:
                self._idle.append(session)
        else:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.close()

    def _connect(self) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        if self._known_hosts is None:
            client.load_system_host_keys()
        else:
            client.load_host_keys(str(self._known_hosts))
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        arguments = dict(self._arguments)
        if (command := arguments.pop("proxycommand", None)) is not None:
            arguments["sock"] = paramiko.ProxyCommand(command)
        try:
            client.connect(self._host, timeout=TIMEOUT_SECONDS, banner_timeout=TIMEOUT_SECONDS, **arguments)
        except BaseException:
            client.close()
            raise
        return client


def _arguments(location: Location, options: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """The host to connect to and paramiko's arguments: options first, then the address, then ~/.ssh/config."""
    told: Mapping[str, Any] = {}
    path = os.path.expanduser("~/.ssh/config")
    is_understood = True
    if os.path.isfile(path):
        try:
            told = paramiko.SSHConfig.from_path(path).lookup(location.host)
        except paramiko.SSHException:
            is_understood = False
    if not is_understood:
        raise UsageError(path, "cannot be understood")
    if "proxyjump" in told:
        raise UnsupportedError(location.shown, "~/.ssh/config reaches it by ProxyJump", hint="write a ProxyCommand")
    chosen: dict[str, Any] = {
        "username": location.user or told.get("user"),
        "password": location.password,
        "port": location.port or int(told.get("port", 22)),
        "key_filename": told.get("identityfile"),
        "proxycommand": told.get("proxycommand"),
    }
    chosen |= {name: value for name, value in options.items() if name != "known_hosts"}
    return str(told.get("hostname", location.host)), {name: each for name, each in chosen.items() if each is not None}


def _make_folders(session: paramiko.SFTPClient, path: str) -> None:
    if path in ("", "/") or _status(session, path) is not None:
        return
    _make_folders(session, posixpath.dirname(path))
    try:
        session.mkdir(path)
    except OSError:
        # Another publisher was faster, or it cannot be made.
        if _status(session, path) is None:
            raise


def _replace(session: paramiko.SFTPClient, new: str, path: str) -> None:
    try:
        session.posix_rename(new, path)
    except OSError as error:
        if "unsupported" not in str(error).lower():
            raise
        # A server without the extension: for a moment nothing has the name.
        if _status(session, path) is not None:
            session.remove(path)
        session.rename(new, path)


def _sync(session: paramiko.SFTPClient, file: paramiko.SFTPFile) -> None:
    """Make a file durable where the server can be asked to: paramiko knows the request, not this use of it."""
    try:
        session._request(paramiko.sftp.CMD_EXTENDED, "fsync@openssh.com", file.handle)
    except OSError as error:
        if "unsupported" not in str(error).lower():
            raise


def _status(session: paramiko.SFTPClient, path: str) -> paramiko.SFTPAttributes | None:
    try:
        return session.stat(path)
    except FileNotFoundError:
        return None


def _walk(session: paramiko.SFTPClient, root: str, prefix: str) -> Iterator[Entry]:
    try:
        found = session.listdir_attr(posixpath.join(root, prefix).rstrip("/") or "/")
    except FileNotFoundError:
        return
    for each in found:
        if each.filename.startswith("."):
            continue
        if stat.S_ISDIR(each.st_mode or 0):
            yield from _walk(session, root, f"{prefix}{each.filename}/")
        elif stat.S_ISREG(each.st_mode or 0):
            yield Entry(prefix + each.filename, each.st_size or 0, float(each.st_mtime or 0))


def _fault_of(error: OSError | EOFError | paramiko.SSHException) -> FaultError:
    if isinstance(error, FileNotFoundError):
        return AbsentError()
    if isinstance(error, PermissionError):
        return DeniedError("the server does not permit it")
    if isinstance(error, paramiko.BadHostKeyException):
        return PermanentError("its host key is not the one that is known", hint="find out why before anything else")
    if isinstance(error, paramiko.AuthenticationException | paramiko.PasswordRequiredException):
        return PermanentError("does not accept the user or key", hint="check user, key file, agent and passphrase")
    if isinstance(error, paramiko.SSHException):
        if "known_hosts" in str(error):
            return PermanentError("its host key is not known", hint="connect once with ssh, and check the key it shows")
        if "No authentication methods" in str(error):
            return PermanentError("found no key or password", hint="name one: key_filename, password, or an agent")
        return TransientError("the connection broke")
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return TransientError("nothing answers there")
    if isinstance(error, TimeoutError):
        return TransientError(f"did not answer in {TIMEOUT_SECONDS:.0f} s")
    if isinstance(error, OSError) and error.errno is None and str(error) in ("Failure", "Operation unsupported"):
        return PermanentError(f"the server says only: {error}")
    return TransientError("the connection broke")
