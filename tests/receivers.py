"""Receivers for tests: pairs with all kinds of changes, what a folder holds, and deltas made by hand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import content_digest, digest_bytes, object_digest, tensor_digest
from dcr_cli.checkpoint.header import DTYPES
from dcr_cli.delta.commit import encode_commit
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.encoding import BLOCK_BYTES, Elements, Encoding, compare_block, encode_block, uint_dtype
from dcr_cli.delta.huffman import build_table, write_table
from dcr_cli.delta.manifest import Box, Manifest, Piece, TensorRow, encode_digests, encode_manifest
from dcr_cli.delta.payload import PayloadWriter
from dcr_cli.delta.strided import box_elements, flat_indices
from dcr_cli.delta.whole import encode_whole
from dcr_cli.diff import diff
from dcr_cli.errors import IncompleteError
from dcr_cli.receiver.beside.link import encode_claim, link_identity
from strategies import (
    TensorData,
    shard_bytes,
    tensor_of,
    tiny_tensors,
    with_changes,
    write_checkpoint,
    write_weight_map,
)

CONFIG, NEW_CONFIG = b'{"model_type": "tiny"}\n', b'{"model_type": "tiny", "new": true}\n'


def tree(root: Path) -> dict[str, bytes]:
    """All files below `root` but those of a state folder: relative path -> bytes."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".dcr" not in path.relative_to(root).parts
    }


def state_of(root: Path, base: Path, target: Path) -> str:
    """base, target or marked; anything else is an error."""
    try:
        open_checkpoint(root)
    except IncompleteError:
        return "marked"
    found = tree(root)
    if found == tree(target):
        return "target"
    assert found == tree(base), f"neither base nor target: {sorted(found)}"
    return "base"


def fresh_copy(source: Path, to: Path) -> Path:
    """Make `to` a copy of `source`, whatever was there."""
    if to.is_symlink():
        to.unlink()
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)
    return to


def claim(link: Path) -> None:
    """Let the folder that `link` leads to be one that a run made for it."""
    (link / ".dcr").mkdir(exist_ok=True)
    (link / ".dcr/link").write_bytes(encode_claim(link_identity(link.lstat())))


def rich_tensors() -> tuple[dict[str, TensorData], dict[str, TensorData]]:
    """Tensors kept, changed, added, removed, renamed, replaced, swapped, tied, of no elements, of one, of several
    dtypes."""
    base = {
        "a.kept": tensor_of("BF16", (40, 8), 1),
        "b.changed": tensor_of("BF16", (64, 64), 2),
        "c.removed": tensor_of("F32", (7,), 3),
        "d.old_name": tensor_of("F16", (33, 3), 4),
        "e.replaced": tensor_of("BF16", (100, 8), 5),
        "f.left": tensor_of("U8", (31,), 6),
        "f.right": tensor_of("U8", (31,), 7),
        "g.empty": tensor_of("I64", (0, 7)),
        "h.scalar": tensor_of("F64", (), 8),
        "i.whole": tensor_of("BF16", (16, 16), 9),
        "j.embed": tensor_of("BF16", (20, 4), 10),
    }
    target = dict(base)
    target["b.changed"] = with_changes(base["b.changed"], [0, 63, 64, 4095])
    del target["c.removed"]
    target["d.new_name"] = target.pop("d.old_name")
    target["e.replaced"] = tensor_of("BF16", (104, 8), 11)
    target["f.left"], target["f.right"] = base["f.right"], base["f.left"]
    target["h.scalar"] = with_changes(base["h.scalar"], [0], 255)
    target["i.whole"] = tensor_of("BF16", (16, 16), 12)
    target["k.added"] = tensor_of("I32", (5, 5), 13)
    target["j.head"] = base["j.embed"]
    return base, dict(sorted(target.items()))


def write_rich_pair(folder: Path, *, base_shards: int = 3, target_shards: int = 2) -> tuple[Path, Path]:
    """Write them as folder/base and folder/target, divided otherwise, with sidecars of all fates."""
    base, target = rich_tensors()
    before = {"config.json": CONFIG, "old/notes.txt": b"old", "vocab.txt": b"a\nb\n", "kept/merges.txt": b"m"}
    after = {
        "config.json": NEW_CONFIG,
        "new/deep/template.txt": b"new",
        "vocab.txt": b"a\nc\n",
        "kept/merges.txt": b"m",
    }
    return (
        write_checkpoint(folder / "base", base, shards=base_shards, sidecars=before, metadata={"format": "pt"}),
        write_checkpoint(folder / "target", target, shards=target_shards, sidecars=after, metadata={"format": "pt"}),
    )


def write_turned_pair(folder: Path) -> tuple[Path, Path]:
    """Write a pair in which files become folders, and folders files, as folder/base and folder/target."""
    old, new = tiny_tensors()
    files = {
        "base": {"a": b"a", "b/c/d": b"d", "e/f": b"f", "e/g": b"g", "new": b"new", "stays/x": b"x", "stays/y/z": b"z"},
        "target": {"a/b/c": b"c", "b/c": b"c", "e": b"e", "old": b"old", "stays/x": b"x", "stays/y": b"y"},
    }
    for name, shard, tensors in (("base", "old/model.safetensors", old), ("target", "new/model.safetensors", new)):
        root = write_checkpoint(folder / name, {}, shards=0, sidecars={"config.json": CONFIG, **files[name]})
        write_weight_map(root, dict.fromkeys(tensors, shard))
        (root / shard).parent.mkdir()
        (root / shard).write_bytes(shard_bytes(tensors))
    return folder / "base", folder / "target"


def make_delta(base: Path, target: Path, delta: Path, encoding: str = "auto") -> Path:
    diff(base, target, delta, encoding=encoding, jobs=1)
    return delta


def rewrite_delta(
    delta: Path,
    *,
    rows: Callable[[TensorRow], TensorRow] = lambda row: row,
    digests: Mapping[str, bytes] | None = None,
    manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> None:
    """Change a delta's rows and target digests, so that all its parts agree again: what a forger would write."""
    opened = open_delta(delta)
    new_digests = digests or {}
    pairs = [(rows(row), new_digests.get(row.name, digest)) for row, digest in opened.tensors()]
    tensors = tuple(replace(row, digest=digest if row.pieces else None) for row, digest in pairs)
    changed = manifest(replace(opened.manifest, tensors=tensors))
    encoded, decoded = encode_manifest(changed)
    others = encode_digests([digest for row, digest in pairs if not row.pieces])
    content = content_digest((row.name, row.dtype, row.shape, digest) for row, digest in pairs)
    commit = replace(
        opened.commit,
        target=replace(opened.commit.target, content=content),
        manifest_blake3=object_digest(encoded),
        manifest_decoded_blake3=decoded,
        manifest_bytes=len(encoded),
        digests_blake3=object_digest(others),
        digests_bytes=len(others),
        payload_count=len(changed.payloads),
        payload_bytes=sum(payload.bytes for payload in changed.payloads),
    )
    (delta / "manifest.zst").write_bytes(encoded)
    (delta / "digests.zst").write_bytes(others)
    (delta / "commit.json").write_bytes(encode_commit(commit))


def _pair(base: Elements, target: Elements) -> tuple[Elements, Elements]:
    return base, target


def put_into_boxes(
    delta: Path, name: str, tensors: tuple[TensorData, TensorData], boxes: Sequence[tuple[Box, Encoding]]
) -> None:
    """Write a tensor's changes anew in pieces with boxes, as ranks that publish their slices do.

    `tensors` are its base and target.
    """
    opened = open_delta(delta)
    (dtype_name, shape, old), (_, _, new) = tensors
    dtype = DTYPES[dtype_name]
    elements = [np.frombuffer(data, uint_dtype(dtype.width)) for data in (old, new)]
    written: dict[str, bytes] = {}
    writer = PayloadWriter(written.__setitem__)
    pieces = []
    for box, encoding in boxes:
        total, size = box_elements(box), BLOCK_BYTES // dtype.width
        blocks = []
        for start in range(0, total, size):
            flat = flat_indices(box, shape, start, min(size, total - start))
            blocks.append([side[flat] for side in elements])
        table = None
        if encoding.is_gap:
            symbols = [(a ^ b if encoding is Encoding.GAP_XOR else b)[a != b].tolist() for a, b in blocks]
            counts: dict[int, int] = {}
            for symbol in chain.from_iterable(symbols):
                counts[symbol] = counts.get(symbol, 0) + 1
            table = build_table(counts, dtype.width, complete=True)
        writer.begin_piece(write_table(table) if table is not None else b"")
        states = {width: np.full((16, 32), 32768, np.uint16) for width in (1, 2, 4, 8)}
        changed = 0
        for a, b in blocks:
            draft = compare_block(a, b, 0, dtype, context=True, gap=True).draft
            changed += draft.changed if draft is not None else 0
            if encoding is Encoding.WHOLE:
                writer.add_block(encode_whole(b))
            elif draft is None:
                writer.add_block(b"")
            else:
                writer.add_block(encode_block(draft, encoding, dtype.width, states, table, partial(_pair, a, b)))
        pieces.append((box, encoding, total if encoding is Encoding.WHOLE else changed, writer.end_piece()))
    payloads = tuple(opened.manifest.payloads)
    new_rows = writer.finish()
    assert not payloads, "write the boxes first into a delta without payloads"
    for path, data in written.items():
        (delta / path).parent.mkdir(exist_ok=True)
        (delta / path).write_bytes(data)

    def row_of(row: TensorRow) -> TensorRow:
        if row.name != name:
            return row
        return replace(row, pieces=tuple(Piece(int(e), changed, box, runs) for box, e, changed, runs in pieces))

    digest = digest_bytes(tensor_digest(new))
    rewrite_delta(
        delta, rows=row_of, digests={name: digest}, manifest=lambda manifest: replace(manifest, payloads=new_rows)
    )


def names_below(root: Path) -> list[str]:
    """Every name below `root`, links and folders too."""
    return sorted(
        os.path.relpath(os.path.join(where, name), root)
        for where, folders, files in os.walk(root)
        for name in (*folders, *files)
    )
