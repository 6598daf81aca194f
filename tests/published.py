"""What a remote in a folder holds, read without `pull`: every version built from its anchor and the deltas after it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dcr_cli.apply import apply
from dcr_cli.checkpoint.digest import blake3_text, object_digest
from receivers import fresh_copy, tree


def commits(remote: Path) -> list[dict[str, Any]]:
    """The commits of a remote in order; there is no gap, and each names the one before."""
    found: list[dict[str, Any]] = []
    before = None
    for number, path in enumerate(sorted((remote / "commits").glob("*.json")), 1):
        assert path.name == f"{number:010d}.json"
        data = path.read_bytes()
        document = json.loads(data.split(b"\n")[0])
        assert document["version"] == number
        assert document["previous"] == before
        before = blake3_text(object_digest(data))
        found.append(document)
    return found


def version_folder(remote: Path, document: dict[str, Any]) -> Path:
    return remote / "versions" / f"{document['version']:010d}-{document['id']}"


def anchor_folder(remote: Path, document: dict[str, Any]) -> Path:
    return remote / "anchors" / f"{document['version']:010d}-{document['id']}" / "files"


def build_all(remote: Path, scratch: Path) -> list[dict[str, bytes]]:
    """The files of every version, oldest first."""
    trees: list[dict[str, bytes]] = []
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    receiver = scratch / "receiver"
    for document in commits(remote):
        if document["kind"] == "anchor":
            fresh_copy(anchor_folder(remote, document), receiver)
        else:
            delta = fresh_copy(version_folder(remote, document), scratch / "delta")
            line = (remote / "commits" / f"{document['version']:010d}.json").read_bytes().split(b"\n")[0]
            (delta / "commit.json").write_bytes(line + b"\n")
            shutil.rmtree(delta / "parts", ignore_errors=True)
            apply(delta, receiver)
        trees.append({path: data for path, data in tree(receiver).items() if not _is_left_over(path)})
    return trees


def _is_left_over(path: str) -> bool:
    """Whether a file is one that a killed writer has left beside a remote's objects."""
    return any(part.startswith(".") for part in path.split("/"))
