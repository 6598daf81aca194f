"""How a relay is, for people and programs (FORMAT 15.4): its status, its metrics, and a line for each request."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dcr_cli.delta.document import FORMAT
from dcr_cli.relay.children import Children
from dcr_cli.relay.library import Library
from dcr_cli.relay.parents import Parent


@dataclass(slots=True)
class Account:
    """What a relay tells of itself."""

    name: str
    library: Library
    children: Children
    is_ending: bool = False
    started: str = field(default_factory=lambda: _now())
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def fault(self) -> str | None:
        """Why it is not well; None if it is."""
        if self.is_ending:
            return "ending"
        if self.library.spool.fault is not None:
            return "the spool's disk fails"
        return None if self.library.parents.is_answering else "no parent answers"

    def status(self) -> dict[str, Any]:
        """The status document."""
        library, news = self.library, self.library.news
        holding = library.spool.holding
        used = library.parents.first
        hint = news.hint
        return {
            "format": FORMAT,
            "requires": [],
            "relay": self.name,
            "started": self.started,
            "now": _now(),
            "history": library.parents.history,
            "head": news.head,
            "next": (
                {"version": hint.place.version, "id": hint.place.id, "state": hint.state} if hint is not None else None
            ),
            "parents": [
                {"shown": parent.shown, "is_used": parent is used, "is_answering": parent.failed_at is None}
                for parent in library.parents.all
            ],
            "spool": {"objects": holding.objects, "bytes": holding.bytes, "limit": holding.limit},
            "received_bytes": library.received_bytes,
            "sent_bytes": self.children.sent_bytes,
            "children": self.children.documents(news.head),
        }

    def metrics(self) -> str:
        """The same in numbers, as Prometheus reads them."""
        library, news = self.library, self.library.news
        holding = library.spool.holding
        present = [child for child in self.children.present() if not self.children.is_gone(child)]
        lags = [news.head - child.version for child in present if child.version is not None]
        kinds = Counter(child.kind for child in present)
        lines: list[str] = []
        for name, kind, about, samples in (
            ("head_version", "gauge", "The newest version.", [("", news.head)]),
            ("received_bytes_total", "counter", "Bodies from parents.", [("", library.received_bytes)]),
            ("sent_bytes_total", "counter", "Bodies to children.", [("", self.children.sent_bytes)]),
            ("spool_objects", "gauge", "What is kept.", [("", holding.objects)]),
            ("spool_bytes", "gauge", "Its bytes, with what is on its way.", [("", holding.bytes)]),
            ("spool_limit_bytes", "gauge", "The limit of these.", [("", holding.limit)]),
            (
                "parent_up",
                "gauge",
                "Whether a parent has answered when it was asked last.",
                [
                    (f'{{parent="{number}"}}', int(parent.failed_at is None))
                    for number, parent in enumerate(library.parents.all)
                ],
            ),
            (
                "children",
                "gauge",
                "Who asks, and is not gone.",
                [(f'{{kind="{kind}"}}', kinds[kind]) for kind in ("relay", "receiver", "other")],
            ),
            ("most_child_lag_versions", "gauge", "How far the last child is behind.", [("", max(lags, default=0))]),
            (
                "requests_total",
                "counter",
                "Requests by method and status.",
                [
                    (f'{{method="{method}",status="{status}"}}', count)
                    for (method, status), count in sorted(self.requests.items())
                ],
            ),
        ):
            lines += _metric(f"dcr_relay_{name}", kind, about, samples)
        return "".join(lines)


@dataclass(frozen=True, slots=True)
class Access:
    """One request, as the log has it: no header, no token, no query."""

    method: str
    path: str
    status: int
    sent_bytes: int
    seconds: float
    child: str
    address: str
    trace: str | None = None

    def line(self) -> str:
        """A line of JSON; with where a bug showed itself, if one did."""
        members = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "bytes": self.sent_bytes,
            "seconds": round(self.seconds, 4),
            "child": self.child,
            "address": self.address,
        }
        if self.trace is not None:
            members["trace"] = self.trace
        return json.dumps(members) + "\n"


def bug_line(trace: str) -> str:
    """A line of JSON that says where a bug showed itself that no request had."""
    return json.dumps({"time": _now(), "trace": trace}) + "\n"


def parent_line(parent: Parent) -> str:
    """A line of JSON that says what is the matter with a parent, or that nothing is any more."""
    return json.dumps({"time": _now(), "parent": parent.shown, "fault": parent.fault}) + "\n"


def _metric(name: str, kind: str, about: str, samples: Iterable[tuple[str, int]]) -> Iterable[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        yield f"{name}{labels} {value}\n"


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
