"""Live receivers whose module lies on a device: on CUDA where there is one, else in the host's memory, handled as a
device is, with Triton's kernels interpreted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcr_cli import diff
from interpreter import HAS_CUDA, HAS_TRITON, hurry
from live_modules import FORMS, MADE, Converting, addresses, held, loaded, new_bits, train, write

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
ALL = {**FORMS, **MADE}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    from dcr_cli.live import bits

    if not HAS_CUDA:
        hurry(monkeypatch)
        monkeypatch.setattr(bits, "HostBits", bits.DeviceBits)
    return "cuda" if HAS_CUDA else "cpu"


def test_a_module_on_a_device(tmp_path: Path, device: str) -> None:
    from dcr_cli.live import Receiver, content_of

    def make() -> Any:
        return Converting().to(device)

    bits = new_bits(ALL)
    checkpoints = [write(tmp_path / "step-0", ALL, bits)]
    module = loaded(make, checkpoints[0])
    receiver, before = Receiver(module, checkpoint=checkpoints[0]), addresses(module)
    for number in range(1, 4):
        bits = train(bits, ALL, number)
        checkpoints.append(write(tmp_path / f"step-{number}", ALL, bits))
        delta = tmp_path / f"delta-{number}"
        diff(checkpoints[-2], checkpoints[-1], delta, encoding="context" if number == 2 else "gap")
        receiver.stage(delta)
        staged = receiver.apply()
        assert held(module) == held(loaded(make, checkpoints[-1]))
        assert content_of([receiver.digest()]) == staged.target.content
    assert addresses(module) == before
