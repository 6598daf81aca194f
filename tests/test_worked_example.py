"""The worked example of FORMAT.md, byte by byte, against what diff writes today."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

import dcr_cli
import dcr_kernels as kernels
import dcr_kernels.reference as reference
from dcr_cli.checkpoint.digest import digest_text, object_digest
from dcr_cli.diff import diff
from dcr_cli.remote.anchor import encode_anchor
from dcr_cli.remote.keys import Place, anchor_key, commit_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, encode_version
from dcr_cli.store.opening import open_store
from remotes import HISTORY, anchor_of, signing_key, version
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


def test_the_document_shows_a_signed_commit(tmp_path: Path) -> None:
    tensors = {"w": ("BF16", (8,), struct.pack("<8H", *BASE)), "b": ("F32", (2,), struct.pack("<2f", 1, 2))}
    shard = (write_checkpoint(tmp_path / "base", tensors, index=False) / "model.safetensors").read_bytes()
    place = Place(1, "1" * 32)
    anchor = anchor_of(tmp_path / "base", place)
    document = encode_anchor(anchor)
    parts = AnchorParts(anchor.target, object_digest(document), len(document), 1, len(shard))
    line = encode_version(version(1, place=place, parts=parts, publisher="trainer"))
    commit = signing_key().sign(line, COMMIT_KIND)
    unbroken = FORMAT.replace("\n    ", "")
    for shown in (shard[8:-24], document, commit):
        assert shown.decode().replace("\n", "") in unbroken
    assert f"has {len(shard)} bytes: a length of {len(shard) - 32}," in FORMAT
    assert f"of {len(document)} bytes:" in FORMAT
    assert anchor_key(place) in FORMAT
    assert f"their newlines, {object_digest(commit).hex()}.\n" in FORMAT
    with open_store(tmp_path / "remote") as store:
        store.put(commit_key(1), commit)
        published = Log(store, HISTORY, Trust(frozenset([signing_key().public]))).require(1)
    assert published.version.parts == parts
