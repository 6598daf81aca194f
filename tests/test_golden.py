"""Golden files: what version 1 of the format once wrote is read for ever, and written again byte for byte.

tests/golden/make.py made them. Bytes that go through zstd, whose versions differ, are compared once decompressed.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.checkpoint.header import DTYPES, read_safetensors
from dcr_cli.delta.commit import open_digests, open_manifest
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.document import decode_document
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.huffman import read_table
from dcr_cli.delta.payload import split_run
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.diff import diff
from dcr_cli.remote.acknowledgement import ACKNOWLEDGEMENT_KIND, encode_acknowledgement, read_acknowledgement
from dcr_cli.remote.anchor import ANCHOR_KIND, decode_anchor, encode_anchor, open_anchor
from dcr_cli.remote.hint import encode_hint, read_hint
from dcr_cli.remote.history import encode_history, require_history
from dcr_cli.remote.keys import (
    HISTORY_KEY,
    anchor_file_key,
    anchor_key,
    place_of_acknowledgement,
    place_of_anchor,
    place_of_version,
    version_of_commit,
)
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import Trust
from dcr_cli.remote.version import COMMIT_KIND, encode_version
from dcr_cli.store.opening import open_store
from dcr_cli.verify import verify
from receivers import fresh_copy, tree
from remotes import HISTORY, anchor_of, signing_key
from second_remote import read_acknowledgements, read_log, read_version

GOLDEN = Path(__file__).parent / "golden" / "dcr-1"
REMOTE = Path(__file__).parent / "golden" / "dcr-1-remote"
DELTAS = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/delta-*"))


def columns(delta: Path, kind: str, file: str) -> dict[str, object]:
    """A document's columns, without what depends on how well zstd packs payloads."""
    found = decode_document(kind, (delta / file).read_bytes(), None, file)
    return {name: column.tolist() for name, column in found.items() if not name.startswith(("payload.", "run."))}


def test_there_are_golden_deltas() -> None:
    assert len(DELTAS) == 8


@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize("name", DELTAS)
def test_golden_deltas_are_read(name: str, mode: str, tmp_path: Path) -> None:
    delta = GOLDEN / name
    receiver = fresh_copy(delta.parent / "base", tmp_path / "receiver")
    assert not apply(delta, receiver, mode=mode).already
    assert tree(receiver) == tree(delta.parent / "target")
    assert verify(receiver, delta=delta).matches


@pytest.mark.parametrize("name", DELTAS)
def test_golden_deltas_are_written_again(name: str, tmp_path: Path) -> None:
    golden, again = GOLDEN / name, tmp_path / "delta"
    diff(golden.parent / "base", golden.parent / "target", again, encoding=name.rpartition("-")[2])
    for kind, file in (("manifest", "manifest.zst"), ("digests", "digests.zst")):
        assert columns(again, kind, file) == columns(golden, kind, file)
    old, new = (json.loads((delta / "commit.json").read_bytes()) for delta in (golden, again))
    for member in ("format", "requires", "base", "target"):
        assert old[member] == new[member]


def test_streams_are_the_same_bytes(tmp_path: Path) -> None:
    """Nothing in this pair's `context` and `gap` deltas is whole, so that no byte of a payload comes from zstd."""
    for encoding in ("context", "gap"):
        golden, again = GOLDEN / "dtypes" / f"delta-{encoding}", tmp_path / encoding
        assert whole_blocks(golden) == 0
        diff(golden.parent / "base", golden.parent / "target", again, encoding=encoding)
        for path, data in tree(golden / "payloads").items():
            assert (again / "payloads" / path).read_bytes() == data


def whole_blocks(delta: Path) -> int:
    """How many blocks of a delta are whole, in pieces that are or by themselves."""
    opened = open_delta(delta)
    found = 0
    with PayloadReader(delta, opened.manifest.payloads) as payloads:
        for row in opened.manifest.tensors:
            for code, run in ((piece.encoding, run) for piece in row.pieces for run in piece.runs):
                encoding, data = Encoding(code), payloads.run_bytes(run)
                start = read_table(data, DTYPES[row.dtype].width)[1] if encoding.is_gap else 0
                begins = split_run(data, run, start).tolist()
                found += sum(
                    encoding is Encoding.WHOLE or bool(data[begin] & 1)
                    for begin, end in pairwise(begins)
                    if begin < end
                )
    return found


def test_the_golden_remote_is_read() -> None:
    trust = Trust(frozenset([signing_key().public]))
    with open_store(REMOTE) as store:
        log = Log(store, require_history(store).id, trust)
        assert (log.history, log.newest(0), log.newest(2), log.newest(4)) == (HISTORY, 4, 4, 4)
        first = log.require(1)
        versions = [published.version for published in (first, *log.following(first, 4))]
        assert [version.delta is None for version in versions] == [True, False, False, True]
        assert [version.anchor for version in versions] == [1, 1, 1, 4]
        assert versions[0].target == versions[2].target != versions[1].target == versions[3].target
        for version in (versions[0], versions[1], versions[3]):
            anchor = open_anchor(version, (REMOTE / anchor_key(version.place)).read_bytes(), "anchor", trust)
            assert anchor == anchor_of((REMOTE / anchor_file_key(version.place, "config.json")).parent, version.place)
        hint = read_hint(store)
        assert hint is not None and (hint.place.version, hint.state) == (5, "streaming")
    for version in versions[1:3]:
        folder = REMOTE / f"versions/{version.place}"
        assert version.delta is not None
        manifest = open_manifest(version.delta, (folder / "manifest.zst").read_bytes(), "manifest.zst")
        open_digests(version.delta, manifest, (folder / "digests.zst").read_bytes(), "digests.zst")
        with PayloadReader(folder, manifest.payloads) as payloads:
            for run in (run for row in manifest.tensors for piece in row.pieces for run in piece.runs):
                payloads.run_bytes(run)
        metadata = read_safetensors((folder / "payloads/000000.safetensors").read_bytes(), "payload")[0].metadata
        named = (metadata["history"], metadata["version"], metadata["id"])
        assert named == (HISTORY, str(version.number), version.place.id)


def test_the_golden_remote_is_written_again() -> None:
    """Every document, byte for byte, from what is read of it; signatures too."""
    key, written = signing_key(), {}
    with open_store(REMOTE) as store:
        log = Log(store, HISTORY)
        written[HISTORY_KEY] = encode_history(require_history(store))
        hint = read_hint(store)
        assert hint is not None
        written["next.json"] = encode_hint(hint)
        for entry in store.list():
            anchor_place, said = place_of_anchor(entry.key), place_of_acknowledgement(entry.key)
            number = version_of_commit(entry.key)
            if number is not None:
                written[entry.key] = key.sign(encode_version(log.require(number).version), COMMIT_KIND)
            if anchor_place is not None and entry.key == anchor_key(anchor_place):
                anchor, _ = decode_anchor((REMOTE / entry.key).read_bytes(), anchor_place, "anchor")
                written[entry.key] = key.sign(encode_anchor(anchor), ANCHOR_KIND)
            if said is not None:
                found = read_acknowledgement(store, said)
                assert found is not None
                assert Trust(frozenset([key.public])).signers(found[1], ACKNOWLEDGEMENT_KIND) == (key.public,)
                written[entry.key] = encode_acknowledgement(found[0], key)
        others = {entry.key for entry in store.list()} - written.keys()
    assert len(written) == 2 + 4 + 3 + 2
    for path, data in written.items():
        assert (REMOTE / path).read_bytes() == data
    assert all(place_of_version(path) or place_of_anchor(path) for path in others)


def test_the_golden_remote_is_read_by_format_alone(tmp_path: Path) -> None:
    trusted = [signing_key().public.hex()]
    log = read_log(REMOTE, trusted)
    states = [tree(REMOTE / f"anchors/{commit.place}/files") for commit in (log[0], log[1])]
    for number, way in enumerate(([0], [0, 1], [0, 1, 2], [1, 2], [3])):
        folder = read_version(REMOTE, [log[index] for index in way], tmp_path / f"{number}", trusted)
        assert tree(folder) == states[way[-1] % 2]
    assert read_acknowledgements(REMOTE, log[1], trusted) == {"staged": {"host-1"}, "applied": {"host-1"}}
