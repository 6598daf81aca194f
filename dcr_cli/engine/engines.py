"""Engines by what people type, kind=URL, and reloading them one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dcr_cli.arguments import check_token, is_visible
from dcr_cli.checkpoint.names import shown
from dcr_cli.engine.calls import Server
from dcr_cli.engine.routes import ROUTES, Load, reload
from dcr_cli.errors import UsageError

DEFAULT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its kind, the address of its server, and the token that this wants to see, if it does."""

    kind: str
    url: str
    token: str | None = field(default=None, repr=False)

    @property
    def what(self) -> str:
        return f"engine {self.kind}={self.url}"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """An engine that serves from the folder: what it says that its weights are, for how long it was paused, and how
    much of that loading took."""

    engine: str
    label: str
    pause_seconds: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Reload:
    """Engines to be reloaded; each may take so long to load."""

    engines: tuple[Engine, ...]
    seconds: float = DEFAULT_SECONDS

    def run(self, checkpoint: str | os.PathLike[str], label: str, check: Callable[[], None]) -> tuple[Reloaded, ...]:
        """Have each engine load the folder in its turn, and take the label if `check` then finds that the folder is
        what it was; HookError at the first one that fails, or what `check` raises, and those after it are left alone.
        What was done is done again when it is called again."""
        path = os.path.abspath(checkpoint)
        found = []
        for engine in self.engines:
            routes = ROUTES[engine.kind](Server(engine.what, engine.url, engine.token))
            paused, loading = reload(routes, Load(path, label, self.seconds), check)
            found.append(Reloaded(f"{engine.kind}={engine.url}", label, paused, loading))
        return tuple(found)


def parse_reload(texts: Sequence[str], seconds: float, token: str | None = None) -> Reload | None:
    """Read engines, each kind=URL; None if there are none. UsageError for anything else, and for a token that cannot be
    shown to them."""
    if not seconds > 0:
        raise UsageError("--engine-timeout", "a time above 0 expected")
    if not texts:
        return None
    if token is not None:
        check_token(token, "DCR_ENGINE_TOKEN")
    engines = tuple(_parse(text, token) for text in texts)
    for engine in engines:
        if engines.count(engine) > 1:
            raise UsageError(f"--engine {shown(engine.url)}", "is given twice")
    return Reload(engines, seconds)


def _parse(text: str, token: str | None) -> Engine:
    """Read an engine. No error repeats its address: whatever is wrong with that, it may have a password in it."""
    kind, _, url = text.partition("=")
    hint = "such as vllm=http://localhost:8000"
    if kind not in ROUTES:
        raise UsageError("--engine", f"one of {', '.join(ROUTES)}, = and an address expected", hint=hint)
    if not _is_address(url):
        raise UsageError(f"--engine {kind}", "its address is none of http or https", hint=hint)
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        facts = "its address has credentials, which others could see"
        raise UsageError(f"--engine {kind}", facts, hint="DCR_ENGINE_TOKEN in the environment is shown to engines")
    return Engine(kind, url.rstrip("/"), token)


def _is_address(url: str) -> bool:
    """Whether routes can be appended to it, and a request has it as it is."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        # Empty labels, and ones too long, have no such form.
        host.encode("idna")
    except ValueError:
        return False
    is_whole = parts.scheme in ("http", "https") and bool(host) and port != 0
    return is_whole and is_visible(url) and "?" not in url and "#" not in url
