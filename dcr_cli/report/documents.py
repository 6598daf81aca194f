"""Results as JSON documents.

A result is a dataclass; its fields are the document's members, under the same names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from dcr_cli.errors import DcrError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def of_result(result: DataclassInstance, *, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """List a result's fields as plain values."""
    fields = (field.name for field in dataclasses.fields(result) if field.name not in leave_out)
    return {name: _plain(getattr(result, name)) for name in fields}


def of_error(name: str, message: str, hint: str | None, *, is_retryable: bool) -> dict[str, Any]:
    """What programs are told of an error, whose class has this name."""
    return {"class": name, "message": message, "hint": hint, "retryable": is_retryable}


def to_text(document: Mapping[str, Any]) -> str:
    """Write a document as one line of ASCII: every locale and every log can hold it."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    from dcr_cli.checkpoint.digest import State, blake3_text

    if isinstance(value, DcrError):
        return of_error(value.class_name, str(value), value.hint, is_retryable=value.retryable)
    if isinstance(value, State):
        return {"content": blake3_text(value.content), "files": blake3_text(value.files)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member) for member in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.hex() if isinstance(value, bytes) else value
