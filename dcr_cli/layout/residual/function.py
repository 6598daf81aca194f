"""Functions of a user that make canonical tensors (FORMAT 14.3): which may be called, and the call.

A layout runs no code by itself: it can only name functions that whoever reads it has named too. A function takes the
stored tensor and returns the canonical one, always the same for the same. Both are NumPy arrays in their shapes: of the
NumPy type that a dtype is, but unsigned integers with the bits of elements, as wide as these, for BF16 and all F8
dtypes, which NumPy does not know. What it gets is read-only, whole, and all of it is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.importing import import_function
from dcr_cli.layout.layout import Form
from dcr_cli.layout.residual.floats import Elements

Function = Callable[[Elements], object]
_KINDS = {"B": "bool", "U": "u", "I": "i", "F": "f", "C": "c"}
_UNKNOWN_TO_NUMPY = ("BF16", "F8_")


def allowed_function(name: str, functions: Collection[str], at: str) -> Function:
    """The function that is called `module:function`. UnsupportedError unless `functions` has it, or where its module
    fails; UsageError where there is none such."""
    if name not in functions:
        hint = f"if you trust it, --function {name}, or functions=[{name!r}], allows it; it can do whatever you can"
        raise UnsupportedError(at, f"is function {name}, which nobody has allowed to be called", hint=hint)
    function: Function = import_function(name, "function")
    return function


def call(function: Function, bits: Elements, stored: Form, canonical: Form, at: str) -> Elements:
    """The elements of the tensor that the function makes, as bits, one after the other."""
    given = bits.view(numpy_dtype(stored.dtype)).reshape(stored.shape)
    given.flags.writeable = False
    try:
        made = function(given)
    except Exception as error:
        raise UnsupportedError(at, f"its function failed: {type(error).__name__}: {error}") from error
    expected = numpy_dtype(canonical.dtype)
    if not isinstance(made, np.ndarray) or made.dtype != expected or made.shape != canonical.shape:
        found = f"{made.dtype} {list(made.shape)}" if isinstance(made, np.ndarray) else type(made).__name__
        facts = f"its function made {found}, {expected} {list(canonical.shape)} expected for {canonical.dtype}"
        raise UnsupportedError(at, facts)
    # A copy: the function may use its own array again.
    width = DTYPES[canonical.dtype].width
    return np.array(made, order="C").reshape(-1).view(f"<u{width}")


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that functions see elements of a dtype as."""
    width = DTYPES[dtype].width
    if dtype.startswith(_UNKNOWN_TO_NUMPY):
        return np.dtype(f"<u{width}")
    kind = _KINDS[dtype[0]]
    return np.dtype(kind) if kind == "bool" else np.dtype(f"<{kind}{width}")
