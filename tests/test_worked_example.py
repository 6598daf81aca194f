"""The worked example of FORMAT.md, byte by byte, against what diff writes today."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

import dcr_cli
import dcr_kernels as kernels
import dcr_kernels.reference as reference
from dcr_cli.checkpoint.digest import digest_text
from dcr_cli.diff import diff
from strategies import write_checkpoint

FORMAT = (Path(dcr_cli.__file__).parent / "FORMAT.md").read_text()
BASE = (0x3F80, 0xBF80, 0x3C23, 0x3C24, 0x3A00, 0x3A01, 0x8000, 0x7F80)
TARGET = (0x3F80, 0xBF80, 0x3C24, 0x3C24, 0x39FD, 0x3A01, 0x8000, 0x7F80)


def test_the_document_shows_the_bytes_that_are_written(tmp_path: Path) -> None:
    other = ("F32", (2,), struct.pack("<2f", 1, 2))
    for name, bits in (("base", BASE), ("target", TARGET)):
        tensors = {"w": ("BF16", (8,), struct.pack("<8H", *bits)), "b": other}
        write_checkpoint(tmp_path / name, tensors, index=False)
        digest = digest_text(kernels.digest(np.array(bits, "<u2")))
        assert f"{name:7} {' '.join(f'{value:04x}' for value in bits)}" in FORMAT
        assert f"{name:7} {digest}" in FORMAT
        assert digest == digest_text(reference.digest(np.array(bits, "<u2")))
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", encoding="context")
    payload = (tmp_path / "delta" / "payloads" / "000000.safetensors").read_bytes()
    data = payload[8 + int.from_bytes(payload[:8], "little") :]
    assert f"    {data.hex(' ')}\n" in FORMAT
    assert data[6:].hex(" ") == "fe ff ff d6 02 5b"
