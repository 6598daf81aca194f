"""Deltas that `diff` writes, read by the second reader: every byte of the target comes back, by FORMAT.md alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from dcr_cli.diff import diff
from second_reader import (
    BLOCK_BYTES,
    BY_NAME,
    CONTEXT,
    DTYPES,
    GAP_OVERWRITE,
    GAP_XOR,
    WHOLE,
    Bits,
    Delta,
    Dtype,
    MalformedError,
    Tensor,
    apply_delta,
    decode_context,
    digest_content,
    digest_files,
    digest_tensor,
    named_blake3,
    read_delta,
    read_document,
    read_head,
    split_blocks,
)

Shards = dict[str, dict[str, Tensor]]
ENCODINGS = ("auto", "context", "gap", "whole")
RATES = (0.0, 0.01, 0.6, 1.0)
WEIGHT_MAP_NAME = "model.safetensors.index.json"


def make_header(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    header = json.dumps(fields, ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def make_safetensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    return make_header(tensors, metadata) + b"".join(tensor.data for tensor in tensors.values())


def make_weight_map(shards: Shards) -> bytes:
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    size = sum(len(tensor.data) for tensors in shards.values() for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2).encode()


def write_checkpoint(folder: Path, shards: Shards, files: dict[str, bytes]) -> None:
    for path, data in files.items() | {path: make_safetensors(tensors) for path, tensors in shards.items()}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def check(
    folder: Path,
    base: Shards,
    target: Shards,
    encoding: str = "auto",
    *,
    base_files: dict[str, bytes] | None = None,
    target_files: dict[str, bytes] | None = None,
) -> Delta:
    """Compare what the second reader makes of a delta with the target, byte for byte; returns the delta."""
    base_files, target_files = base_files or {}, target_files or {}
    write_checkpoint(folder / "base", base, base_files)
    write_checkpoint(folder / "target", target, target_files)
    diff(folder / "base", folder / "target", folder / "delta", encoding=encoding, jobs=1)
    delta = read_delta(folder / "delta")
    tensors, files = apply_delta(delta, folder / "base")
    assert tensors == {name: tuple(tensor) for shard in target.values() for name, tensor in shard.items()}
    assert files == target_files | {path: make_header(shard) for path, shard in target.items()}
    return delta


def test_safetensors_files_that_are_no_shards(tmp_path: Path) -> None:
    shards = {"model.safetensors": {"w": of_bits("BF16", [1, 2, 3])}}
    files = {"lora/adapter.safetensors": b"not even safetensors"}
    check(tmp_path, shards, shards, base_files={**files, "old/x.safetensors": b"x"}, target_files=files)


def random_tensor(random: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor of values like those of weights: of a float, exponents near each other; else small numbers."""
    count = math.prod(shape) * dtype.bits // (8 * dtype.width)
    if dtype.name == "BF16":
        bits = (random.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")
    elif dtype.exponent_bits and dtype.width > 1:
        bits = random.standard_normal(count).astype(f"<f{dtype.width}").view(f"<u{dtype.width}")
    else:
        bits = random.integers(0, 2 if dtype.name == "BOOL" else 100, count).astype(f"<u{dtype.width}")
    return Tensor(dtype.name, shape, bits.tobytes())


def change(random: np.random.Generator, tensor: Tensor, rate: float) -> Tensor:
    """Change a share of the elements: most a little, some to any bits."""
    width = BY_NAME[tensor.dtype].width
    bits = np.frombuffer(tensor.data, f"<u{width}").copy()
    where = random.random(len(bits)) < rate
    steps = random.choice(np.array([-9, -2, -1, 1, 2, 3, 77]), len(bits)).astype(bits.dtype)
    any_bits = np.frombuffer(random.bytes(len(tensor.data)), bits.dtype)
    changed = np.where(random.random(len(bits)) < 0.95, bits + steps, any_bits)
    bits[where] = (bits[where] ^ 1) if tensor.dtype == "BOOL" else changed[where]
    return tensor._replace(data=bits.tobytes())


def of_bits(dtype: str, bits: list[int]) -> Tensor:
    return Tensor(dtype, (len(bits),), np.array(bits, f"<u{BY_NAME[dtype].width}").tobytes())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_dtype_at_every_rate(tmp_path: Path, encoding: str) -> None:
    random = np.random.default_rng(1)
    base, target = {}, {}
    for dtype in DTYPES:
        for rate in RATES:
            name = f"{dtype.name}.{rate}"
            base[name] = random_tensor(random, dtype, (25, 20))
            target[name] = change(random, base[name], rate)
    delta = check(tmp_path, {"model.safetensors": base}, {"model.safetensors": target}, encoding)
    expected = {"context": {CONTEXT}, "gap": {GAP_XOR, GAP_OVERWRITE}, "whole": {WHOLE}}
    used = {piece.encoding for tensor in delta.tensors for piece in tensor.pieces}
    assert encoding == "auto" or used <= expected[encoding]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_small_shapes_and_special_values(tmp_path: Path, encoding: str) -> None:
    random = np.random.default_rng(2)
    base, target = {}, {}
    for name in ("U8", "BF16", "F32", "F64"):
        for shape in ((), (0,), (3, 0, 5), (1,), (1, 1, 1), (63,), (64,), (65,), (8, 5, 25)):
            key = f"{name}{list(shape)}"
            base[key] = random_tensor(random, BY_NAME[name], shape)
            target[key] = change(random, base[key], 1.0 if len(base[key].data) < 16 else 0.2)
    base["empty.removed"] = Tensor("F32", (0,), b"")
    target["empty.added"] = Tensor("F16", (2, 0), b"")
    bits = {
        "F16": [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFDFF, 0xFFFF, 0x0001, 0x03FF],
        "BF16": [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0xFFFF, 0x0001, 0x007F],
        "F32": [0, 1 << 31, 0x7F800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 1, 0x7FFFFF, 0x3F800000],
        "F64": [0, 1 << 63, 0x7FF << 52, (0x7FF << 52) + 1, 2**64 - 1, 1, (1 << 52) - 1, 1 << 62],
        "I8": [0, 0x80, 0x7F, 0xFF],
        "U64": [0, 1 << 63, 2**64 - 1, (1 << 63) - 1],
    }
    for name, values in bits.items():
        # Every value becomes every other one.
        for shift in range(1, len(values)):
            base[f"{name}>{shift}"] = of_bits(name, values)
            target[f"{name}>{shift}"] = of_bits(name, values[shift:] + values[:shift])
    check(tmp_path, {"model.safetensors": base}, {"model.safetensors": target}, encoding)


@pytest.mark.parametrize(
    ("encoding", "dtype", "rate"),
    [
        ("auto", "F32", 0.01),
        ("auto", "F64", 0.6),
        ("context", "BF16", 0.01),
        ("context", "F32", 0.6),
        ("context", "C64", 0.01),
        ("context", "U8", 0.01),
        ("gap", "BF16", 0.01),
        ("gap", "F64", 0.01),
        ("gap", "I64", 1.0),
        ("gap", "F8_E4M3", 0.01),
        ("whole", "F32", 0.6),
        ("whole", "F6_E2M3", 0.01),
    ],
)
def test_several_blocks(tmp_path: Path, encoding: str, dtype: str, rate: float) -> None:
    random = np.random.default_rng(3)
    elements = 2 * BLOCK_BYTES // BY_NAME[dtype].width + 3
    shape = (elements,) if BY_NAME[dtype].bits >= 8 else (elements // 3, 4)
    base = random_tensor(random, BY_NAME[dtype], shape)
    target = change(random, base, rate)
    # Of the second tensor the first block does not change, of the third only the last element does.
    tail = target._replace(data=base.data[:BLOCK_BYTES] + change(random, base, 0.01).data[BLOCK_BYTES:])
    last = target._replace(data=base.data[:-1] + bytes([base.data[-1] ^ 1]))
    delta = check(
        tmp_path,
        {"a.safetensors": {"a": base, "b": base, "c": base}},
        {"a.safetensors": {"a": target, "b": tail, "c": last}},
        encoding,
    )
    assert all(len(tensor.pieces) == 1 for tensor in delta.tensors)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tensors_and_files_come_go_and_move(tmp_path: Path, encoding: str) -> None:
    random = np.random.default_rng(4)

    def make(name: str, *shape: int) -> Tensor:
        return random_tensor(random, BY_NAME[name], shape)

    kept, moved, renamed, reshaped = make("BF16", 30, 40), make("F32", 77), make("BF16", 50, 60), make("F16", 20, 30)
    retyped, tied, other = make("I16", 300), make("F32", 40, 40), make("U8", 999)
    base = {
        "model-1.safetensors": {"kept": kept, "moved": moved, "renamed": renamed, "retyped": retyped},
        "model-2.safetensors": {"reshaped": reshaped, "removed": make("F64", 9), "tied": tied, "other": other},
        "gone.safetensors": {"changes.shard": make("BF16", 500)},
    }
    target = {
        "model-2.safetensors": {"moved": moved, "reshaped": change(random, reshaped._replace(shape=(600,)), 0.1)},
        "model-1.safetensors": {
            "new.name": renamed,
            "retyped": retyped._replace(dtype="U16"),
            "kept": change(random, kept, 0.05),
            "tied": tied,
            "twin": tied,
        },
        "sub/new.safetensors": {
            "changes.shard": change(random, base["gone.safetensors"]["changes.shard"], 0.3),
            "zürich 東京 🙂": make("F8_E5M2", 3, 5),
            "added": make("BOOL", 40),
            "other": other._replace(dtype="I8", shape=(3, 333)),
            "packed": Tensor("F4", (3, 6), bytes(9)),
        },
    }
    large = random.bytes(2 * BLOCK_BYTES + 5)
    base_files = {
        "config.json": b"{}",
        "tokenizer.json": large,
        "removed.txt": b"x",
        "same/vocab.txt": b"same" * 1000,
        "emptied": b"full",
        WEIGHT_MAP_NAME: make_weight_map(base),
    }
    target_files = {
        "config.json": b'{"a": 1}',
        "tokenizer.json": large[:-1] + b"!",
        "same/vocab.txt": base_files["same/vocab.txt"],
        "emptied": b"",
        "new/deep/merges.txt": bytes(BLOCK_BYTES),
        "new/empty": b"",
        WEIGHT_MAP_NAME: make_weight_map(target),
    }
    delta = check(tmp_path, base, target, encoding, base_files=base_files, target_files=target_files)
    sources = {tensor.name: tensor.source for tensor in delta.tensors}
    assert delta.removed == ("removed", "renamed")
    assert (sources["kept"], sources["new.name"], sources["retyped"]) == ("kept", "renamed", None)


def test_weight_map_of_another_name(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    base = {"a.safetensors": {"w": random_tensor(random, BY_NAME["F32"], (10,))}}
    files = {"adapter.safetensors.index.json": make_weight_map(base), "x.json": b"{}"}
    delta = check(tmp_path, base, base, base_files=files, target_files=files)
    assert [file.kind for file in delta.files] == [1, 3, 2]
    assert delta.base == delta.target


@pytest.mark.parametrize("seed", range(8))
def test_random_checkpoints(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(100 + seed)

    def make() -> Shards:
        shards: Shards = {f"model-{number}.safetensors": {} for number in range(random.integers(1, 4))}
        for number in random.permutation(20)[: random.integers(1, 20)]:
            dtype = DTYPES[random.integers(len(DTYPES))]
            shape = tuple(int(size) for size in random.integers(0, 12, random.integers(0, 4)))
            shape = (*shape, 4) if dtype.bits < 8 else shape
            shards[str(random.choice(list(shards)))][f"t{number}"] = random_tensor(random, dtype, shape)
        return shards

    base, target = make(), make()
    names = {name: tensor for tensors in base.values() for name, tensor in tensors.items()}
    for tensors in target.values():
        for name in tensors.keys() & names.keys():
            if random.random() < 0.8:
                tensors[name] = change(random, names[name], float(random.choice(RATES)))
    check(tmp_path, base, target, ENCODINGS[seed % 4])


def test_few_values(tmp_path: Path) -> None:
    """Symbols that a Huffman table has few of, or one: pruning to 0, one bit flipped, two values; and many again."""
    random = np.random.default_rng(6)
    base = {name: random_tensor(random, BY_NAME[name], (3000,)) for name in ("U8", "BF16", "I32", "F64")}
    bits = {name: np.frombuffer(tensor.data, f"<u{BY_NAME[name].width}") for name, tensor in base.items()}
    where = random.random(3000) < 0.05
    used = set()
    for encoding in ("auto", "context", "gap"):
        target = {}
        for name, values in bits.items():
            changed = {
                "pruned": np.where(where, 0, values),
                "flipped": np.where(where, values ^ 1, values),
                "two": np.where(where, 1 + random.integers(0, 2, 3000), values),
                "all": values ^ 5,
                "tiled": np.resize(random.integers(0, 256, 500), 3000),  # Smallest in whole form.
            }
            for kind, array in changed.items():
                target[f"{name} {kind}"] = base[name]._replace(data=array.astype(values.dtype).tobytes())
        sources = {name: base[name.split()[0]] for name in target}
        delta = check(tmp_path / encoding, {"m.safetensors": sources}, {"m.safetensors": target}, encoding)
        used |= {piece.encoding for tensor in delta.tensors for piece in tensor.pieces}
    assert used == {WHOLE, GAP_XOR, GAP_OVERWRITE, CONTEXT}


def test_a_piece_in_two_payloads(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    base = Tensor("U8", (1,), b"\0")
    size = 65 * BLOCK_BYTES * 2
    delta = check(
        tmp_path,
        {"a.safetensors": {"w": base}},
        {"a.safetensors": {"v": Tensor("U8", (size,), random.bytes(size)), "w": base}},
    )
    assert len(delta.tensors[0].pieces[0].runs) > 1
    assert len(list((tmp_path / "delta" / "payloads").iterdir())) > 1


def test_the_worked_example() -> None:
    base = np.array([0x3F80, 0xBF80, 0x3C23, 0x3C24, 0x3A00, 0x3A01, 0x8000, 0x7F80], "<u2")
    target = np.array([0x3F80, 0xBF80, 0x3C24, 0x3C24, 0x39FD, 0x3A01, 0x8000, 0x7F80], "<u2")
    assert digest_tensor(base.tobytes()).hex() == "c683715bba9adab9d49562a3fa3518ed"
    assert digest_tensor(target.tobytes()).hex() == "5854d985dcbf1c08c2d0026316d051eb"
    data = bytes.fromhex("fe ff 0d 78 0c 06 fe ff ff d6 02 5b")
    states, head_bytes = read_head(data)
    assert states[2][15][:3] == [32896, 51072, 32768]
    assert len(data) - head_bytes == 7
    (block,) = split_blocks(data[head_bytes:], 1)
    bits = Bits(block)
    assert bits.field(1) == 0
    decoded, changed_elements = decode_context(bits, BY_NAME["BF16"], base, states[2])
    assert changed_elements == 2
    assert decoded.tobytes() == target.tobytes()


# Boxes, which `diff` does not write today: deltas by hand, from the runs that it writes of the boxes' elements.


def numbers(dtype: str, values: Any) -> Tensor:
    data: npt.NDArray[Any] = np.array(values, f"<u{BY_NAME[dtype].width}")
    return Tensor(dtype, data.shape, data.tobytes())


def slices(box: list[list[int]]) -> tuple[slice, ...]:
    return tuple(slice(start, start + step * count, step) for start, step, count in zip(*box, strict=True))


def write_document(path: Path, kind: str, columns: dict[str, Tensor]) -> dict[str, Any]:
    data = make_safetensors(columns, {"format": "dcr-1", "kind": kind, "requires": "[]"})
    frame = zstandard.compress(data)
    path.write_bytes(frame)
    return {"blake3": named_blake3(frame), "bytes": len(frame), "decoded": named_blake3(data)}


def state_of(tensor: Tensor, header_digest: bytes) -> dict[str, str]:
    record = "w", BY_NAME[tensor.dtype], tensor.shape, digest_tensor(tensor.data)
    return {"content": digest_content([record]), "files": digest_files([("m.safetensors", 1, header_digest)])}


def write_box_delta(folder: Path, base: Tensor, target: Tensor, boxes: list[list[list[int]]], encoding: str) -> None:
    """Write folder/delta, between checkpoints with the one tensor w that differ in boxes (starts, steps, counts)."""
    parts: list[dict[str, Tensor]] = []
    for side, tensor in enumerate((base, target)):
        array = np.frombuffer(tensor.data, f"<u{BY_NAME[tensor.dtype].width}").reshape(tensor.shape)
        parts.append({})
        for number, box in enumerate(boxes):
            part = array[slices(box)]
            parts[-1][f"p{number}"] = Tensor(tensor.dtype, part.shape, part.tobytes())
        name = ("base", "target")[side]
        write_checkpoint(folder / name, {"m.safetensors": {"w": tensor}}, {})
        write_checkpoint(folder / f"{name} parts", {"m.safetensors": parts[-1]}, {})
    delta = folder / "delta"
    diff(folder / "base parts", folder / "target parts", delta, encoding=encoding, jobs=1)
    commit = json.loads((delta / "commit.json").read_bytes())
    columns = read_document(delta / "manifest.zst", commit["manifest"], "manifest")[0]
    run_count = int(np.frombuffer(columns["piece.runs"].data, "<u4").sum())
    empty_text = {"bytes": numbers("U8", []), "lengths": numbers("U32", [])}
    header = make_header({"w": base})
    header_digest = bytes.fromhex(named_blake3(header).removeprefix("blake3:"))
    columns |= {
        "tensor.name.bytes": numbers("U8", [ord("w")]),
        "tensor.name.lengths": numbers("U32", [1]),
        "tensor.dtype": numbers("U8", [BY_NAME[target.dtype].code]),
        "tensor.rank": numbers("U32", [len(target.shape)]),
        "tensor.shape": numbers("U64", target.shape),
        "tensor.source": numbers("U32", [1]),
        "tensor.pieces": numbers("U32", [len(boxes)]),
        "tensor.digest": numbers("U8", [list(digest_tensor(target.data))]),
        "piece.box": numbers("U8", [1] * len(boxes)),
        "box": numbers("U64", np.array(boxes).reshape(-1)),
        "file.path.bytes": numbers("U8", list(b"m.safetensors")),
        "file.path.lengths": numbers("U32", [len("m.safetensors")]),
        "file.kind": numbers("U8", [1]),
        "file.size": numbers("U64", [len(header)]),
        "file.blake3": numbers("U8", [list(header_digest)]),
        "file.runs": numbers("U32", [0]),
    }
    columns |= {f"{name}.{part}": empty_text[part] for name in ("source", "removed") for part in empty_text}
    for name in ("run.payload", "run.offset", "run.bytes", "run.blocks"):
        columns[name] = numbers("U32", np.frombuffer(columns[name].data, "<u4")[:run_count])
    manifest = write_document(delta / "manifest.zst", "manifest", columns)
    digests = write_document(delta / "digests.zst", "digests", {"digest": numbers("U8", np.zeros((0, 16)))})
    commit |= {"manifest": manifest, "digests": digests}
    commit |= {"base": state_of(base, header_digest), "target": state_of(target, header_digest)}
    text = json.dumps(commit, sort_keys=True, separators=(",", ":"))
    (delta / "commit.json").write_text(text + "\n")


BOXES = [
    [[0, 0, 1], [2, 1, 2], [2, 400, 350]],  # Two blocks of BF16, the columns of odd number.
    [[1, 3, 0], [2, 5, 7], [2, 79, 100]],
    [[0, 10, 0], [1, 1, 1], [1, 1, 1]],
    [[2, 11, 2], [1, 300, 2], [1, 2, 300]],
]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_boxes(tmp_path: Path, encoding: str) -> None:
    random = np.random.default_rng(8)
    base = random_tensor(random, BY_NAME["BF16"], (4, 400, 701))
    changed = np.frombuffer(change(random, base, 0.02).data, "<u2").reshape(base.shape)
    bits = np.frombuffer(base.data, "<u2").reshape(base.shape).copy()
    for box in BOXES:
        bits[slices(box)] = changed[slices(box)]
    bits[0, 10, 0] ^= 3
    target = base._replace(data=bits.tobytes())
    write_box_delta(tmp_path, base, target, BOXES, encoding)
    delta = read_delta(tmp_path / "delta")
    assert [piece.box is not None for piece in delta.tensors[0].pieces] == [True] * 4
    tensors, files = apply_delta(delta, tmp_path / "base")
    assert tensors == {"w": tuple(target)}
    assert files == {"m.safetensors": make_header({"w": target})}


def test_boxes_that_overlap_are_refused(tmp_path: Path) -> None:
    base = Tensor("U8", (4, 6), bytes(24))
    target = base._replace(data=bytes([1]) * 24)
    write_box_delta(tmp_path, base, target, [[[0, 0], [1, 1], [4, 4]], [[0, 3], [1, 1], [4, 3]]], "whole")
    with pytest.raises(MalformedError, match="overlap"):
        apply_delta(read_delta(tmp_path / "delta"), tmp_path / "base")


# What is not the format is refused.


def test_another_base_is_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(9)
    base = {"m.safetensors": {"w": random_tensor(random, BY_NAME["F32"], (100,))}}
    target = {"m.safetensors": {"w": change(random, base["m.safetensors"]["w"], 0.5)}}
    delta = check(tmp_path, base, target)
    with pytest.raises(MalformedError, match="base"):
        apply_delta(delta, tmp_path / "target")


def test_flipped_bits_are_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(10)
    base = {"m.safetensors": {"w": random_tensor(random, BY_NAME["F32"], (100,))}}
    target = {"m.safetensors": {"w": change(random, base["m.safetensors"]["w"], 0.5)}}
    check(tmp_path, base, target, base_files={"a": b"1"}, target_files={"a": b"2"})
    for path in (path for path in (tmp_path / "delta").rglob("*") if path.is_file()):
        data = path.read_bytes()
        for position in range(int(random.integers(11)), len(data), 11):
            flipped = bytearray(data)
            flipped[position] ^= 1 << random.integers(8)
            path.write_bytes(flipped)
            with pytest.raises(MalformedError):
                apply_delta(read_delta(tmp_path / "delta"), tmp_path / "base")
        path.write_bytes(data)
    apply_delta(read_delta(tmp_path / "delta"), tmp_path / "base")
