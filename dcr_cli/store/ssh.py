"""An SSH connection and its SFTP sessions, lent to one thread at a time; made when needed and again when it breaks.

What paramiko raises becomes a fault here. What is done in a session is its borrower's business.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import paramiko

from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.store.backend import AbsentError, DeniedError, FaultError, PermanentError, TransientError
from dcr_cli.store.location import Location

TIMEOUT_SECONDS = 30.0
# Servers take ten per connection.
_MOST_SESSIONS = 8
_SWITCHES = ("look_for_keys", "allow_agent")
_OPTIONS = ("username", "password", "port", "key_filename", "passphrase", *_SWITCHES, "known_hosts")


class Sessions:
    """The sessions of one user at one host, at most 8 at a time.

    Options are paramiko's (`username`, `password`, `port`, `key_filename`, `passphrase`, `look_for_keys`,
    `allow_agent`), and `known_hosts`: a file of host keys instead of the user's. A server whose key is in none is
    refused. The user's ~/.ssh/config says what a host's name, user, port and key files are.
    """

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise UsageError(location.shown, f"storage option {unknown[0]} is not one of {', '.join(_OPTIONS)}")
        self._host, self._arguments = _arguments(location, options)
        self._known_hosts = options.get("known_hosts")
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(_MOST_SESSIONS)
        self._client: paramiko.SSHClient | None = None
        self._idle: list[paramiko.SFTPClient] = []

    def close(self) -> None:
        with self._lock:
            client, self._client, self._idle = self._client, None, []
        if client is not None:
            client.close()

    @contextmanager
    def lent(self) -> Iterator[paramiko.SFTPClient]:
        """Lend a session, which one thread at a time may use; whatever goes wrong in it becomes a fault."""
        fault: FaultError | None = None
        with self._places:
            client, session = self._take()
            is_whole = False
            try:
                yield session
                is_whole = True
            except (OSError, EOFError, paramiko.SSHException) as error:
                fault = _fault_of(error)
                is_whole = not isinstance(fault, TransientError)
                if not is_whole:
                    # One that is broken may look alive for a long time, and so would every new session of it.
                    self._drop(client)
            finally:
                self._give_back(client, session, is_whole=is_whole)
        if fault is not None:
            raise fault

    def _take(self) -> tuple[paramiko.SSHClient, paramiko.SFTPClient]:
        client = None
        try:
            with self._lock:
                client = self._live_client()
                if self._idle:
                    return client, self._idle.pop()
            session = client.open_sftp()
            session.get_channel().settimeout(TIMEOUT_SECONDS)
            return client, session
        except (OSError, EOFError, ValueError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
            fault = _connection_fault_of(error)
            if client is not None and not isinstance(error, paramiko.ChannelException):
                self._drop(client)
        raise fault

    def _live_client(self) -> paramiko.SSHClient:
        transport = None if self._client is None else self._client.get_transport()
        if self._client is not None and transport is not None and transport.is_active():
            return self._client
        if self._client is not None:
            self._client.close()
        self._client, self._idle = None, []
        self._client = self._connect()
        return self._client

    def _give_back(self, client: paramiko.SSHClient, session: paramiko.SFTPClient, *, is_whole: bool) -> None:
        with self._lock:
            is_kept = is_whole and client is self._client
            if is_kept:
                self._idle.append(session)
        if not is_kept:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.close()

    def _drop(self, client: paramiko.SSHClient) -> None:
        with self._lock:
            if client is self._client:
                self._client, self._idle = None, []
        client.close()

    def _connect(self) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        try:
            if self._known_hosts is None:
                client.load_system_host_keys()
            else:
                client.load_host_keys(str(self._known_hosts))
            client.set_missing_host_key_policy(paramiko.RejectPolicy())
            arguments = dict(self._arguments)
            if (command := arguments.pop("proxycommand", None)) is not None:
                arguments["sock"] = paramiko.ProxyCommand(command)
            times = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), TIMEOUT_SECONDS)
            client.connect(self._host, **times, **arguments)
            _watch(client.get_transport())
            return client
        except BaseException as error:
            transport = client.get_transport()
            is_alive = transport is not None and transport.is_active()
            client.close()
            if not (is_alive and isinstance(error, paramiko.SSHException)):
                raise
            fault = _fault_of(error)
        # Nothing broke: it failed at what we are known by.
        raise _no_key() if isinstance(fault, TransientError) else fault


def _watch(transport: paramiko.Transport) -> None:
    """Let a connection whose other end is gone break: some of paramiko's waits have no end of their own."""
    transport.set_keepalive(TIMEOUT_SECONDS / 2)
    if isinstance(transport.sock, socket.socket) and hasattr(socket, "TCP_USER_TIMEOUT"):
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TIMEOUT_SECONDS * 1000))


def _arguments(location: Location, options: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """The host to connect to and paramiko's arguments: options first, then the address, then ~/.ssh/config."""
    host = location.host.strip("[]")
    told: Mapping[str, Any] = {}
    path = os.path.expanduser("~/.ssh/config")
    is_understood, port = True, 22
    if os.path.isfile(path):
        try:
            told = paramiko.SSHConfig.from_path(path).lookup(host)
            port = int(told.get("port", 22))
        except (paramiko.SSHException, OSError, ValueError):
            is_understood = False
    if not is_understood:
        raise UsageError(path, "cannot be read, or not be understood")
    if "proxyjump" in told:
        raise UnsupportedError(location.shown, "~/.ssh/config reaches it by ProxyJump", hint="write a ProxyCommand")
    chosen: dict[str, Any] = {
        "username": location.user or told.get("user"),
        "password": location.password,
        "port": location.port or port,
        "key_filename": told.get("identityfile"),
        "proxycommand": told.get("proxycommand"),
    }
    chosen |= {name: _value(location, name, value) for name, value in options.items() if name != "known_hosts"}
    return str(told.get("hostname", host)), {name: each for name, each in chosen.items() if each is not None}


def _value(location: Location, name: str, value: object) -> object:
    """An option as paramiko takes it: on a command line all of them are text."""
    if name in _SWITCHES and isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise UsageError(location.shown, f"the storage option {name} is true or false")
        return value.lower() == "true"
    if name == "port" and isinstance(value, str):
        if not value.isdecimal():
            raise UsageError(location.shown, "the storage option port is not a number")
        return int(value)
    return value


def _no_key() -> PermanentError:
    return PermanentError("found no key or password", hint="name one: key_filename, password, or an agent")


def _connection_fault_of(error: Exception) -> FaultError:
    """What it means that there is no connection: never that an object is not there, or denied."""
    if isinstance(error, FileNotFoundError | PermissionError | ValueError | paramiko.hostkeys.InvalidHostKey):
        return PermanentError(
            "a file of keys or known hosts cannot be read", hint="check key_filename, known_hosts and ~/.ssh"
        )
    return _fault_of(error)


def _fault_of(error: Exception) -> FaultError:
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
            return _no_key()
        return TransientError("the connection broke")
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return TransientError("nothing answers there")
    if isinstance(error, TimeoutError):
        return TransientError(f"did not answer in {TIMEOUT_SECONDS:.0f} s")
    if isinstance(error, socket.gaierror):
        return TransientError("its host name is not known")
    # An error without a number is a server's answer that the protocol has no number for, or paramiko's own word.
    if isinstance(error, OSError) and error.errno is None and "closed" not in str(error).lower():
        return PermanentError("the server refuses without a reason, as when its disk or a quota is full")
    return TransientError("the connection broke")
