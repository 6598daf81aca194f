"""Engines by what people type, kind=URL, and reloading them one after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from dcr_cli.checkpoint.names import shown
from dcr_cli.engine.calls import Server
from dcr_cli.engine.routes import ROUTES, reload
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

    def run(self, checkpoint: str | os.PathLike[str], label: str) -> tuple[Reloaded, ...]:
        """Have each engine load the folder in its turn; HookError at the first one that fails, and those after it are
        left alone. What was done is done again when it is called again."""
        path = os.path.abspath(checkpoint)
        found = []
        for engine in self.engines:
            routes = ROUTES[engine.kind](Server(engine.what, engine.url, engine.token))
            paused, loading = reload(routes, path, label=label, seconds=self.seconds)
            found.append(Reloaded(f"{engine.kind}={engine.url}", label, paused, loading))
        return tuple(found)


def parse_reload(texts: Sequence[str], seconds: float, token: str | None = None) -> Reload | None:
    """Read engines, each kind=URL; None if there are none. UsageError for anything else."""
    if not seconds > 0:
        raise UsageError("--engine-timeout", "a time above 0 expected")
    engines = tuple(_parse(text, token) for text in texts)
    for engine in engines:
        if engines.count(engine) > 1:
            raise UsageError(f"--engine {shown(engine.url)}", "is given twice")
    return Reload(engines, seconds) if engines else None


def _parse(text: str, token: str | None) -> Engine:
    kind, _, url = text.partition("=")
    hint = "such as vllm=http://localhost:8000"
    if kind not in ROUTES:
        raise UsageError(f"--engine {shown(text)}", f"one of {', '.join(ROUTES)}, = and an address expected", hint=hint)
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise UsageError(f"--engine {kind}", "its address is none of http or https", hint=hint)
    if parts.username is not None or parts.password is not None:
        facts = "its address has credentials, which others could see"
        raise UsageError(f"--engine {kind}", facts, hint="DCR_ENGINE_TOKEN in the environment is shown to engines")
    return Engine(kind, url.rstrip("/"), token)
