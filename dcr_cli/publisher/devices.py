"""The devices that tensors in memory are compared on: those that they lie on, or one that is asked for.

What is given as a tensor is given.py's matter; comparing it is comparing.py's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dcr_cli.checkpoint.checkpoint import Tensor
from dcr_cli.delta import device_scan
from dcr_cli.delta.choice import Allowed
from dcr_cli.delta.scan import is_sent_whole
from dcr_cli.device import finding
from dcr_cli.device.wish import AUTO, CPU, CUDA, Wish
from dcr_cli.errors import UnsupportedError
from dcr_cli.publisher.given import Bytes, bytes_of, bytes_there
from dcr_cli.stages import Account, Stages

if TYPE_CHECKING:
    from dcr_cli.device.comparing import Device, Side

# One is compared while what another one needs is read. A trainer needs the device's memory itself.
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """The bytes of a tensor that was given, as a torch tensor if they lie on a device, and what compares them; without
    a device the CPU does."""

    data: Any
    device: Device | None = None
    is_there: bool = False

    def side(self, begin: int, end: int) -> Side:
        """Some of the bytes, for the device: where they lie, or how they are read."""
        data: Any = self.data[begin:end]
        return data if self.is_there else partial(_copy, data)

    def fetch(self, begin: int, end: int) -> Bytes:
        """Some of the bytes, in memory of their own."""
        if self.device is not None and self.is_there:
            return self.device.fetch(self.data[begin:end])
        return np.array(self.data[begin:end])


class Devices:
    """Takes what is given to where it is compared. Each device is made ready when it is first needed."""

    def __init__(self, wish: Wish, allowed: Allowed, stages: Stages) -> None:
        """UnsupportedError if the device that is wished for cannot be had."""
        finding.check(wish)
        self._wish = wish
        self._allowed = allowed
        self._stages = stages
        self._ready: dict[int, Device | None] = {}
        self._lock = threading.Lock()
        self._why = "no tensor that is long enough lies on a CUDA device" if wish.kind == AUTO else "as asked for"

    def take(self, given: Any, tensor: Tensor) -> Taken:
        """What is given for `tensor`, once what the caller had its device begin before is done.

        A tensor is compared where it lies, if that is a CUDA device, else, if it is long, on the one that was asked
        for; a tiny one, and one that is sent whole, on the CPU. Errors as bytes_of.
        """
        can_go = self._wish.kind != CPU and not is_sent_whole(tensor, self._allowed)
        if can_go and tensor.bytes >= device_scan.RUN_BYTES:
            there = bytes_there(given, tensor)
            device = self._device(there[0]) if there is not None else None
            if there is not None and device is not None:
                return Taken(there[1], device, is_there=True)
        data = bytes_of(given, tensor)
        is_sent = can_go and self._wish.kind == CUDA and tensor.bytes >= device_scan.LEAST_BYTES
        return Taken(data, self._device(self._wish.index) if is_sent else None)

    def account(self) -> Account:
        """How tensors were compared."""
        used = sorted(device.lanes.name for device in self._ready.values() if device is not None)
        return Account(",".join(used) or CPU, "where tensors lie" if used else self._why, self._stages.all())

    def _device(self, index: int) -> Device | None:
        """The device of this number; None where it cannot be had, and none was asked for."""
        with self._lock:
            if index not in self._ready:
                self._ready[index] = self._open(index)
            return self._ready[index]

    def _open(self, index: int) -> Device | None:
        try:
            lanes = finding.find(index)
        except UnsupportedError as error:
            if self._wish.kind == CUDA:
                raise
            self._why = error.facts
            return None
        from dcr_cli.device.comparing import Device

        return Device(lanes, self._stages, slots=_SLOTS)


def _copy(data: Bytes, buffer: Bytes) -> None:
    buffer[:] = data
