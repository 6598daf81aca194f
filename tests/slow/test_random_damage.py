"""Ten thousand random flips, cuts and splices in valid deltas: refused, the receiver untouched, or harmless.

Half of the damage is left for the outermost digest to find. The other half is sealed again, as a forger would: payload
digests, manifest, commit agree once more, so that decoders have to find it.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.digest import blake3_text, object_digest
from dcr_cli.delta.document import decode_document
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.frame import decode_frame, stated_bytes
from dcr_cli.delta.manifest import Box
from dcr_cli.delta.payload import encode_payload, payload_name
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, WrongBaseError
from dcr_cli.verify import verify
from documents import document
from receivers import fresh_copy, make_delta, put_into_boxes, tree, write_rich_pair
from strategies import tensor_of, with_changes, write_checkpoint

ROUNDS = 10_000
KINDS = ("auto", "context", "gap", "whole", "boxes")
MODES: tuple[dict[str, Any], ...] = ({}, {"mode": "in-place"}, {"mode": "aside"}, {"mode": "to"})
SECONDS_EACH, GROWTH_KIB = 10, 256 << 10

Files = dict[str, bytes]


def splice(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Flip a bit, set a byte, cut, insert or append a few, copy some from elsewhere: once or more."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(found):
                found[at] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                del found[at:]
            case 3:
                del found[at : at + rng.randrange(1, 9)]
            case 4:
                found[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                other = rng.choice(others)
                begin = rng.randrange(len(other) + 1)
                length = rng.randrange(1, 65)
                found[at : at + length] = other[begin : begin + length]
            case _:
                found += rng.choice((b"\0", b"\n", rng.randbytes(3), bytes(found)))
    return bytes(found)


def seal(files: Files) -> None:
    """Make the commit agree with the manifest and the digests, whatever they are now."""
    members = json.loads(files["commit.json"])
    for name, file in (("manifest", "manifest.zst"), ("digests", "digests.zst")):
        members[name] |= {"blake3": blake3_text(object_digest(files[file])), "bytes": len(files[file])}
    manifest = files["manifest.zst"]
    try:
        decoded = decode_frame(manifest, stated_bytes(manifest, 1 << 28, 1 << 27), 1 << 27)
    except ValueError:
        pass
    else:
        members["manifest"]["decoded"] = blake3_text(object_digest(decoded))
    files["commit.json"] = json.dumps(members, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def damage_payload(rng: random.Random, files: Files, number: int) -> None:
    """Damage the blocks of a payload; its own head and its row agree with them."""
    name = payload_name(number)
    header = 8 + int.from_bytes(files[name][:8], "little")
    files[name] = encode_payload(number, splice(rng, files[name][header:], [files[name][header:]]))
    columns = {key: column.copy() for key, column in manifest_columns(files).items()}
    columns["payload.bytes"][number] = len(files[name])
    columns["payload.blake3"][number] = np.frombuffer(object_digest(files[name]), np.uint8)
    files["manifest.zst"] = document(columns)
    seal(files)


def damage_columns(rng: random.Random, files: Files) -> None:
    """Put other numbers, or fewer, or more of them, into one or two columns of the manifest."""
    columns = {key: column.copy() for key, column in manifest_columns(files).items()}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(columns))
        column = columns[name]
        flat = column.reshape(-1)
        most = 2 ** (8 * column.itemsize) - 1
        if len(flat) and rng.random() < 0.7:
            at = rng.randrange(len(flat))
            flat[at] = rng.choice((0, 1, most, most // 2 + 1, int(flat[at]) ^ 1, rng.randrange(most + 1)))
        elif len(column) and rng.random() < 0.6:
            columns[name] = np.delete(column, rng.randrange(len(column)), 0)
        elif len(column):
            columns[name] = np.concatenate([column, column[:1]])
        else:
            columns[name] = np.zeros((1, *column.shape[1:]), column.dtype)
    files["manifest.zst"] = document(columns)
    seal(files)


def manifest_columns(files: Files) -> dict[str, Any]:
    return dict(decode_document("manifest", files["manifest.zst"], None, "manifest"))


def damaged(rng: random.Random, files: Files) -> Files:
    """One damaged delta."""
    found = dict(files)
    payloads = [name for name in files if name.startswith("payloads/")]
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            name = rng.choice(sorted(found))
            found[name] = splice(rng, found[name], list(files.values()))
        case 4:
            first, second = rng.sample(sorted(found), 2)
            found[first], found[second] = found[second], found[first]
        case 5 | 6 | 7 if payloads:
            damage_payload(rng, found, rng.randrange(len(payloads)))
        case 8:
            name = rng.choice(("manifest.zst", "digests.zst"))
            found[name] = splice(rng, found[name], list(files.values()))
            seal(found)
        case _:
            damage_columns(rng, found)
    return found


def boxed_delta(folder: Path) -> tuple[Path, Path, Path]:
    """A pair, and a delta whose changes lie in boxes of every encoding."""
    old = tensor_of("BF16", (12, 10), 1)
    new = with_changes(old, [0, 5, 13, 14, 15, 39, 44, 64, 119])
    base = write_checkpoint(folder / "base", {"w": old}, sidecars={"config.json": b"{}"})
    target = write_checkpoint(folder / "target", {"w": new}, sidecars={"config.json": b"{}"})
    delta = make_delta(base, base, folder / "delta")
    boxes = [
        (Box((0, 0), (2, 1), (6, 10)), Encoding.CONTEXT),
        (Box((1, 0), (2, 3), (6, 4)), Encoding.GAP_XOR),
        (Box((1, 1), (2, 3), (6, 3)), Encoding.GAP_OVERWRITE),
        (Box((1, 2), (2, 3), (6, 3)), Encoding.WHOLE),
    ]
    put_into_boxes(delta, "w", (old, new), boxes)
    return base, target, delta


class Receiver:
    """A checkpoint that damaged deltas are applied to in one way, made anew whenever one was not refused."""

    def __init__(self, folder: Path, base: Path, mode: dict[str, Any]) -> None:
        self.folder, self.base, self.mode = folder, base, mode
        self.expected = tree(base)
        self.make()

    def make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.root = fresh_copy(self.base, self.folder / "first")
        if self.mode.get("mode") == "aside":
            (self.folder / "link").symlink_to("first")
            self.root = self.folder / "link"

    def apply(self, delta: Path) -> Path:
        """Apply; where the result is."""
        if self.mode.get("mode") == "to":
            apply(delta, self.root, to=self.folder / "out")
            return self.folder / "out"
        apply(delta, self.root, **self.mode)
        return self.root


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_harmless(kind: str, tmp_path: Path) -> None:
    if kind == "boxes":
        base, target, valid = boxed_delta(tmp_path)
    else:
        base, target = write_rich_pair(tmp_path)
        valid = make_delta(base, target, tmp_path / "delta", kind)
    files, result = tree(valid), tree(target)
    receivers = [Receiver(tmp_path / f"receiver-{number}", base, mode) for number, mode in enumerate(MODES)]
    rng = random.Random(kind)
    counts: Counter[str] = Counter()
    peak = 0
    for number in range(ROUNDS // len(KINDS)):
        delta, receiver = tmp_path / "damaged", receivers[number % len(receivers)]
        found = damaged(rng, files)
        for path, data in found.items():
            (delta / path).parent.mkdir(parents=True, exist_ok=True)
            (delta / path).write_bytes(data)
        start = time.monotonic()
        outcome = outcome_of(lambda: receiver.apply(delta))  # noqa: B023
        assert time.monotonic() - start < SECONDS_EACH, (number, outcome)
        if isinstance(outcome, Path):
            # What was hit is read by nobody, or means the same: then all of the target is there. The base's files
            # digest stands in the commit alone; with another one, a receiver counts as one with shards of its own.
            if tree(outcome) != result:
                assert found["manifest.zst"] == files["manifest.zst"] and found["commit.json"] != files["commit.json"]
                assert verify(outcome, against=target).matches, number
            receiver.make()
        else:
            assert tree(receiver.root) == receiver.expected, (number, outcome)
            assert not (receiver.folder / "out").exists(), (number, outcome)
        counts[outcome if isinstance(outcome, str) else "harmless"] += 1
        shutil.rmtree(delta)
        if number == 200:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"\n{kind}: {dict(counts)}")
    assert set(counts) <= {"DamagedError", "WrongBaseError", "UnsupportedError", "harmless"}
    assert counts["harmless"] < 0.1 * counts.total()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < GROWTH_KIB


def outcome_of(call: Callable[[], Path]) -> Path | str:
    """What a call gives, or the kind of error with which it refuses; anything else fails the test."""
    try:
        return call()
    except (DamagedError, WrongBaseError, UnsupportedError) as error:
        return type(error).__name__
    except DcrError as error:
        raise AssertionError(f"exit code {error.exit_code}: {error}") from error
