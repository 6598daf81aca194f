"""What may be meant and may be a mistake, as lines for people of their own, so that nobody has to look for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from dcr_cli.report.people import Line, names


class Reformed(Protocol):
    """What has another form in a target than in its base: tensors, and files beside the shards."""

    @property
    def added(self) -> Sequence[str]: ...
    @property
    def removed(self) -> Sequence[str]: ...
    @property
    def renamed(self) -> Sequence[tuple[str, str]]: ...
    @property
    def reshaped(self) -> Sequence[str]: ...
    @property
    def files_removed(self) -> Sequence[str]: ...


def note(text: str) -> Line:
    return Line(f"note: {text}", "bold")


def form_note(result: Reformed) -> Iterator[Line]:
    """That not only values differ, if so: half of a model, published for all of it, looks like this."""
    told = [
        _tensors(len(result.reshaped), "has another shape or dtype", "have another shape or dtype"),
        _tensors(len(result.added), "is new", "are new"),
        _tensors(len(result.removed), "is gone", "are gone"),
        _tensors(len(result.renamed), "has another name", "have other names"),
    ]
    if result.files_removed:
        told.append(f"{names(result.files_removed, 3)} {'goes' if len(result.files_removed) == 1 else 'go'}")
    facts = [text for text in told if text]
    if facts:
        yield note(", ".join(facts))


def _tensors(count: int, one: str, many: str) -> str:
    return "" if not count else f"1 tensor {one}" if count == 1 else f"{count:,} tensors {many}"
