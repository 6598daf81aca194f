"""What a module holds: its parameters and buffers, the stretches of storages that they lie in, and putting all of it
back as it was.

What it reaches besides is outside.py's matter, what the elements are placement.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.layout import Form
from dcr_cli.layout.loader import DTYPE_NAMES
from dcr_cli.live.bits import Bits, bits_of
from dcr_cli.live.outside import Outside, is_same_place, known_of, place_of, span_of
from dcr_cli.live.packed import check_nothing_packed

# So many elements are compared, and put back, at once.
_AT_ONCE = 1 << 22


class Stretch(NamedTuple):
    """Consecutive elements of a storage that tensors of a module lie in.

    It goes by the first of their `names`. `form` is that of a row.
    """

    form: Form
    names: tuple[str, ...]
    bits: Bits


class View(NamedTuple):
    """How a tensor of a module lies in a stretch: where its first element is, its shape and strides, in elements."""

    stretch: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Registered(NamedTuple):
    """A parameter or buffer of a module, and what it looks at."""

    name: str
    tensor: Any
    data: Any


@dataclass(frozen=True, slots=True)
class Memory:
    """The parameters and buffers of a module, as they are when it is made; `stretches` by name.

    Of the module's tensors it holds those that lie in its stretches.
    """

    what: str
    stretches: Mapping[str, Stretch]
    _module: Any
    _places: Mapping[str, tuple[Any, ...]]

    @property
    def forms(self) -> dict[str, Form]:
        return {name: stretch.form for name, stretch in self.stretches.items()}

    def only(self, stretches: Collection[str]) -> Memory:
        """What is left if nothing is held but these stretches."""
        return replace(self, stretches={name: each for name, each in self.stretches.items() if name in stretches})

    @property
    def views(self) -> dict[str, View]:
        """How every tensor that has elements lies in its stretch."""
        found = {each.name: each.data for each in _walk(self._module)}
        return {
            name: View(
                stretch,
                (found[name].data_ptr() - min(found[other].data_ptr() for other in each.names))
                // found[name].element_size(),
                tuple(found[name].shape),
                tuple(found[name].stride()),
            )
            for stretch, each in self.stretches.items()
            for name in each.names
        }

    def moved(self, names: Collection[str] | None = None) -> str | None:
        """The name of a tensor, of `names` or of all, that does not lie any more where it lay, or that was not there;
        None if there is none."""
        now = {each.name: place_of(each.tensor) for each in _walk(self._module)}
        for name in sorted({*now, *self._places} if names is None else names):
            if name not in now or now[name] != self._places.get(name):
                return name
        return None

    def check_nothing_packed(self) -> None:
        """Raise UnsupportedError if the module has, outside its parameters and buffers, a copy of one of them."""
        check_nothing_packed(self._module, [(each.name, each.data) for each in _walk(self._module)])

    @contextmanager
    def put_back(self) -> Iterator[Outside]:
        """Whatever becomes of the module inside, it has its tensors, at their addresses, with their bits, after it,
        its parts and attributes, and all tensors and containers that it reaches. The copies are gone then."""
        copies = {name: each.bits.read(0, each.form.elements) for name, each in self.stretches.items()}
        registered = tuple(_walk(self._module))
        outside = Outside(self._module, known_of(each.data for each in registered))
        try:
            yield outside
        finally:
            outside.put_back()
            for each in registered:
                if not is_same_place(each.tensor, each.data):
                    each.tensor.data = each.data
            for name, stretch in self.stretches.items():
                copy = copies[name]
                for first in range(0, len(copy), _AT_ONCE):
                    stretch.bits.write(first, copy[first : first + _AT_ONCE])


def memory_of(module: Any) -> Memory:
    """Find what a module holds. UnsupportedError for what is not plain elements in a storage."""
    what = f"module {type(module).__name__}"
    registered = tuple(_walk(module))
    spans: dict[tuple[str, int], list[tuple[int, int, _Registered]]] = {}
    for each in registered:
        _check_plain(what, each)
        span = span_of(each.data)
        if span is None:
            continue
        spans.setdefault(span[:2], []).append((span.begin, span.end, each))
    stretches = dict(sorted(_stretch(what, group) for members in spans.values() for group in _joined(members)))
    return Memory(what, stretches, module, {each.name: place_of(each.data) for each in registered})


def _walk(module: Any) -> Iterator[_Registered]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for registry in (owner._parameters, owner._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    yield _Registered(f"{prefix}.{key}" if prefix else key, tensor, tensor.data)


def _check_plain(what: str, each: _Registered) -> None:
    tensor = each.data
    is_plain = not (tensor.is_meta or tensor.is_sparse or tensor.is_quantized or hasattr(tensor, "full_tensor"))
    if not is_plain or str(tensor.layout) != "torch.strided" or hasattr(tensor, "__tensor_flatten__"):
        facts = f"tensor {shown(each.name)} is a {type(tensor).__name__} on {tensor.device}, no plain elements"
        raise UnsupportedError(what, facts, hint="only what lies in a storage of its own elements can be patched")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_NAMES:
        raise UnsupportedError(what, f"tensor {shown(each.name)} is of {tensor.dtype}, which safetensors has not")


def _joined(spans: list[tuple[int, int, _Registered]]) -> Iterator[list[tuple[int, int, _Registered]]]:
    """Spans of one storage that share bytes belong together."""
    group: list[tuple[int, int, _Registered]] = []
    reach = 0
    for span in sorted(spans, key=lambda span: (span[0], span[1])):
        if group and span[0] >= reach:
            yield group
            group = []
        reach = max(reach, span[1]) if group else span[1]
        group.append(span)
    yield group


def _stretch(what: str, group: list[tuple[int, int, _Registered]]) -> tuple[str, Stretch]:
    names = tuple(sorted(each.name for _, _, each in group))
    name = names[0]
    dtypes = sorted({str(each.data.dtype).removeprefix("torch.") for _, _, each in group})
    if len(dtypes) > 1:
        facts = f"tensor {shown(name)} shares bytes with one of another dtype: {', '.join(dtypes)}"
        raise UnsupportedError(what, facts, hint="one of the two has to have memory of its own")
    dtype = DTYPES[DTYPE_NAMES[dtypes[0]]]
    begin, end = group[0][0], max(end for _, end, _ in group)
    storage = group[0][2].data.untyped_storage()
    shape = ((end - begin) * 8 // dtype.bits,)
    bits = bits_of(storage, begin, end - begin, dtype.width)
    return name, Stretch(Form(dtype.name, shape), names, bits)
