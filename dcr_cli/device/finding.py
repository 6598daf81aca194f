"""Looks for the device that is wished for, and says why there is none.

Comparing on it is comparing.py's work. torch is imported last, when all else says that a device may be there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dcr_cli.device.wish import AUTO, CPU, Wish, why_not_worth
from dcr_cli.errors import DcrError, UnsupportedError, install_hint

if TYPE_CHECKING:
    from dcr_cli.device.lanes import Lanes

# What NVIDIA's driver shows of itself, plainly and in Windows's Linux.
DRIVER_NODES = ("/dev/nvidiactl", "/dev/dxg")
_INSTEAD = "--device cpu gives the same bytes"


@dataclass(frozen=True, slots=True)
class Found:
    """The device that work is done on, None for the CPU, and why."""

    lanes: Lanes | None
    why: str

    @property
    def name(self) -> str:
        """What programs are told: cpu, or cuda:N."""
        return self.lanes.name if self.lanes is not None else CPU


def choose(wish: Wish, *, work_bytes: int, jobs: int) -> Found:
    """The device for comparing so many bytes: with `auto`, CUDA where it is there and the work is worth its start, and
    the device that is this process's in torch, if it has begun with one.

    UnsupportedError if a device that is asked for cannot be had. What is chosen here stays chosen: no later fault falls
    back to the CPU.
    """
    if wish.kind == CPU:
        return Found(None, "as asked for")
    if wish.kind != AUTO:
        lanes = find(wish.index)
        return Found(lanes, f"{lanes.model}, as asked for")
    reason = why_not_worth(work_bytes, jobs)
    if reason is not None:
        return Found(None, reason)
    try:
        lanes = find(_current())
    except UnsupportedError as error:
        return Found(None, error.facts)
    return Found(lanes, lanes.model)


def _current() -> int:
    """The device that this process works on, if it has begun with one: ranks beside each other have one each."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0


def check(wish: Wish) -> None:
    """Raise UnsupportedError if a device is asked for by name that cannot be had."""
    if wish.kind not in (AUTO, CPU):
        find(wish.index)


def find(index: int) -> Lanes:
    """CUDA device number `index`, on which kernels have run; UnsupportedError says why it cannot be had."""
    what = f"--device cuda:{index}"
    if find_spec("triton") is None:
        raise UnsupportedError(what, "Triton is not installed", hint=install_hint("gpu"))
    if not any(Path(node).exists() for node in DRIVER_NODES):
        facts = "there is no CUDA device: NVIDIA's driver is not loaded"
        raise UnsupportedError(what, facts, hint=f"nvidia-smi shows what the driver sees; {_INSTEAD}")
    try:
        from dcr_cli.device.lanes import cuda_lanes
    except (ImportError, OSError) as error:
        raise UnsupportedError(what, f"torch cannot be imported: {error}", hint=_INSTEAD) from error
    lanes = cuda_lanes(index, what)
    try:
        from dcr_cli.device.comparing import try_kernels

        try_kernels(lanes)
    except Exception as error:
        # Triton raises what it meets, of any kind.
        said = error.facts if isinstance(error, DcrError) else f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedError(what, f"kernels do not run on {lanes.model}: {said}", hint=_INSTEAD) from error
    return lanes
