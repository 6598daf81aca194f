"""A device's memory and streams: three lanes, for bytes on their way there, for kernels, and for what comes back.

Several threads use them at once: while one waits for its copy, another computes, a third takes its results home. Each
waits until its own step is done, so that no step begins before what it needs is there, and memory is free when its last
user has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Any, TypeVar

import torch

from dcr_cli.errors import LocalError, UnsupportedError

Result = TypeVar("Result")
# It has no types for its streams and events.
_UNTYPED: Any = torch.cuda
_INSTEAD = "--device cpu gives the same bytes"
# Torch has 32 streams for all who want one; whoever asks for a device again is given the same.
_MADE: dict[int, Lanes] = {}
_MAKING = threading.Lock()


class Lane:
    """Does work of one kind, one after the other, in a stream of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._lock = threading.Lock()
        with _failing(name), torch.cuda.device(device):
            self._stream: Any = _UNTYPED.Stream(device)

    def run(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Do it, and wait until it is done: what it returns, and the seconds that it took itself.

        LocalError if the device fails, or its memory does not suffice.
        """
        with _failing(self._name), torch.cuda.device(self._device):
            # Whoever waits for one that does not block keeps a processor busy.
            start, end = (_UNTYPED.Event(enable_timing=True, blocking=True) for _ in range(2))
            with self._lock, torch.cuda.stream(self._stream):
                start.record()
                result = work()
                end.record()
            end.synchronize()
            return result, float(start.elapsed_time(end)) / 1000


@dataclass(frozen=True, slots=True)
class Lanes:
    """A device: its name, as `--device` has it, its model, and its lanes."""

    name: str
    model: str
    device: torch.device
    up: Lane
    compute: Lane
    back: Lane

    def host_memory(self, count_bytes: int) -> torch.Tensor:
        """Memory of the host that copies to and from the device do not have to stage."""
        with _failing(self.name):
            return torch.empty(count_bytes, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, count_bytes: int) -> torch.Tensor:
        """Memory of the device, which is written on its way there.

        It is allocated in that lane, because torch hands out what was freed in a stream while that still works on it.
        """
        with _failing(self.name):
            return self.up.run(lambda: torch.empty(count_bytes, dtype=torch.uint8, device=self.device))[0]


def cuda_lanes(index: int, what: str) -> Lanes:
    """CUDA device number `index`, the same for all who ask; UnsupportedError about `what` if there is none."""
    with _MAKING:
        if index not in _MADE:
            _MADE[index] = _make(index, what)
        return _MADE[index]


def _make(index: int, what: str) -> Lanes:
    if torch.version.cuda is None:
        facts = f"torch {torch.__version__} is built without CUDA"
        raise UnsupportedError(what, facts, hint=f"install a build of torch with CUDA; {_INSTEAD}")
    try:
        count = torch.cuda.device_count()
        if not count:
            raise UnsupportedError(
                what, "torch finds no CUDA device", hint=f"nvidia-smi shows what is there; {_INSTEAD}"
            )
        if index >= count:
            facts = f"there {'is one CUDA device' if count == 1 else f'are {count} CUDA devices'}, numbered from 0"
            raise UnsupportedError(what, facts, hint=_INSTEAD)
        model = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        raise UnsupportedError(what, f"CUDA does not start: {_first_line(error)}", hint=_INSTEAD) from error
    name, device = f"cuda:{index}", torch.device("cuda", index)
    up, compute, back = (Lane(name, device) for _ in range(3))
    return Lanes(name, model, device, up, compute, back)


def settle(name: str) -> None:
    """Wait for what the caller has had a CUDA device begin, in the stream that is his, before another reads of it."""
    with _failing(name):
        torch.cuda.current_stream(name).synchronize()


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """What a device says when it fails, as the error that it is."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise LocalError(name, "out of memory", hint="free some of it, or give --device cpu") from error
    except (RuntimeError, SubprocessError) as error:
        raise LocalError(name, f"failed: {_first_line(error)}", hint=_INSTEAD) from error
    except Exception as error:
        # Triton's own are no RuntimeErrors, and this module does not import it.
        if not any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__):
            raise
        raise LocalError(name, f"failed: {_first_line(error)}", hint=_INSTEAD) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
