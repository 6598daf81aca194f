"""CUDA devices that are none: they note which stream uses which memory, and whether anybody waited for others.

What is made on them lies in the host's memory, and is done at once; what a stream was given counts as done only once
the host has waited for it. Memory that was just allocated counts as used by the stream that it was allocated in, as
torch hands out what was freed there, whatever that stream still does with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dcr_cli.device import lanes


class Stream:
    """One stream of a device."""

    def __init__(self, cuda: FakeCuda, index: int, name: str) -> None:
        self._cuda = cuda
        self.index = index
        self.name = f"{name} of cuda:{index}"

    def synchronize(self) -> None:
        self._cuda.wait(self, self._cuda.begun[self])


class Event:
    """A place in what a stream was given."""

    def __init__(self, cuda: FakeCuda, *, enable_timing: bool, blocking: bool = False) -> None:
        assert enable_timing
        self._cuda = cuda
        self._is_blocking = blocking
        self._stream: Stream | None = None
        self._number = 0

    def record(self) -> None:
        self._stream = self._cuda.current_stream()
        self._number = self._cuda.begun[self._stream]

    def synchronize(self) -> None:
        assert self._stream is not None
        if not self._is_blocking:
            self._cuda.faults.append(f"the host spins until {self._stream.name} is done")
        self._cuda.wait(self._stream, self._number)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if event._stream is None or self._cuda.done[event._stream] < event._number:
                raise RuntimeError("an event of which nobody knows that it is over")
        return 1.0


@dataclass(frozen=True, slots=True)
class _Memory:
    """Which device memory is of, and the last thing that each stream was given to do with it."""

    index: int
    users: dict[Stream, int]


class FakeCuda:
    """In the place of torch.cuda, until a test ends. `faults` are uses of memory that nobody had waited for, and waits
    that keep a processor busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, devices: int = 2) -> None:
        self.faults: list[str] = []
        self.streams: list[Stream] = []
        self.begun: Counter[Stream] = Counter()
        self.done: Counter[Stream] = Counter()
        self._defaults = [Stream(self, index, "default stream") for index in range(devices)]
        self._memory: dict[int, _Memory] = {}
        self._lock = threading.RLock()
        self._here = threading.local()
        replaced = {
            "Stream": lambda device: self.make_stream(device.index),
            "Event": lambda **options: Event(self, **options),
            "stream": self.stream,
            "device": self._device,
            "current_stream": self.current_stream,
            "current_device": lambda: self._index,
            "device_count": lambda: devices,
            "get_device_name": lambda index: f"fake {index}",
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(lanes, "_MADE", {})
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "empty", self._allocating(torch.empty))
        for name in ("copy_", "contiguous", "clone"):
            monkeypatch.setattr(torch.Tensor, name, self.using(getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch.Tensor, "cpu", self._waiting(torch.Tensor.cpu))

    # In the place of torch's

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self._device(stream.index):
            before = self._currents.get(stream.index)
            self._currents[stream.index] = stream
            try:
                yield
            finally:
                self._currents[stream.index] = before or self._defaults[stream.index]

    def current_stream(self, device: Any = None) -> Stream:
        index = self._index if device is None else _index(device)
        return self._currents.get(index, self._defaults[index])

    def make_stream(self, index: int) -> Stream:
        stream = Stream(self, index, f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    # What uses memory

    def wait(self, stream: Stream, number: int) -> None:
        """The host has waited until so much of what a stream was given is done."""
        with self._lock:
            self.done[stream] = max(self.done[stream], number)

    def take(self, tensor: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """Have a tensor's memory be a device's, the current one's or this one's, whose current stream works on it."""
        with self._lock:
            self._memory[_place(tensor)] = _Memory(self._index if index is None else index, {})
            self.use(tensor)
        return tensor

    def use(self, *tensors: Any) -> None:
        """The current stream of the device that tensors lie on, if they do, is given work on them."""
        with self._lock:
            for memory in (self._memory_of(tensor) for tensor in tensors):
                if memory is None:
                    continue
                stream = self.current_stream(memory.index)
                for user, number in memory.users.items():
                    if user is not stream and number > self.done[user]:
                        self.faults.append(f"{stream.name} uses what {user.name} may still work on")
                self.begun[stream] += 1
                memory.users[stream] = self.begun[stream]

    def using(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that uses what it is given, and whose result lies where its first argument does."""

        def used(first: Any, *others: Any, **options: Any) -> Any:
            result = function(first, *others, **options)
            self.use(first, *others)
            if (memory := self._memory_of(first)) and isinstance(result, torch.Tensor) and not self._memory_of(result):
                self.take(result, memory.index)
            return result

        return used

    def _memory_of(self, tensor: Any) -> _Memory | None:
        return self._memory.get(_place(tensor)) if isinstance(tensor, torch.Tensor) else None

    @property
    def _index(self) -> int:
        return int(getattr(self._here, "index", 0))

    @property
    def _currents(self) -> dict[int, Stream]:
        if not hasattr(self._here, "currents"):
            self._here.currents = {}
        found: dict[int, Stream] = self._here.currents
        return found

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before = self._index
        self._here.index = _index(device)
        try:
            yield
        finally:
            self._here.index = before

    def _waiting(self, cpu: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wait(tensor: torch.Tensor) -> torch.Tensor:
            self.use(tensor)
            if memory := self._memory_of(tensor):
                self.current_stream(memory.index).synchronize()
            return cpu(tensor)

        return wait

    def _allocating(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate(*shape: Any, **options: Any) -> torch.Tensor:
            options.pop("pin_memory", None)
            device = torch.device(options.get("device") or "cpu")
            if device.type != "cuda":
                return empty(*shape, **options)
            return self.take(empty(*shape, **options | {"device": "cpu"}), device.index)

        return allocate


def _index(device: Any) -> int:
    return device if isinstance(device, int) else int(torch.device(device).index)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
