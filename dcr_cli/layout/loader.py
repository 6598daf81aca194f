"""A loader: a function of somebody's program that loads a checkpoint and returns what it holds then.

Its name comes from the command line and from nowhere else: no file says which code is run. What it returns is read here
as bits; what they tell is probe.py's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import safe_path, shown
from dcr_cli.errors import DcrError, UnsupportedError, UsageError
from dcr_cli.layout.importing import import_function
from dcr_cli.layout.layout import Form

# The only file of a loader that does not say in which files its tensors lie.
ONLY_FILE = "model.safetensors"
# The dtypes of safetensors, as NumPy, or what adds to it, and PyTorch call them.
DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
# The unsigned integers as which NumPy has the bits of dtypes that it does not know.
_BITS = {
    "U16": ("BF16",),
    "U8": ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
}


class Loader(NamedTuple):
    """A function that is given the path of a checkpoint, and what it is called in messages.

    It returns the tensors of the only file by name, of NumPy or PyTorch; or, by path, those of several files. Unsigned
    integers of NumPy may be the bits of a dtype that it has not.
    """

    name: str
    function: Callable[[str], Mapping[str, Any]]

    def load(self, checkpoint: str, dtypes: Collection[str] = ()) -> Iterator[tuple[str, str, LoadedTensor]]:
        """Load a checkpoint, whose tensors have `dtypes`: the path of the file, the name and the bits of each tensor,
        one at a time.

        UnsupportedError if the function fails, or returns anything else than it should.
        """
        meant = _meant_by(dtypes)
        try:
            returned = self.function(checkpoint)
        except DcrError:
            raise
        except Exception as error:
            facts = f"failed: {type(error).__name__}: {error}"
            raise UnsupportedError(self.what, facts, hint="try it alone, on a checkpoint") from error
        if not isinstance(returned, Mapping):
            raise UnsupportedError(self.what, f"returned {_kind(returned)}, not tensors by name")
        are_files = bool(returned) and all(isinstance(each, Mapping) for each in returned.values())
        for path, tensors in (returned if are_files else {ONLY_FILE: returned}).items():
            safe_path(str(path), self.what)
            for name, value in tensors.items():
                yield str(path), str(name), self._read(str(name), value, meant)

    @property
    def what(self) -> str:
        return f"loader {self.name}"

    def _read(self, name: str, value: Any, meant: Mapping[str, str]) -> LoadedTensor:
        tensor = _read_numpy(value, meant) if isinstance(value, np.ndarray | np.generic) else _read_torch(value)
        if tensor is None:
            facts = f"tensor {shown(name)} is {_kind(value)}, not a tensor of a dtype of safetensors"
            raise UnsupportedError(self.what, facts)
        return tensor


class LoadedTensor(NamedTuple):
    """A tensor that a loader has returned: its form, and its elements as bytes, in order."""

    form: Form
    data: NDArray[np.uint8]


def find_loader(name: str) -> Loader:
    """Import the function that `module:function` names. UsageError if it is not of that form, or if there is none,
    UnsupportedError if its module fails."""
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        facts = f"{shown(name)} is not of the form module:function"
        raise UsageError("loader", facts, hint="such as package.module:load, which loads a folder's checkpoint")
    return Loader(name, import_function(name, "loader"))


def _meant_by(dtypes: Collection[str]) -> dict[str, str]:
    """Which dtypes NumPy's unsigned integers stand for: that one of `dtypes` that NumPy has not, if no other one has
    its width, the integers themselves included."""
    found = {}
    for integers, others in _BITS.items():
        there = [dtype for dtype in (integers, *others) if dtype in dtypes]
        if len(there) == 1:
            found[integers] = there[0]
    return found


def _read_numpy(value: Any, meant: Mapping[str, str]) -> LoadedTensor | None:
    dtype = DTYPE_NAMES.get(value.dtype.name)
    if dtype is None:
        return None
    dtype = meant.get(dtype, dtype)
    data = np.ascontiguousarray(value)
    if data.dtype.byteorder == ">" or (data.dtype.byteorder == "=" and sys.byteorder == "big"):
        data = data.astype(data.dtype.newbyteorder("<"))
    return LoadedTensor(Form(dtype, value.shape), data.reshape(-1).view(np.uint8))


def _read_torch(value: Any) -> LoadedTensor | None:
    if not _is_torch(value) or hasattr(value, "full_tensor") or value.is_meta or value.is_sparse:
        return None
    dtype = DTYPE_NAMES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        return None
    # Whoever has one of its tensors has imported it.
    torch = sys.modules["torch"]
    shape = tuple(value.shape)
    if DTYPES[dtype].is_packed:
        # PyTorch counts pairs.
        shape = (*shape[:-1], 2 * shape[-1])
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A tensor without elements cannot be seen as bytes.
    return LoadedTensor(Form(dtype, shape), plain.view(torch.uint8).numpy() if len(plain) else np.empty(0, np.uint8))


def _is_torch(value: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(value).__mro__)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
