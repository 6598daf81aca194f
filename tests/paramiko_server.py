"""An SFTP server of this machine's files in a thread, made of paramiko, for where OpenSSH's is not installed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paramiko


class _Server(paramiko.ServerInterface):  # type: ignore[misc]
    def check_auth_password(self, username: str, password: str) -> int:
        return int(paramiko.AUTH_SUCCESSFUL if password == "right" else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)


class _Handle(paramiko.SFTPHandle):  # type: ignore[misc]
    """An open file of a disk that takes so many bytes of each."""

    most_bytes: int | None = None

    def write(self, offset: int, data: bytes) -> int:
        if self.most_bytes is not None and offset + len(data) > self.most_bytes:
            return int(paramiko.SFTP_FAILURE)
        return int(super().write(offset, data))


class _Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
    """What the machine says, in SFTP's words; a plain rename fails if the name is taken."""

    def open(self, path: str, flags: int, attr: Any) -> Any:
        def work() -> Any:
            fd = os.open(path, flags, 0o644)
            handle = _Handle(flags)
            is_read = not flags & (os.O_WRONLY | os.O_RDWR)
            handle.readfile = handle.writefile = os.fdopen(fd, "rb" if is_read else "wb")
            handle.stat = lambda: paramiko.SFTPAttributes.from_stat(os.fstat(fd))
            return handle

        return _tried(work)

    def list_folder(self, path: str) -> Any:
        def work() -> Any:
            found = []
            for entry in os.scandir(path):
                found.append(paramiko.SFTPAttributes.from_stat(entry.stat(follow_symlinks=False), entry.name))
            return found

        return _tried(work)

    def stat(self, path: str) -> Any:
        return _tried(lambda: paramiko.SFTPAttributes.from_stat(os.stat(path)))

    def lstat(self, path: str) -> Any:
        return _tried(lambda: paramiko.SFTPAttributes.from_stat(os.lstat(path)))

    def remove(self, path: str) -> Any:
        return _tried(lambda: os.remove(path))

    def rename(self, oldpath: str, newpath: str) -> Any:
        def work() -> None:
            os.link(oldpath, newpath)
            os.remove(oldpath)

        return _tried(work)

    def posix_rename(self, oldpath: str, newpath: str) -> Any:
        return _tried(lambda: os.replace(oldpath, newpath))

    def mkdir(self, path: str, attr: Any) -> Any:
        return _tried(lambda: os.mkdir(path))

    def rmdir(self, path: str) -> Any:
        return _tried(lambda: os.rmdir(path))


def _tried(work: Callable[[], Any]) -> Any:
    try:
        answer = work()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno)
    return paramiko.SFTP_OK if answer is None else answer


@contextmanager
def taking_at_most(size: int) -> Iterator[None]:
    """Meanwhile no server here takes more than so many bytes of a file."""
    _Handle.most_bytes = size
    try:
        yield
    finally:
        _Handle.most_bytes = None


@contextmanager
def paramiko_server(folder: Path) -> Iterator[dict[str, object]]:
    """Serve until the end of the context: the storage options that reach it."""
    key = paramiko.RSAKey.generate(2048)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transports.append(transport)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files)
            transport.start_server(event=threading.Event(), server=_Server())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield {
            "port": port,
            "username": "somebody",
            "password": "right",
            "known_hosts": str(folder / "known_hosts"),
            "look_for_keys": False,
            "allow_agent": False,
        }
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for transport in transports:
            transport.close()
