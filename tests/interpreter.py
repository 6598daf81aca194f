"""Triton's kernels without a device: its interpreter, which runs them in NumPy, one program after the other.

Triton reads whether it interprets when it is imported, for its own functions as well; so this has to be imported before
it, and where a CUDA device is, nothing is interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = find_spec("triton") is not None

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


class _Nothing:
    """What has been patched for good needs no restoring."""

    def restore(self) -> None:
        pass


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the interpreter two things that take most of its time: patching its language anew at every call of every
    function, and looking for overflow, which the kernels mean to have."""
    import triton.runtime.interpreter as interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    patch, patched = interpreter._patch_lang, dict[int, Any]()

    def patch_once(function: Callable[..., Any]) -> _Nothing:
        names = function.__globals__
        if id(names) not in patched:
            patched[id(names)] = patch(function)
        return _Nothing()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
