"""What belongs to a version beside its digests: which files it has, as its manifest or its anchor's document says."""

from __future__ import annotations

from dataclasses import dataclass

from dcr_cli.checkpoint.checkpoint import FileDigest
from dcr_cli.checkpoint.parts import SIDECAR
from dcr_cli.delta.manifest import Manifest
from dcr_cli.fetch.anchors import wanted_of
from dcr_cli.receiver.install.wanted import Wanted
from dcr_cli.remote.anchor import Anchor


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a version, and the patterns of what its publisher left out.

    `size` of a shard means nothing here.
    """

    files: tuple[FileDigest, ...]
    skipped: tuple[str, ...]

    @property
    def sidecars(self) -> dict[str, bytes]:
        """The blake3 of each file that is neither shard nor weight map."""
        return {file.path: file.blake3 for file in self.files if file.kind == SIDECAR}


def listing_of_manifest(manifest: Manifest) -> Listing:
    files = (FileDigest(row.path, row.kind, row.size, row.blake3) for row in manifest.files)
    return Listing(tuple(files), tuple(manifest.skipped))


def listing_of_wanted(wanted: Wanted) -> Listing:
    files = (FileDigest(file.path, file.kind, file.size, file.blake3) for file in wanted.files)
    return Listing(tuple(files), wanted.skipped)


def listing_of_anchor(anchor: Anchor) -> Listing:
    return listing_of_wanted(wanted_of(anchor))
