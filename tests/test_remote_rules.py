"""The rules of FORMAT.md, section 9, on what a remote has beside deltas: each test breaks one and sees it refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli.checkpoint import patterns
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.checkpoint.digest import blake3_text, digest_bytes, object_digest, tensor_digest
from dcr_cli.delta.document import decode_document, encode_document
from dcr_cli.delta.file_rules import RangedFile
from dcr_cli.delta.manifest import PayloadRow, Run
from dcr_cli.errors import DcrError
from dcr_cli.inspect import inspect
from dcr_cli.publisher.merging import Sides, merge
from dcr_cli.publisher.shares import Slice, cut
from dcr_cli.remote import anchor as anchors
from dcr_cli.remote.acknowledgement import decode_acknowledgement, encode_acknowledgement, read_acknowledgement
from dcr_cli.remote.anchor import ANCHOR_KIND, Anchor, decode_anchor, encode_anchor, open_anchor
from dcr_cli.remote.decision import ABORT, COMMIT, decide, decode_decision, encode_decision, read_decision
from dcr_cli.remote.hint import Hint, decode_hint, encode_hint, read_hint, require_hint
from dcr_cli.remote.history import History, decode_history, encode_history
from dcr_cli.remote.keys import (
    HINT_KEY,
    AcknowledgementPlace,
    acknowledgement_key,
    anchor_file_key,
    anchor_key,
    commit_key,
    decision_key,
    payload_key,
    place_of_acknowledgement,
    place_of_anchor,
    place_of_version,
    prepared_key,
    version_of_commit,
)
from dcr_cli.remote.log import Known, Log
from dcr_cli.remote.part import (
    Attempt,
    PartCommit,
    PartTable,
    SliceRow,
    decode_part,
    encode_part,
    encode_table,
    open_table,
)
from dcr_cli.remote.signing import Trust, split_signed
from dcr_cli.remote.version import COMMIT_KIND, AnchorParts, Version, decode_version, encode_version
from dcr_cli.store.opening import open_store
from dcr_cli.store.store import Store
from remotes import (
    CREATED,
    HISTORY,
    OTHER_HISTORY,
    PUBLISHER,
    STATES,
    acknowledgement,
    commit,
    delta_parts,
    encode_members,
    place_of,
    signing_key,
    small_anchor,
    version,
    with_files,
    write_log,
)
from strategies import tensor_of, write_checkpoint

TRUST = Trust(frozenset([signing_key().public]))
NO_TRUST = Trust()


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://remote-rules") as store:
        for entry in store.list():
            store.delete(entry.key)
        yield store


def lines() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Of each document that is refused when it is malformed: a valid line, and what decodes it."""
    history = encode_history(History(HISTORY, ("gap", "whole"), CREATED, PUBLISHER))
    return {
        "dcr.json": (history, lambda data: decode_history(data, "dcr.json")),
        "decision": (
            encode_decision(HISTORY, place_of(3), COMMIT),
            lambda data: decode_decision(data, HISTORY, place_of(3), "decision"),
        ),
        "first": (encode_version(version(1)), lambda data: decode_version(data, 1, "commit").version),
        "commit": (encode_version(version(2)), lambda data: decode_version(data, 2, "commit").version),
        "anchor": (encode_anchor(small_anchor()), lambda data: decode_anchor(data, place_of(3), "anchor")[0]),
        "acks": (encode_acknowledgement(acknowledgement()), lambda data: decode_acknowledgement(data, "acks")[0]),
    }


DOCUMENTS = tuple(lines())
SIGNED = DOCUMENTS[2:]


NO_COUNTS: tuple[Any, ...] = (-1, 1 << 63, True, 1.5, "1", None)
NO_VERSIONS: tuple[Any, ...] = (0, -1, 10**10, True, 2.0, "2", None)
NO_IDS: tuple[Any, ...] = (HISTORY[1:], HISTORY + "0", "A" * 32, HISTORY[1:] + "\n", "\u0661" * 32, [HISTORY], 1)
NO_DIGESTS: tuple[Any, ...] = (
    "crc32:" + "0" * 64,
    "blake3:" + "A" * 64,
    "blake3:" + "0" * 63,
    f"blake3:{'0' * 64}\n",
    [],
    None,
)


def without(members: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in members.items() if name != key}


def refused(do: Callable[[], object], match: str, code: int = 4) -> None:
    with pytest.raises(DcrError, match=match) as caught:
        do()
    assert caught.value.exit_code == code


def refused_data(name: str, data: bytes, match: str, code: int = 4) -> None:
    """The document is valid, and these other bytes in its place are refused."""
    line, decode = lines()[name]
    decode(line)
    assert data != line
    refused(lambda: decode(data), match, code)


def refused_members(name: str, members: dict[str, Any], match: str, code: int = 4) -> None:
    refused_data(name, encode_members(json.loads(lines()[name][0]) | members), match, code)


def refused_anchor(change: Callable[[Anchor], Anchor], match: str) -> None:
    """An anchor whose digest goes with its files is refused all the same."""
    refused(lambda: decode_anchor(encode_anchor(with_files(change(small_anchor()))), place_of(3), "anchor"), match)


def changed_file(index: int, **facts: Any) -> Callable[[Anchor], Anchor]:
    def change(anchor: Anchor) -> Anchor:
        files = list(anchor.files)
        files[index] = replace(files[index], **facts)
        return replace(anchor, files=tuple(files))

    return change


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_not_known_breaks_no_rule(name: str) -> None:
    line, decode = lines()[name]
    members = json.loads(line)
    members |= {"colour": {"b": [1.5, None], "c": {}}}
    for value in members.values():
        if isinstance(value, dict):
            value["zebra"] = [1]
    assert decode(encode_members(members)) == decode(line)


# Documents


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rule_087_a_document_is_a_small_line(name: str) -> None:
    line = lines()[name][0]
    refused_data(name, line[:-1], "newline|one line")
    refused_data(name, line[:-2] + b"\n", "JSON")
    refused_data(name, line[:-2] + b',"requires":[]}\n', "duplicate")
    refused_data(name, b'{"z":1,' + line[1:], "sorted")
    refused_data(name, b"[]\n", "object")
    refused_data(name, b"", "empty|JSON")
    refused_data(name, b"<html>", "HTML")
    refused_data(name, b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"\n", "levels")
    refused_data(name, b"\n" + line, "JSON|signature")
    refused_members(name, {"format": "dcr-2"}, "dcr-2", 8)
    refused_members(name, {"format": None}, "format")
    refused_members(name, {"requires": ["sums"]}, "requires sums", 8)
    refused_members(name, {"requires": [1]}, "list of strings")
    refused_data(name, line[:-2] + b',"zz":1' + b"0" * 4000 + b"}\n", "integer")
    if name != "anchor":
        refused_members(name, {"x": "x" * 65_536}, "at most 65536")


def test_rule_087_an_anchor_may_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    line = encode_anchor(small_anchor())
    decode_anchor(line[:-2] + b',"x":"' + b"x" * 100_000 + b'"}\n', place_of(3), "anchor")
    assert anchors.ANCHOR_LIMIT == 268_435_456
    monkeypatch.setattr(anchors, "ANCHOR_LIMIT", len(line))
    decode_anchor(line, place_of(3), "anchor")
    refused(lambda: decode_anchor(line + b"x:y\n", place_of(3), "anchor"), "at most")
    refused(lambda: encode_anchor(small_anchor()), "at most")


@pytest.mark.parametrize("name", ["first", "commit", "acks"])
def test_rule_087_signatures_count(name: str) -> None:
    line, decode = lines()[name]
    full = line[:-2] + b',"zz":"' + b"x" * (65_536 - len(line) - 8) + b'"}\n'
    assert len(full) == 65_536
    decode(full)
    refused_data(name, full[:-4] + b'"}\nx:y\n', "at most 65536")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rule_088_members(name: str) -> None:
    members = json.loads(lines()[name][0])
    for key, value in members.items():
        refused_data(name, encode_members(without(members, key)), f"{key}|history|anchor of")
        refused_members(name, {key: 1.5}, f"{key}|history|anchor of")
        for inner in value if isinstance(value, dict) else ():
            refused_members(name, {key: without(value, inner)}, inner)
            refused_members(name, {key: value | {inner: 1.5}}, inner)
            for other in NO_COUNTS if inner in ("bytes", "count") else ():
                refused_members(name, {key: value | {inner: other}}, inner)
            for other in NO_DIGESTS if inner in ("content", "files", "blake3", "decoded") else ():
                refused_members(name, {key: value | {inner: other}}, "digest")


def test_rule_088_members_of_files() -> None:
    refused_members("anchor", {"files": [1]}, "objects")
    for entry in json.loads(lines()["anchor"][0])["files"]:
        for key in entry:
            refused_members("anchor", {"files": [without(entry, key)]}, key)
            refused_members("anchor", {"files": [entry | {key: 1.5}]}, key)
        for other in NO_COUNTS:
            refused_members("anchor", {"files": [entry | {"bytes": other}]}, "bytes")
        for digest in NO_DIGESTS:
            refused_members("anchor", {"files": [entry | {"blake3": digest}]}, "blake3")
            refused_members("anchor", {"files": [entry | {"bytes": 1, "ranges": [digest]}]}, "range")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rule_089_histories_ids_and_versions(name: str) -> None:
    members = json.loads(lines()[name][0])
    for key in {"history", "id"}.intersection(members):
        for other in NO_IDS:
            refused_members(name, {key: other}, "history|id|anchor of")
    if "version" in members:
        for other in NO_VERSIONS:
            refused_members(name, {"version": other}, "version")


def test_rule_090_encodings() -> None:
    others: tuple[Any, ...] = ([], {}, None, [1], [["gap"]])
    for other in others:
        refused_members("dcr.json", {"encodings": other}, "encodings")
    refused_members("dcr.json", {"encodings": ["gap", "gap"]}, "twice")
    refused_members("dcr.json", {"encodings": ["gap", "ta\nble"]}, r"unknown to this dcr: ta\\nble", 8)


@pytest.mark.parametrize("name", SIGNED)
def test_rule_091_lines_below_the_first(name: str) -> None:
    line, decode = lines()[name]
    kinds = (b"x:y", b"post-quantum-1:" + b"~" * 1024, b"a" * 32 + b":!")
    decode(line + b"\n".join(kinds) + b"\n")
    decode(line + b"x:y\n" * 16)
    refused_data(name, line + b"x:y\n" * 17, "17 signatures")
    fill = b"x:" + b"y" * 1020 + b"\n"
    decode(line + fill * 16 + b"")
    refused_data(name, line + fill * 15 + b"x:" + b"y" * 1024 + b"\n" + b"x:y\n", "17|no signature|at most")
    refused_data(name, line + b"x" * 16_384 + b"\n", "at most 16384")
    refused_data(name, line + b"\n" * 100_000, "at most")
    for below in (
        b"x:y",
        b"x:y\n\n",
        b"\n",
        b" x:y\n",
        b"x:y \n",
        b"x:y\r\n",
        b"X:y\n",
        b"1x:y\n",
        b"x:\n",
        b"x\n",
        b":y\n",
    ):
        refused_data(name, line + below, "no signature|newline")
    for below in (
        "x:\u00e9\n".encode(),
        b"x:\xff\n",
        b"x:\0\n",
        b"a" * 33 + b":y\n",
        b"x:" + b"y" * 1025 + b"\n",
        line,
    ):
        refused_data(name, line + below, "no signature")


def test_rule_092_signatures() -> None:
    line, decode = lines()["commit"]
    signed = signing_key().sign(line, COMMIT_KIND)
    decode(signed)
    right = signed[len(line) :]
    key, signature = right[8:72], right[73:201]
    assert right == b"ed25519:" + key + b":" + signature + b"\n"
    for below in (
        right.replace(key, key.upper()),
        right.replace(key, key[1:]),
        right.replace(signature, signature[1:]),
        right.replace(signature, signature + b"0"),
        right.replace(b"\n", b":x\n"),
        b"ed25519:" + key + b"\n",
        b"ed25519:x\n",
    ):
        assert below != right
        refused_data("commit", line + below, "no signature")


def test_rule_093_trusted_keys(store: Store) -> None:
    line = lines()["commit"][0]
    own, other = signing_key(), signing_key(1)

    def check(data: bytes) -> None:
        TRUST.check(split_signed(data, "commit"), COMMIT_KIND, "commit")

    signed = own.sign(line, COMMIT_KIND)
    check(signed)
    check(other.sign(line, COMMIT_KIND) + signed[len(line) :])
    check(line + b"x:y\n" + signed[len(line) :])
    refused(lambda: check(line), "not signed by a trusted key$", 5)
    refused(lambda: check(other.sign(line, COMMIT_KIND)), f"keys below it: {other.public.hex()[:16]}$", 5)
    for kind in ("anchor", "acknowledgement", "commits", ""):
        refused(partial(check, own.sign(line, kind)), "is not one of this commit", 5)
    refused(lambda: check(signed.replace(b"dcr-1", b"dcr-3")), "not one of this", 5)
    # The order of the group added to S: the same equation, other bytes.
    order = 2**252 + 27742317777372353535851937790883648493
    value = int.from_bytes(bytes.fromhex(signed[-65:-1].decode()), "little") + order
    refused(lambda: check(signed[:-65] + value.to_bytes(32, "little").hex().encode() + b"\n"), "not one of this", 5)

    write_log(store, 2, other)
    assert Log(store, HISTORY).read(2) is not None
    refused(lambda: Log(store, HISTORY, TRUST).read(2), "not signed by a trusted key", 5)
    document = encode_anchor(small_anchor())
    facts = version(3, parts=replace(delta_parts(3), target=small_anchor().target))
    refused(lambda: open_anchor(facts, document, "anchor", TRUST), "not signed by a trusted key", 5)
    refused(lambda: open_anchor(facts, own.sign(document, COMMIT_KIND), "anchor", TRUST), "not one of this anchor", 5)
    assert open_anchor(facts, own.sign(document, ANCHOR_KIND), "anchor", TRUST) == small_anchor()
    assert open_anchor(facts, document, "anchor", NO_TRUST) == small_anchor()


# Commits


def test_rule_094_a_commit_is_the_one_of_its_key(store: Store) -> None:
    line = encode_version(version(2))
    refused(lambda: decode_version(line, 3, "commit"), "is the commit of version 2, 3 expected")
    write_log(store, 1)
    commit(store, version(2, history=OTHER_HISTORY))
    refused(lambda: Log(store, HISTORY).read(2), f"history {OTHER_HISTORY}", 5)


def test_rule_095_previous(store: Store) -> None:
    refused_members("first", {"previous": blake3_text(b"\1" * 32)}, "null in version 1, and in no other")
    refused_members("commit", {"previous": None}, "null in version 1, and in no other")
    for other in ("", "blake3:", b"\1".hex() * 32, 0, False):
        refused_members("commit", {"previous": other}, "previous")
    first = write_log(store, 3)[0]
    log = Log(store, HISTORY)
    assert [each.version.number for each in log.following(first, 3)] == [2, 3]
    # A signature more changes no line, but the bytes that the next commit names.
    data = store.get(commit_key(2), most_bytes=1 << 16)
    assert data is not None
    store.put(commit_key(2), signing_key().sign(data, COMMIT_KIND))
    refused(lambda: log.following(first, 3), "0000000003.json: does not follow the commit of version 2")


def test_rule_096_kinds() -> None:
    for other in ("delta ", "break", "", None, ["delta"]):
        refused_members("commit", {"kind": other}, "kind")
    delta = json.loads(lines()["commit"][0])
    refused_members("first", delta | {"version": 1, "previous": None}, "cannot be a delta")
    again = version(2, parts=AnchorParts(STATES[2], b"\7" * 32, 900, 3, 5), anchor=2)
    assert decode_version(encode_version(again), 2, "commit").version == again


def test_rule_097_the_newest_anchor() -> None:
    for other in (0, 3, -1, True, "1", None):
        refused_members("commit", {"anchor": other}, "anchor")
    for right in (1, 2):
        assert decode_version(encode_version(version(2, anchor=right)), 2, "commit").version.anchor == right
    parts = AnchorParts(STATES[2], b"\7" * 32, 900, 3, 5)
    refused(lambda: decode_version(encode_version(version(2, parts=parts)), 2, "commit"), "anchor at version 1")


def test_rule_098_a_delta_starts_where_the_version_before_ended(store: Store) -> None:
    first = write_log(store, 2)[0]
    parts = replace(delta_parts(2), base=STATES[7])
    commit(store, version(2, previous=first.blake3, parts=parts))
    refused(lambda: Log(store, HISTORY).following(first, 2), "starts from another state than that of version 1")


def test_rule_099_no_version_is_missing(store: Store) -> None:
    first = write_log(store, 40)[0]
    store.delete(commit_key(20))
    refused(lambda: Log(store, HISTORY).following(first, 40), "0000000020.json: is not there, although version 40 is")


def test_rule_100_what_a_receiver_has_seen_is_there(store: Store) -> None:
    log = write_log(store, 3)
    seen = Known(HISTORY, 3, log[2].blake3)
    reader = Log(store, HISTORY)
    assert reader.check_known(seen, "rollout") == log[2]
    refused(lambda: reader.check_known(replace(seen, blake3=b"\1" * 32), "rollout"), "3 is another than the one", 5)
    refused(lambda: reader.check_known(replace(seen, history=OTHER_HISTORY), "rollout"), "rollout follows history", 5)
    store.delete(commit_key(3))
    refused(lambda: reader.check_known(seen, "rollout"), "ends below version 3, which rollout has seen", 5)


# Anchors


def test_rule_101_an_anchor_is_the_one_of_its_key() -> None:
    refused_members("anchor", {"kind": "manifest"}, "is not the anchor of version 3")
    refused_members("anchor", {"version": 4}, "is not the anchor of version 3")
    refused_members("anchor", {"id": place_of(4).id}, "is not the anchor of version 3")


def test_rule_102_an_anchor_is_the_one_of_its_commit() -> None:
    anchor, document = small_anchor(), encode_anchor(small_anchor())
    total = sum(file.size for file in anchor.files)
    parts = AnchorParts(anchor.target, object_digest(document), len(document), len(anchor.files), total)

    def opened(version: Version, data: bytes = document) -> Anchor:
        return open_anchor(version, data, "anchor", TRUST)

    alone = version(3, parts=parts, anchor=3)
    assert opened(alone) == anchor
    refused(lambda: opened(alone, signing_key().sign(document, ANCHOR_KIND)), "not the object that the commit names")
    for other in (replace(parts, file_count=5), replace(parts, file_bytes=total + 1)):
        refused(partial(opened, replace(alone, parts=other)), "lists 4 files")
    refused(lambda: opened(replace(alone, parts=replace(parts, target=STATES[9]))), "another history or state")
    refused(lambda: opened(replace(alone, history=OTHER_HISTORY)), "another history or state")
    signed = signing_key().sign(document, ANCHOR_KIND)
    beside = version(3, parts=replace(delta_parts(3), target=anchor.target))
    assert opened(beside, signed) == anchor
    refused(lambda: opened(version(3), signed), "another history or state")


def test_rule_103_files_are_those_of_a_checkpoint() -> None:
    refused_anchor(lambda anchor: replace(anchor, files=anchor.files[::-1]), "canonical order")
    refused_anchor(lambda anchor: replace(anchor, files=(anchor.files[0], *anchor.files)), "canonical order")
    refused_anchor(lambda anchor: replace(anchor, files=anchor.files[:2]), "shards")
    for path in ("", "/a", "../a", ".a", "a//b", "a\\b", "a\n", "c:d", "a/" * 2048 + "a"):
        refused_anchor(changed_file(0, path=path), "unsafe name")
    refused_anchor(changed_file(1, path="config.json/x"), "also the folder of another")
    refused_anchor(changed_file(0, kind=1), "its name says otherwise")
    refused_anchor(changed_file(2, kind=2), "its name says otherwise")
    refused_anchor(changed_file(3, kind=2), "has to be a weight map")
    refused_anchor(changed_file(1, kind=3), "cannot be a weight map")
    refused_anchor(changed_file(1, path="consolidated.00.pth"), "second copy")
    refused_anchor(changed_file(2, path="model-00001-of-00002.safetensors"), "is one of 2 shards")
    refused_members("anchor", {"skipped": [1]}, "patterns")
    refused_anchor(lambda anchor: replace(anchor, skipped=("",)), "empty")
    refused_anchor(lambda anchor: replace(anchor, skipped=("x" * 16_385,)), "at most 16384")
    refused_anchor(lambda anchor: replace(anchor, skipped=("c*.json",)), "is skipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "MAX_PATHS_BYTES", 20)
        refused_anchor(lambda anchor: replace(anchor, skipped=("*.bin",)), "with skip patterns at most 20")
    for kind in (0, 4, -1, True):
        members = json.loads(lines()["anchor"][0])
        members["files"][0]["kind"] = kind
        refused_members("anchor", members, "kind")


def test_rule_104_sizes() -> None:
    for size in (0, 8):
        ranges = (b"\3" * 32,) if size else ()
        refused_anchor(changed_file(2, size=size, ranges=ranges), "more or less than its kind allows")
    anchor = with_files(changed_file(2, size=9, ranges=(b"\3" * 32,))(small_anchor()))
    assert decode_anchor(encode_anchor(anchor), place_of(3), "anchor")[0] == anchor
    two, most = (b"\1" * 32, b"\2" * 32), 64 << 20
    refused_anchor(changed_file(0, size=most + 1, ranges=two), "more or less than its kind allows")
    refused_anchor(changed_file(3, size=100_000_001, ranges=two), "more or less than its kind allows")
    anchor = with_files(changed_file(3, size=100_000_000, ranges=two)(small_anchor()))
    assert decode_anchor(encode_anchor(anchor), place_of(3), "anchor")[0] == anchor
    sidecars = [RangedFile(f"{number:02}", 2, most, b"\1" * 32, (b"\1" * 32,)) for number in range(17)]
    refused_anchor(lambda anchor: replace(anchor, files=(*sidecars, *anchor.files)), "sidecars have more than")


def test_rule_105_ranges() -> None:
    most = 64 << 20
    for size, wrong in ((0, 1), (1, 0), (1, 2), (most, 2), (most + 1, 1), (2 * most, 3), (2 * most + 1, 2)):
        refused_anchor(
            changed_file(2, size=size, ranges=(b"\3" * 32,) * wrong), f"has {size} bytes, and {wrong} ranges"
        )
    for size, right in ((most, 1), (2 * most, 2), (2 * most + 1, 3)):
        anchor = with_files(changed_file(2, size=size, ranges=(b"\3" * 32,) * right)(small_anchor()))
        assert decode_anchor(encode_anchor(anchor), place_of(3), "anchor")[0] == anchor
    refused_members(
        "anchor", {"files": [json.loads(lines()["anchor"][0])["files"][2] | {"bytes": 1 << 62}]}, "2 ranges"
    )
    refused_anchor(changed_file(0, ranges=(b"\2" * 32,)), "another blake3 than its only range")
    refused_anchor(changed_file(1, blake3=b"\2" * 32), "another blake3 than its only range")


def test_rule_106_values_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    line = encode_anchor(small_anchor())
    monkeypatch.setattr(anchors, "_MAX_VALUES", sum(map(line.count, b",[{")))
    decode_anchor(line + b"x:,,,\n", place_of(3), "anchor")
    for more in (b"1,1", b"[]", b"{}"):
        broken = line[:-2] + b',"x":' + more + b"}\n"
        refused_data("anchor", broken, "values")
    monkeypatch.undo()
    refused(
        lambda: decode_anchor(b"[" + b"[]," * (1 << 22) + b"[]]\n", place_of(3), "anchor"), "more than 8388608 values"
    )


def test_rule_107_the_files_make_up_the_digest() -> None:
    anchor = replace(small_anchor(), target=STATES[3])
    refused(lambda: decode_anchor(encode_anchor(anchor), place_of(3), "anchor"), "files digest")
    for index, facts in ((2, {"blake3": b"\7" * 32}), (0, {"path": "config.jsom"}), (0, {"path": "a"})):
        broken = changed_file(index, **facts)(small_anchor())
        refused_data("anchor", encode_anchor(broken), "files digest")


# What nobody trusts


def test_rule_108_an_acknowledgement_is_the_one_of_its_key(store: Store) -> None:
    for other in ("", ".a", "-a", "a/b", "a b", "a\n", "\u00e9", "a" * 129):
        refused_members("acks", {"receiver": other}, "name")
    for stage in ("", "stage", "applied ", "STAGED"):
        refused_members("acks", {"stage": stage}, "stage")
    said = acknowledgement()
    place = AcknowledgementPlace(said.place, said.receiver, said.stage)
    assert read_acknowledgement(store, place) is None
    others = (place._replace(place=place_of(3)), place._replace(receiver="b"), place._replace(stage="applied"))
    for key in others:
        store.put(acknowledgement_key(*key), encode_acknowledgement(said, signing_key()))
        refused(partial(read_acknowledgement, store, key), "another acknowledgement")
    store.put(acknowledgement_key(*place), encode_acknowledgement(said, signing_key()))
    found = read_acknowledgement(store, place)
    assert found is not None and found[0] == said
    assert TRUST.signers(found[1], "acknowledgement") == (signing_key().public,)
    assert TRUST.signers(found[1], COMMIT_KIND) == ()


def test_rule_109_other_keys_are_no_part_of_the_remote() -> None:
    place = place_of(12)
    assert version_of_commit(commit_key(12)) == 12 == version_of_commit("commits/0000000012.json")
    assert place_of_version(prepared_key(place)) == (place, "commit.json")
    assert place_of_version(payload_key(place, 3)) == (place, "payloads/000003.safetensors")
    assert place_of_anchor(anchor_key(place)) == place == place_of_anchor(anchor_file_key(place, "a/b.json"))
    ours = AcknowledgementPlace(place, "a.staged", "applied")
    assert place_of_acknowledgement(acknowledgement_key(*ours)) == ours
    number, own = "0000000012", "0" * 31 + "c"
    others = (
        *("commits/12.json", "commits/00000000012.json", "commits/0000000012.json.new", "x/commits/0000000012.json"),
        *(f"commits/{0:010}.json", "commits/\u0661234567890.json", f"versions/{number}-{own}", f"versions/{number}/a"),
        *(f"versions/{number}-{own.upper()}/a", f"versions/{0:010}-{own}/a", f"anchors/{number}.json"),
        *(f"anchors/{number}-{own}", f"anchors/{number}-{own}/a", f"anchors/{number}-{own}.json.new"),
        *(f"acks/{number}-{own}/a", f"acks/{number}-{own}/a.done", f"acks/{number}-{own}/.staged"),
        *(f"acks/{number}-{own}/a b.staged", f"acks/{number}-{own}/-a.staged", f"acks/{number}-{own}/a/b.staged"),
        f"acks/{number}-{own}/{'a' * 129}.staged",
    )
    for key in others:
        assert version_of_commit(key) is None, key
        assert place_of_version(key) is None, key
        assert place_of_anchor(key) is None, key
        assert place_of_acknowledgement(key) is None, key


def test_rule_110_a_hint_is_never_refused(store: Store) -> None:
    hint = Hint(HISTORY, place_of(7), "prepared", CREATED)
    line = encode_hint(hint)
    assert decode_hint(line) == hint
    assert read_hint(store) is None
    members = json.loads(line)
    others = [
        b"",
        b"{}\n",
        b"[]\n",
        b"<html>",
        b"\xff",
        b"[" * 60_000,
        line[:-1],
        line + line,
        line[:-2] + b',"x":"' + b"x" * 65_536 + b'"}\n',
        *(encode_members(without(members, key)) for key in members),
        *(encode_members(members | {key: [1]}) for key in members),
        *(encode_members(members | {"version": version}) for version in NO_VERSIONS),
        encode_members(members | {"state": "done"}),
        encode_members(members | {"format": "dcr-2"}),
    ]
    for data in others:
        assert decode_hint(data) is None, data[:80]
        store.put(HINT_KEY, data)
        assert read_hint(store) is None
        # It counts as absent for who goes without it, not for who removes what it may speak of.
        refused(partial(require_hint, store), "next.json")
    store.put(HINT_KEY, line)
    assert read_hint(store) == require_hint(store) == hint


# Parts


ATTEMPT = Attempt(HISTORY, 3, b"\5" * 32, 4, "run/0", b"\6" * 32)


def part_table(rank: int = 1, **facts: Any) -> PartTable:
    """The table of a part of two slices and two payloads."""
    runs = (Run(rank, 0, 9, 1), Run(rank + 4, 0, 9, 1))
    slices = (
        SliceRow(0, 3, 0, 100, b"\1" * 16, b"\2" * 16, 4, 7, runs[:1]),
        SliceRow(2, 2, 50, 10, bytes(16), b"\3" * 16, 1, 10, runs[1:]),
    )
    payloads = (PayloadRow(900, b"\4" * 32), PayloadRow(800, b"\5" * 32))
    known: dict[str, Any] = {"slices": slices, "file_runs": (), "payloads": payloads}
    return PartTable(**known | facts)


def part_of(table: bytes, rank: int = 1) -> PartCommit:
    return PartCommit(rank, object_digest(table), len(table), CREATED, PUBLISHER)


def refused_part(data: bytes, match: str) -> None:
    refused(lambda: decode_part(data, ATTEMPT, 1, "part"), match)


def refused_table(data: bytes, match: str, *, part: PartCommit | None = None) -> None:
    refused(lambda: open_table(part or part_of(data), ATTEMPT, data, "table"), match)


def refused_parts(made: tuple[Sides, list[tuple[Slice, ...]], list[PartTable]], match: str) -> None:
    refused(lambda: merge(replace(ATTEMPT, ranks=2), *made), match)


def test_rule_111_a_part_is_the_one_of_its_key() -> None:
    part = part_of(encode_table(part_table()))
    line = encode_part(ATTEMPT, part)
    assert decode_part(line, ATTEMPT, 1, "part")[0] == part
    members = json.loads(line)
    for key in ("history", "version", "id", "kind", "rank", "ranks", "attempt", "previous", "source"):
        for wrong in ("other", 2, True):
            refused_part(encode_members(members | {key: wrong}), f"its {key} is")
        refused_part(encode_members(without(members, key)), f"its {key} is")
    for key in ("table", "created", "publisher"):
        refused_part(encode_members(without(members, key)), key)
    places = {
        ATTEMPT.place,
        replace(ATTEMPT, history=OTHER_HISTORY).place,
        replace(ATTEMPT, version=4).place,
        replace(ATTEMPT, previous=b"\1" * 32).place,
        replace(ATTEMPT, ranks=5).place,
        replace(ATTEMPT, text="run/1").place,
        replace(ATTEMPT, source=b"\1" * 32).place,
    }
    assert len(places) == 7
    lines = ("dcr-1 part", HISTORY, "3", "05" * 32, "4", "06" * 32, "run/0")
    assert ATTEMPT.place.id == object_digest("".join(f"{each}\n" for each in lines).encode()).hex()[:32]


def test_rule_112_parts_are_signed_by_the_same_key() -> None:
    line = encode_part(ATTEMPT, part_of(encode_table(part_table())))
    for data, is_right in (
        (signing_key().sign(line, "part"), True),
        (line, False),
        (signing_key(1).sign(line, "part"), False),
        (signing_key().sign(line, COMMIT_KIND), False),
    ):
        signed = decode_part(data, ATTEMPT, 1, "part")[1]
        if is_right:
            TRUST.check(signed, "part", "part")
        else:
            refused(partial(TRUST.check, signed, "part", "part"), "signed by a trusted key|signature by trusted key", 5)


def test_rule_113_a_table_is_the_one_of_its_part() -> None:
    data = encode_table(part_table())
    assert open_table(part_of(data), ATTEMPT, data, "table") == part_table()
    for other in (data[:-1], data + b"\0", bytes([*data[:-1], data[-1] ^ 1]), b""):
        refused_table(other, "blake3 differs", part=part_of(data))


def test_rule_114_the_columns_of_a_table() -> None:
    columns = decode_document("part", encode_table(part_table()), None, "table")
    for name in columns:
        for broken in (without(columns, name), columns | {name: columns[name][:0]}):
            if name == "file.runs" and name in broken:
                continue
            data = encode_document("part", broken)[0]
            refused_table(data, f"{name}|the same length|runs")
    for name in ("slice.runs", "file.runs"):
        column = np.array([1, 5] if name == "slice.runs" else [1], "<u4")
        data = encode_document("part", columns | {name: column})[0]
        refused_table(data, "fewer runs")
    data = encode_document("part", columns | {"slice.runs": np.array([1, 0], "<u4")})[0]
    refused_table(data, "belong to nothing")


def test_rule_115_runs_are_in_payloads_of_their_rank() -> None:
    for rank in (0, 1, 3):
        data = encode_table(part_table(rank))
        assert open_table(part_of(data, rank), ATTEMPT, data, "table") == part_table(rank)
        for other in {0, 1, 2, 3} - {rank}:
            refused_table(data, "not one of rank", part=part_of(data, other))
        few = encode_table(part_table(rank, payloads=part_table().payloads[:1]))
        refused_table(few, "not one of rank", part=part_of(few, rank))


def merging(tmp_path: Path) -> tuple[Sides, list[tuple[Slice, ...]], list[PartTable]]:
    """Two tensors compared by two ranks, of which nothing changed, and a file that is new."""
    tensors = {"a": tensor_of("BF16", (8, 8)), "b": tensor_of("BF16", (8, 8), 1)}
    base = open_checkpoint(write_checkpoint(tmp_path / "base", tensors))
    target = open_checkpoint(write_checkpoint(tmp_path / "target", tensors, sidecars={"config.json": b"{}"}))
    with base.reader() as old, target.reader() as new:
        sides = Sides(base, target, base.files_digest(old), target.files_digest(new))
    digests = [digest_bytes(tensor_digest(tensors[name][2])) for name in "ab"]
    tables = [
        PartTable((SliceRow(number, 3, 0, 64, digest, digest, 0, 0, ()),), (), ())
        for number, digest in enumerate(digests)
    ]
    tables[0] = replace(tables[0], file_runs=((Run(0, 0, 4, 1),), (), ()), payloads=(PayloadRow(900, b"\4" * 32),))
    return sides, cut(base, target, 2), tables


def test_rule_116_parts_are_their_shares(tmp_path: Path) -> None:
    sides, shares, tables = merging(tmp_path)
    attempt = replace(ATTEMPT, ranks=2)
    merged = merge(attempt, sides, shares, tables)
    assert merged.base.content == merged.target.content and merged.base.files != merged.target.files
    row = tables[1].slices[0]
    others: list[tuple[SliceRow, ...]] = [(), (row, row)]
    others += [
        (replace(row, tensor=5),),
        (replace(row, side=2),),
        (replace(row, start=5),),
        (replace(row, elements=5),),
    ]
    for slices in others:
        broken = [tables[0], replace(tables[1], slices=slices)]
        refused_parts((sides, shares, broken), "does not cover its share")
    run = (Run(0, 0, 4, 1),)
    for file_runs in ((), (run,), ((), (), ()), (run, run, ())):
        broken = [replace(tables[0], file_runs=file_runs), tables[1]]
        refused_parts((sides, shares, broken), "the part of rank 0")


def test_rule_117_all_parts_make_the_version_before(tmp_path: Path) -> None:
    """That another state is refused, and nothing committed, is tests/test_parts.py's."""
    sides, shares, tables = merging(tmp_path)
    attempt = replace(ATTEMPT, ranks=2)
    before = merge(attempt, sides, shares, tables).base
    assert before.content == content_of(tmp_path / "base")
    row = replace(tables[1].slices[0], base_digest=b"\1" * 16)
    assert merge(attempt, sides, shares, [tables[0], replace(tables[1], slices=(row,))]).base != before


def content_of(checkpoint: Path) -> bytes:
    state = inspect(checkpoint, digest=True, jobs=1).state
    assert state is not None
    return state.content


# Decisions


def test_rule_118_a_decision_is_of_its_place(store: Store) -> None:
    refused_members("decision", {"version": 4}, "not that of its key")
    refused_members("decision", {"id": place_of(4).id}, "not that of its key")
    refused_members("decision", {"history": OTHER_HISTORY}, "not that of its key")
    refused_members("decision", {"decision": "later"}, "neither commit nor abort")
    place = place_of(3)
    assert read_decision(store, HISTORY, place) is None
    assert decide(store, HISTORY, place, ABORT) == ABORT
    assert decide(store, HISTORY, place, COMMIT) == ABORT == read_decision(store, HISTORY, place)
    store.put(decision_key(place), encode_decision(HISTORY, place_of(4), COMMIT))
    refused(lambda: decide(store, HISTORY, place, ABORT), "not that of its key")
