"""Tensors as a trainer has them, NumPy arrays, torch tensors or plain bytes, as the bits of a checkpoint's tensor.

torch is never imported here: whoever has one of its tensors has imported it. Comparing is not its business.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError, UsageError

Bytes = NDArray[np.uint8]

PUSH_INSTEAD = "dcr push publishes a checkpoint in which tensors are new, gone or of another form"
# What NumPy, packages beside it, and torch call the dtypes of a checkpoint.
_DTYPE_OF = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def bytes_of(given: Any, tensor: Tensor) -> Bytes:
    """The bytes of what is given for `tensor`, without a copy where it lies in one piece in this machine's memory.

    An array of its dtype has its shape, or one dimension; one of unsigned integers as wide as its elements is their
    bits, and so is whatever holds bytes. UnsupportedError if it has another dtype or shape, UsageError if it is no
    tensor at all.
    """
    if _is_torch(given):
        return _torch_bytes(given, tensor)
    try:
        array = np.asarray(given) if isinstance(given, np.ndarray | np.generic) else np.asarray(memoryview(given))
    except (TypeError, ValueError) as error:
        facts = f"a NumPy array, a torch tensor or bytes expected, found {type(given).__name__}"
        raise UsageError(f"tensor {shown(tensor.name)}", facts) from error
    if not array.dtype.isnative and array.dtype.itemsize > 1:
        facts = f"is of {array.dtype.str}, whose bytes are not in the order of this machine"
        raise UnsupportedError(f"tensor {shown(tensor.name)}", facts)
    _check(tensor, array.dtype.name, array.shape)
    return _view(array)


def bytes_there(given: Any, tensor: Tensor) -> tuple[int, Any] | None:
    """If what is given for `tensor` lies on a CUDA device: its number, and the bytes as a torch tensor there, without a
    copy where they lie in one piece, at a multiple of the elements' width, once what the caller had the device begin
    before is done. None for anything else; errors as `bytes_of`, LocalError if the device fails.
    """
    index = _device_of(given) if _is_torch(given) and given.numel() else None
    if index is None:
        return None
    data = _plain_torch(given, tensor).view(sys.modules["torch"].uint8)
    if data.storage_offset() % tensor.dtype.width or data.data_ptr() % tensor.dtype.width:
        data = data.clone()
    # Whoever reads it does so in another stream; the copy, if there is one, was made in this one.
    from dcr_cli.device.lanes import settle

    settle(f"cuda:{index}")
    return index, data


def tensor_of(name: str, given: Any) -> Tensor:
    """What is given as a tensor of a checkpoint that nothing is known of: its own dtype and shape.

    UnsupportedError if no checkpoint has its dtype, UsageError if it is no tensor at all.
    """
    what = f"tensor {shown(name)}"
    if not _is_torch(given) and not isinstance(given, np.ndarray):
        raise UsageError(what, f"a NumPy array or a torch tensor expected, found {type(given).__name__}")
    dtype = _DTYPE_OF.get(str(given.dtype).rpartition(".")[2])
    if dtype is None:
        raise UnsupportedError(what, f"no checkpoint has elements of {given.dtype}")
    shape = tuple(given.shape)
    if dtype == "F4":
        # Two of them are one element of its own.
        shape = (*shape[:-1], 2 * shape[-1])
    return Tensor(name, DTYPES[dtype], shape, 0, 0, int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].bits // 8)


def writable_bytes(given: Any, tensor: Tensor) -> Bytes:
    """The bytes of the array that holds `tensor` in host memory, to be read and changed where they are.

    UsageError if they cannot be changed there.
    """
    data = bytes_of(given, tensor)
    if not isinstance(given, np.ndarray) or not given.flags.c_contiguous or not given.flags.writeable:
        facts = "a NumPy array that lies in one piece and can be written expected"
        raise UsageError(f"baseline tensor {shown(tensor.name)}", facts)
    return data


def _is_torch(given: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(given).__mro__)


def _device_of(given: Any) -> int | None:
    """The number of the CUDA device that a torch tensor lies on."""
    return given.device.index if given.is_cuda else None


def _torch_bytes(given: Any, tensor: Tensor) -> Bytes:
    plain = _plain_torch(given, tensor).cpu()
    # A tensor without elements cannot be seen as bytes.
    return _view(plain.view(sys.modules["torch"].uint8).numpy()) if plain.numel() else np.empty(0, np.uint8)


def _plain_torch(given: Any, tensor: Tensor) -> Any:
    """What is given as one row, where it lies."""
    if hasattr(given, "full_tensor"):
        facts = "is a distributed tensor, of which each process has a part"
        raise UsageError(f"tensor {shown(tensor.name)}", facts, hint="give its full_tensor()")
    _check(tensor, str(given.dtype).rpartition(".")[2], tuple(given.shape))
    return given.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _check(tensor: Tensor, dtype: str, shape: Sequence[int]) -> None:
    what = f"tensor {shown(tensor.name)}"
    elements = int(np.prod(shape, dtype=np.int64)) if shape else 1
    name = _DTYPE_OF.get(dtype)
    if name != tensor.dtype.name:
        # Bits, whose shape says nothing.
        width = next((width for width, bits in _BITS.items() if bits == dtype), None)
        if width not in (1, tensor.dtype.width):
            facts = f"is of {tensor.dtype.name} in the version before, {name or dtype} was given"
            raise UnsupportedError(what, facts, hint=PUSH_INSTEAD)
        if elements * width != tensor.bytes:
            facts = f"has {tensor.bytes} bytes in the version before, {elements * width} were given"
            raise UnsupportedError(what, facts, hint=PUSH_INSTEAD)
        return
    is_flat = len(shape) == 1 and elements == tensor.elements
    if tuple(shape) != tensor.shape and not is_flat and not (name == "F4" and 2 * elements == _count(tensor)):
        facts = f"has shape {list(tensor.shape)} in the version before, {list(shape)} was given"
        raise UnsupportedError(what, facts, hint=PUSH_INSTEAD)


def _count(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))


def _view(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
