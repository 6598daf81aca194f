"""A second reader of remotes that lie in a folder, written from FORMAT.md alone on the second reader of deltas."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from second_reader import (
    BY_NAME,
    MEBIBYTE,
    SHARD,
    SIDECAR,
    WEIGHT_MAP,
    State,
    apply_delta,
    check_names,
    check_weight_map,
    digest_content,
    digest_files,
    digest_tensor,
    is_canonical,
    is_count,
    is_digest,
    is_safe,
    named_blake3,
    parse_header,
    parse_line,
    read_checkpoint,
    read_delta_of,
    require,
    split_header,
)

RANGE_BYTES = 64 * MEBIBYTE
ENCODINGS = {"context", "gap", "whole"}


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of a version: its members, and the blake3 of all its bytes."""

    members: dict[str, Any]
    blake3: str

    @property
    def number(self) -> int:
        return int(self.members["version"])

    @property
    def place(self) -> str:
        return f"{self.number:010d}-{self.members['id']}"

    @property
    def target(self) -> State:
        return State(self.members["target"]["content"], self.members["target"]["files"])


# 13.3: signed documents.


def open_signed(data: bytes, kind: str, limit: int = 65536) -> tuple[dict[str, Any], set[str]]:
    """Parse a signed document: its members, and the keys whose signatures are right."""
    require(len(data) <= limit, "the document is too large [87]")
    end = data.find(b"\n") + 1
    line, below = data[:end], data[end:]
    members = parse_line(line, limit)
    require(len(below) <= 16384 and below.count(b"\n") <= 16, "too much below the line [91]")
    require(not below or below.endswith(b"\n"), "the last line does not end [91]")
    signers = set()
    for text in below.split(b"\n")[:-1]:
        signature = re.fullmatch(rb"ed25519:([0-9a-f]{64}):([0-9a-f]{128})", text)
        if signature is None:
            require(not text.startswith(b"ed25519:"), "a malformed signature [92]")
            require(re.fullmatch(rb"[a-z][a-z0-9-]{0,31}:[!-~]{1,1024}", text), "a line that is none of these [91]")
            continue
        key, value = (bytes.fromhex(group.decode()) for group in signature.groups())
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(value, b"dcr-1 " + kind.encode() + b"\n" + line)
        except InvalidSignature:
            continue
        signers.add(key.hex())
    return members, signers


def is_id(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def check_place(members: dict[str, Any]) -> None:
    """Check the members that all documents of a version have."""
    require(is_id(members.get("history")) and is_id(members.get("id")), "history or id [89]")
    number = members.get("version")
    require(type(number) is int and 1 <= number <= 9_999_999_999, "version [89]")


def check_state(members: dict[str, Any]) -> None:
    state = members.get("target")
    require(isinstance(state, dict) and all(is_digest(state.get(each)) for each in ("content", "files")), "target [88]")


# 13.4: the log.


def read_log(root: Path, trusted: Collection[str] = ()) -> list[Commit]:
    """Read the commits of all versions; with trusted keys, each has to be signed by one of them."""
    history = parse_line((root / "dcr.json").read_bytes())
    require(is_id(history.get("history")), "history [89]")
    names = history.get("encodings")
    require(isinstance(names, list) and names and len(set(names)) == len(names), "encodings [90]")
    require(set(names or ()) <= ENCODINGS, "an encoding that is not known [90]")
    require(all(isinstance(history.get(member), str) for member in ("created", "publisher")), "created [88]")
    log: list[Commit] = []
    while (path := root / f"commits/{len(log) + 1:010d}.json").exists():
        commit, signers = read_commit(path.read_bytes(), len(log) + 1)
        members = commit.members
        require(members["history"] == history["history"], "another history [94]")
        require(not trusted or signers & set(trusted), "not signed by a trusted key [93]")
        require(members["previous"] == (log[-1].blake3 if log else None), "previous [95]")
        require(members["kind"] == "anchor" or members["base"] == log[-1].members["target"], "base [98]")
        log.append(commit)
    later = [path for path in (root / "commits").glob("*.json") if int(path.stem) > len(log)]
    require(not later, "a version is missing [99]")
    return log


def read_commit(data: bytes, number: int) -> tuple[Commit, set[str]]:
    members, signers = open_signed(data, "commit")
    check_place(members)
    check_state(members)
    require(members["version"] == number, "another version [94]")
    require("previous" in members, "previous [88]")
    require(members["previous"] is None if number == 1 else is_digest(members["previous"]), "previous [95]")
    kind, anchor = members.get("kind"), members.get("anchor")
    require(kind in (("anchor",) if number == 1 else ("delta", "anchor")), "kind [96]")
    require(type(anchor) is int and 1 <= anchor <= number, "anchor [97]")
    require(anchor == number or kind == "delta", "anchor [97]")
    require(all(isinstance(members.get(member), str) for member in ("created", "publisher")), "created [88]")
    if kind == "anchor":
        document, files = members.get("manifest"), members.get("payloads")
        require(isinstance(document, dict) and isinstance(files, dict), "manifest [88]")
        assert isinstance(document, dict) and isinstance(files, dict)
        require(is_digest(document.get("blake3")) and is_count(document.get("bytes")), "manifest [88]")
        require(is_count(files.get("bytes")) and is_count(files.get("count")), "payloads [88]")
    return Commit(members, named_blake3(data)), signers


# 13.6: anchors.


def read_anchor(root: Path, commit: Commit, to: Path, trusted: Collection[str] = ()) -> None:
    """Copy the files of the anchor of a version into the new folder `to`, and check that they are its state."""
    data = (root / f"anchors/{commit.place}.json").read_bytes()
    members, signers = open_signed(data, "anchor", 256 * MEBIBYTE)
    line = data[: data.index(b"\n") + 1]
    require(sum(line.count(byte) for byte in (b",", b"[", b"{")) <= 1 << 23, "too many values [106]")
    check_place(members)
    check_state(members)
    require(members.get("kind") == "anchor", "kind [101]")
    require(all(members[each] == commit.members[each] for each in ("version", "id")), "another version [101]")
    require(all(members[each] == commit.members[each] for each in ("history", "target")), "another state [102]")
    files = check_files(members)
    if commit.members["kind"] == "anchor":
        total = sum(file["bytes"] for file in files)
        require(commit.members["payloads"] == {"bytes": total, "count": len(files)}, "number or size of files [102]")
        require(
            commit.members["manifest"] == {"blake3": named_blake3(data), "bytes": len(data)}, "another anchor [102]"
        )
    else:
        require(not trusted or signers & set(trusted), "not signed by a trusted key [93]")
    for file in files:
        content = (root / f"anchors/{commit.place}/files" / file["path"]).read_bytes()
        found = [named_blake3(content[at : at + RANGE_BYTES]) for at in range(0, len(content), RANGE_BYTES)]
        require(len(content) == file["bytes"] and found == file["ranges"], f"{file['path']} has other bytes")
        (to / file["path"]).parent.mkdir(parents=True, exist_ok=True)
        (to / file["path"]).write_bytes(content)
    require(state_of_folder(to) == commit.target, "the target [86]")


def check_files(members: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the files of an anchor's document, each for itself and all together."""
    files, skipped = members.get("files"), members.get("skipped")
    require(isinstance(files, list) and all(isinstance(file, dict) for file in files), "files [88]")
    require(isinstance(skipped, list) and all(isinstance(text, str) and text for text in skipped), "skipped [88, 103]")
    assert isinstance(files, list) and isinstance(skipped, list)
    require(sum(len(text.encode()) for text in skipped) <= 16384, "skipped is too long [103]")
    paths = "".join(str(file.get("path")) for file in files).encode()
    require(not skipped or len(paths) <= 16 * MEBIBYTE, "paths beside skipped [103]")
    for file in files:
        path, kind, size, ranges = (file.get(member) for member in ("path", "kind", "bytes", "ranges"))
        require(isinstance(path, str) and type(kind) is int and is_count(size), "a file's members [88]")
        require(is_digest(file.get("blake3")) and isinstance(ranges, list) and all(map(is_digest, ranges)), "[88]")
        require(is_safe(path) and path and kind in (SHARD, SIDECAR, WEIGHT_MAP), f"path or kind of {path} [103]")
        parts = path.split("/")
        names = [path, *("/".join(parts[:count]) + end for count in range(1, len(parts)) for end in ("", "/"))]
        require(not any(fnmatchcase(name, text) for name in names for text in skipped), f"{path} is skipped [103]")
        least, most = {SHARD: (9, 1 << 63), SIDECAR: (0, 64 * MEBIBYTE), WEIGHT_MAP: (0, 100_000_000)}[kind]
        require(least <= size <= most, f"size of {path} [104]")
        require(len(ranges) == -(-size // RANGE_BYTES), f"ranges of {path} [105]")
        only = [file["blake3"]] if size else []
        require(kind == SHARD or len(ranges) > 1 or ranges == only, f"blake3 of {path} [105]")
        require(size or kind == SHARD or file["blake3"] == named_blake3(b""), f"blake3 of {path} [105]")
    kinds = {file["path"]: file["kind"] for file in files}
    require(is_canonical([file["path"] for file in files]), "order of paths [103]")
    above = {path[:at] for path in kinds for at in range(len(path)) if path[at] == "/"}
    require(not above & kinds.keys(), "a path is the folder of another [103]")
    require(1 <= list(kinds.values()).count(SHARD) <= 1 << 20, "number of shards [103]")
    require(list(kinds.values()).count(WEIGHT_MAP) <= 1, "two weight maps [103]")
    check_names(kinds)
    sidecar_bytes = sum(file["bytes"] for file in files if file["kind"] == SIDECAR)
    require(sidecar_bytes <= 1024 * MEBIBYTE, "sidecars are too large [104]")
    records = ((file["path"], file["kind"], bytes.fromhex(file["blake3"][7:])) for file in files)
    require(digest_files(records) == members["target"]["files"], "files digest [107]")
    return files


def state_of_folder(folder: Path) -> State:
    tensors, files = read_checkpoint(folder)
    content = digest_content(
        (name, BY_NAME[tensor.dtype], tensor.shape, digest_tensor(tensor.data)) for name, tensor in tensors.items()
    )
    shard_of = {
        name: path
        for path, (kind, header) in files.items()
        if kind == SHARD
        for name in parse_header(split_header(header)[0][8:])[1]
    }
    for kind, data in files.values():
        if kind == WEIGHT_MAP:
            check_weight_map(data, shard_of, set(shard_of.values()))
    return State(
        content, digest_files((path, kind, blake3.blake3(data).digest()) for path, (kind, data) in files.items())
    )


# 13.5 and 13.11: the way to a version.


def read_version(root: Path, commits: Iterable[Commit], scratch: Path, trusted: Collection[str] = ()) -> Path:
    """Make the state of the last of these commits, from the anchor of the first: a folder below `scratch`."""
    first, *others = commits
    folder = scratch / f"{first.number}"
    read_anchor(root, first, folder, trusted)
    for commit in others:
        require(commit.members["kind"] == "delta", "no delta leads over a break")
        delta = read_delta_of(commit.members, root / f"versions/{commit.place}")
        tensors, files = apply_delta(delta, folder)
        folder = scratch / f"{commit.number}"
        for file in delta.files:
            data = files[file.path]
            if file.kind == SHARD:
                entries = sorted(parse_header(data[8:])[1].items(), key=lambda entry: entry[1][2:])
                data += b"".join(tensors[name][2] for name, _ in entries)
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / file.path).write_bytes(data)
        require(state_of_folder(folder) == commit.target, "the target [86]")
    return folder


# 13.8: acknowledgements.


def read_acknowledgements(root: Path, commit: Commit, trusted: Collection[str] = ()) -> dict[str, set[str]]:
    """Who says how far they are with a version, as far as it counts: the stages, and in each the receivers."""
    found: dict[str, set[str]] = {"staged": set(), "applied": set()}
    for path in (root / f"acks/{commit.place}").glob("*"):
        members, signers = open_signed(path.read_bytes(), "acknowledgement")
        same = all(members.get(each) == commit.members[each] for each in ("history", "version", "id", "target"))
        name, stage = members.get("receiver"), members.get("stage")
        require(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name), "receiver [108]")
        require(stage in found and type(members.get("built")) is bool, "stage [108]")
        require(path.name == f"{name}.{stage}", "another key [108]")
        if same and (not trusted or signers & set(trusted)):
            found[str(stage)].add(str(name))
    return found
