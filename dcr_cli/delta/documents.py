"""What a delta says, wherever it lies: its commit, manifest and digests, checked against each other.

Fetching them is the business of whoever knows where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr_cli.checkpoint.digest import DIGEST_BYTES, content_digest, files_digest
from dcr_cli.delta.commit import Commit, open_digests, open_manifest
from dcr_cli.delta.document import CONTENT_LIMIT
from dcr_cli.delta.manifest import Manifest, TensorRow
from dcr_cli.errors import DamagedError

# The most bytes of a manifest or digests object: what zstd makes of content that cannot be compressed is larger than it
# by less than this.
OBJECT_LIMIT = CONTENT_LIMIT + (CONTENT_LIMIT >> 7)


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a delta. `digests` are those of its tensors without pieces, in order."""

    commit: Commit
    manifest: Manifest
    digests: NDArray[np.uint8]

    def tensors(self) -> Iterator[tuple[TensorRow, bytes]]:
        """All tensors of the target in canonical order, each with the 16 bytes of its digest."""
        others = self.digests.tobytes()
        place = 0
        for row in self.manifest.tensors:
            if row.digest is not None:
                yield row, row.digest
            else:
                yield row, others[place : place + DIGEST_BYTES]
                place += DIGEST_BYTES


def decode_documents(commit: Commit, manifest: tuple[str, bytes], digests: tuple[str, bytes]) -> Documents:
    """Decode the objects of a manifest and of its digests, each given with its name.

    They have to be those that the commit names, and to make up the state that it calls its target; else DamagedError.
    """
    decoded = open_manifest(commit, manifest[1], manifest[0])
    documents = Documents(commit, decoded, open_digests(commit, decoded, digests[1], digests[0]))
    content = content_digest((row.name, row.dtype, row.shape, digest) for row, digest in documents.tensors())
    if content != commit.target.content:
        facts = "its tensors do not make up the content digest of the commit's target"
        raise DamagedError(manifest[0], facts)
    if files_digest((file.path, file.kind, file.blake3) for file in decoded.files) != commit.target.files:
        raise DamagedError(manifest[0], "its files do not make up the files digest of the commit's target")
    return documents
