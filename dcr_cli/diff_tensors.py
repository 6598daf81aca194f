"""Compares tensors in memory, on whatever device they lie, and writes the delta.

How they are compared is publisher/'s matter, as for versions that are published from memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcr_cli.checkpoint.digest import State
from dcr_cli.checkpoint.names import listed, shown
from dcr_cli.delta.choice import ALLOWED
from dcr_cli.delta.output import DeltaOutput
from dcr_cli.device.wish import wish_of
from dcr_cli.errors import UnsupportedError, UsageError
from dcr_cli.publisher.given import tensor_of
from dcr_cli.publisher.given_base import GivenBase
from dcr_cli.publisher.making import Making
from dcr_cli.stages import Account
from dcr_cli.work import threads

__all__ = ["TensorsDiffResult", "diff_tensors"]


@dataclass(frozen=True, slots=True)
class TensorsDiffResult:
    """What tensors differ in. Sizes are in bytes; `delta_bytes` is what the whole delta folder takes.

    `output` is where it was written. `device` is where tensors were compared, `cpu` or `cuda:N` or several of these,
    and `account` how.
    """

    tensors: int
    elements: int
    changed_tensors: int
    changed_elements: int
    dense_bytes: int
    delta_bytes: int
    base: State
    target: State
    output: str | None
    device: str
    account: Account = field(compare=False, repr=False)

    @property
    def same(self) -> bool:
        """Whether all tensors are what they were."""
        return self.base == self.target


def diff_tensors(
    base: Mapping[str, Any],
    target: Mapping[str, Any],
    output: str | os.PathLike[str] | None = None,
    *,
    encoding: str = "auto",
    jobs: int | None = None,
    device: str = "auto",
) -> TensorsDiffResult:
    """Compare tensors, by name, with what they were; with `output`, write the delta there, as `diff` does.

    Both have the same names, and by each a torch tensor or NumPy array of one dtype and shape, in any memory. Long ones
    that lie on a CUDA device are compared there, if Triton is installed: of what is on that device on both sides only
    changes leave it, and whole blocks of 512 KiB of which more than an eighth changed. Memory that this took there
    stays with torch, for what comes next; torch.cuda.empty_cache() gives it back. `device` can be `cpu`, or a device,
    `cuda` or `cuda:N`, for those that lie in the host's memory. None may change meanwhile.

    The delta is the one between checkpoints of one shard each, with the tensors in canonical order: any receiver whose
    tensors are the base's, in whichever shards, comes to the target's, and keeps its other files. Raises UsageError
    (other names, no tensors), UnsupportedError (another dtype or shape, a device that cannot be had), ConflictError,
    LocalError.
    """
    if encoding not in ALLOWED:
        raise UsageError("encoding", f"one of {', '.join(ALLOWED)} expected, found {encoding!r}")
    wish, workers = wish_of(device), threads(jobs)
    odd = sorted(base.keys() ^ target.keys())
    if odd:
        raise UsageError("target", f"has not the names of the base: {listed(odd)}")
    old = GivenBase(base)
    for tensor in old.tensors:
        found = tensor_of(tensor.name, target[tensor.name])
        if found != tensor:
            facts = f"was {_form(tensor.dtype.name, tensor.shape)} and is {_form(found.dtype.name, found.shape)}"
            raise UnsupportedError(f"tensor {shown(tensor.name)}", facts, hint="dcr diff compares such checkpoints")
    with DeltaOutput(output, outside=()) as sink:
        making = Making(old, sink, ALLOWED[encoding], workers, wish)
        try:
            for tensor in old.tensors:
                making.add(tensor.name, target[tensor.name])
            made = making.finish(None)
        finally:
            making.close()
    account = making.account()
    return TensorsDiffResult(
        tensors=len(old.tensors),
        elements=sum(tensor.elements for tensor in old.tensors),
        changed_tensors=made.changed_tensors,
        changed_elements=made.changed_elements,
        dense_bytes=sum(tensor.bytes for tensor in old.tensors),
        delta_bytes=sink.bytes,
        base=made.base,
        target=made.target,
        output=sink.name,
        device=account.device,
        account=account,
    )


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape {list(shape)}"
