"""Results as JSON documents.

A result is a dataclass; its fields are the document's members, under the same names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def of_result(result: DataclassInstance, *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """List a result's fields as plain values."""
    from dcr_cli.checkpoint.digest import State, blake3_text

    document = {}
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, State):
            document[field.name] = {"content": blake3_text(value.content), "files": blake3_text(value.files)}
        elif field.name not in leave_out:
            document[field.name] = _plain(value)
    return document


def to_text(document: Mapping[str, Any]) -> str:
    """Write a document as one line of ASCII: every locale and every log can hold it."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member) for member in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value
