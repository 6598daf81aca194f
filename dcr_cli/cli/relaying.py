"""The command of who hands a remote on: relay."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dcr_cli import process
from dcr_cli.cli.options import LimitRate, StorageOption, bytes_per_second_of, command, path_of, storage_options_of
from dcr_cli.cli.quantities import seconds_of, size_of
from dcr_cli.cli.session import Session
from dcr_cli.errors import LocalError, UnsupportedError, UsageError, hint_of, install_hint

_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]*)):([0-9]{1,5})")
_MOST_TOKEN_BYTES = 16 << 10
_TOKEN = re.compile(r"[!-~]{16,512}")


@command
def relay(
    session: Session,
    parents: Annotated[
        list[str],
        typer.Argument(metavar="UPSTREAM...", help="What to hand on: a remote or a relay, several in their order."),
    ],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen: 127.0.0.1:8080, or :8080 for all.")
    ],
    spool: Annotated[str, typer.Option("--spool", metavar="DIR", help="The folder for what is kept.")],
    spool_limit: Annotated[str, typer.Option("--spool-limit", metavar="SIZE", help="Keep at most so much.")] = "64GiB",
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What it is called in status. [default: host and port]")
    ] = None,
    read_token_file: Annotated[
        str | None,
        typer.Option("--read-token-file", metavar="FILE", help="Who reads shows this token; or DCR_READ_TOKEN."),
    ] = None,
    write_token_file: Annotated[
        str | None,
        typer.Option("--write-token-file", metavar="FILE", help="Who publishes shows this one; or DCR_WRITE_TOKEN."),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="Serve HTTPS with this certificate chain (PEM).")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key. [default: in the same file]")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this host although anybody can read.")
    ] = False,
    most_connections: Annotated[
        int, typer.Option("--max-connections", metavar="N", help="Serve no more connections at a time.")
    ] = 4096,
    drain: Annotated[
        str, typer.Option("--drain", metavar="DURATION", help="How long what is being sent may take at the end.")
    ] = "30s",
    storage_option: StorageOption = None,
    limit_rate: LimitRate = None,
) -> int:
    """Hand a remote on to many who are near, as a web server. Each object is fetched once, and forwarded meanwhile."""
    host, port = _listen_of(listen)
    read_token = _token_of(read_token_file, os.environ, "read")
    write_token = _token_of(write_token_file, os.environ, "write")
    if read_token is None and not _is_loopback(host) and not insecure:
        facts = f"{listen} can be reached from other hosts, and reading needs no token"
        hint = "--read-token-file FILE, best with --tls-cert; or --insecure, where anybody may read"
        raise UsageError("--listen", facts, hint=hint)
    if most_connections < 1:
        raise UsageError("--max-connections", f"one or more expected, found {most_connections}")
    if tls_key is not None and tls_cert is None:
        raise UsageError("--tls-key", "needs --tls-cert", hint="dcr relay --help")
    try:
        from dcr_cli.relay.relay import RelayResult, Setting, relay as run
        from dcr_cli.relay.rights import Rights
        from dcr_cli.relay.serving import Address
        from dcr_cli.report import relays
    except ImportError as error:
        facts = f"needs {error.name}, which is not installed"
        raise UnsupportedError("relay", facts, hint=install_hint("relay")) from error

    from dcr_cli.remote.keys import is_receiver

    own = name if name is not None else _default_name(port)
    if not is_receiver(own):
        raise UsageError(
            "--name", "is no name: letters, digits, _ . and - are, at most 128 of them, the first no . or -"
        )
    setting = Setting(
        name=own,
        address=Address(
            host,
            port,
            most_connections,
            path_of(tls_cert, "--tls-cert") if tls_cert is not None else None,
            path_of(tls_key, "--tls-key") if tls_key is not None else None,
        ),
        spool=path_of(spool, "--spool"),
        spool_limit=size_of(spool_limit, "--spool-limit"),
        rights=Rights(read_token, write_token, is_open=_is_loopback(host) and not (read_token or write_token)),
        drain_seconds=seconds_of(drain, "--drain"),
    )

    def started(result: RelayResult) -> None:
        session.finish(result, lambda: relays.started_lines(result))

    run(
        parents,
        setting,
        started=started,
        log=None if session.options.quiet else process.complain,
        storage_options=storage_options_of(storage_option),
        limit_bytes_per_second=bytes_per_second_of(limit_rate),
    )
    return 0


def _listen_of(text: str) -> tuple[str, int]:
    """Host and port of --listen; an empty host stands for all addresses."""
    match = _LISTEN.fullmatch(text)
    if match is not None and int(match[3]) > 65_535:
        facts = f"a port is at most 65535, found {match[3]}"
        raise UsageError("--listen", facts, hint="0 has the system choose one")
    if match is None:
        raise UsageError("--listen", "HOST:PORT expected", hint="such as 127.0.0.1:8080, [::1]:8080 or :8080")
    return match[1] or match[2], int(match[3])


def _is_loopback(host: str) -> bool:
    # Only this command needs it.
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _default_name(port: int) -> str:
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", os.uname().nodename).lstrip(".-") or "relay"
    return f"{plain[:100]}-{port}"


def _token_of(path: str | None, environment: Mapping[str, str], right: str) -> str | None:
    """The token of a right: the first line of a file, or what the environment says. No error repeats any of it."""
    variable, option = f"DCR_{right.upper()}_TOKEN", f"--{right}-token-file"
    if path is not None:
        text = _first_line(path_of(path, option))
    elif environment.get(variable):
        text, option = environment[variable], variable
    else:
        return None
    if _TOKEN.fullmatch(text) is None:
        hint = f"one is made by: openssl rand -hex 32 >FILE; then {option} FILE" if path is not None else None
        raise UsageError(option, "no token: 16 to 512 printable characters of ASCII without spaces are", hint=hint)
    return text


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_TOKEN_BYTES)
    except OSError as error:
        raise LocalError(str(path), f"cannot be read: {error.strerror}", hint=hint_of(error)) from error
    return data.split(b"\n", 1)[0].decode("ascii", "replace").strip()
