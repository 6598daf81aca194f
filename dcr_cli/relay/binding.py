"""What binds the bodies of a remote: commits bind manifests and digests, manifests payloads, the documents of anchors
and of parts what belongs to these.

Nothing here fetches a body by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from dcr_cli.delta.commit import open_manifest
from dcr_cli.delta.file_rules import RANGE_BYTES, RangedFile, range_count
from dcr_cli.delta.manifest import PayloadRow
from dcr_cli.errors import DcrError
from dcr_cli.relay.checks import Bound, table_bound
from dcr_cli.relay.documents import Documents
from dcr_cli.relay.kinds import Kind, Named, require_named
from dcr_cli.relay.parents import UnavailableError, WrongError
from dcr_cli.remote.anchor import decode_anchor
from dcr_cli.remote.keys import Place, anchor_key, manifest_key, part_key

T = TypeVar("T")

# Of so many versions it is remembered what binds their payloads, and of so many anchors their files.
_VERSIONS, _ANCHORS = 64, 2


@dataclass(slots=True)
class Bindings:
    """What binds bodies, for the event loop. `read` is how all of a body is read: None if it is absent, or wrong."""

    documents: Documents
    read: Callable[[Named], Awaitable[bytes | None]]
    _rows: OrderedDict[Place, Sequence[PayloadRow]] = field(default_factory=OrderedDict)
    _files: OrderedDict[Place, dict[str, RangedFile]] = field(default_factory=OrderedDict)

    def forget(self, place: Place) -> None:
        """Read again what was read of a version, when it is needed."""
        self._rows.pop(place, None)
        self._files.pop(place, None)

    async def of(self, asked: Named, part: int) -> Bound | None:
        """What binds a body, or a range of it, as far as anything does; None if what would bind it is absent.

        WrongError if that is a document of a newer dcr, which can be handed on, but not be read.
        """
        assert asked.place is not None
        if asked.kind is Kind.ANCHOR_FILE:
            file = await self.file(asked)
            if file is None or part >= range_count(file.size):
                return None
            size = min(RANGE_BYTES, file.size - part * RANGE_BYTES)
            return Bound(size, file.ranges[part])
        if asked.kind is Kind.TABLE:
            document = require_named(part_key(asked.place, f"{asked.number:05d}.json"))
            data = await self.documents.get(document)
            return _read(lambda: table_bound(document, data)) if data is not None else None
        if asked.kind is Kind.PAYLOAD:
            return await self._of_payload(asked)
        version = await self.documents.version_of(asked.place)
        if version is None or version.delta is None:
            return None
        if asked.kind is Kind.MANIFEST:
            return Bound(version.delta.manifest_bytes, version.delta.manifest_blake3)
        return Bound(version.delta.digests_bytes, version.delta.digests_blake3)

    async def file(self, asked: Named) -> RangedFile | None:
        """What the anchor's document says of one of its files; None if there is none."""
        place = asked.place
        assert place is not None
        files = self._files.get(place)
        if files is None:
            document = require_named(anchor_key(place))
            data = await self.documents.get(document)
            if data is None:
                return None
            decode = self.documents.look(lambda: _read(lambda: decode_anchor(data, place, document.key)))
            files = self._files[place] = {file.path: file for file in (await decode)[0].files}
            if len(self._files) > _ANCHORS:
                self._files.popitem(last=False)
        return files.get(asked.path)

    async def _of_payload(self, asked: Named) -> Bound | None:
        assert asked.place is not None
        rows = self._rows.get(asked.place)
        if rows is None and asked.place != self.documents.news.making:
            # What nobody can be asked for now binds nothing; what is here was right when it came.
            with suppress(UnavailableError):
                rows = await self._read_rows(asked.place)
        if rows is None:
            return Bound()
        if asked.number >= len(rows):
            return None
        row = rows[asked.number]
        return Bound(row.bytes, row.blake3)

    async def _read_rows(self, place: Place) -> Sequence[PayloadRow] | None:
        """What the manifest of a version says of its payloads; None if there is none, or none that can be read."""
        version = await self.documents.version_of(place)
        if version is None or version.delta is None:
            return None
        asked, commit = require_named(manifest_key(place)), version.delta
        data = await self.read(asked)
        if data is None:
            return None
        try:
            manifest = await self.documents.look(lambda: open_manifest(commit, data, asked.key))
        except DcrError:
            return None
        self._rows[place] = manifest.payloads
        if len(self._rows) > _VERSIONS:
            self._rows.popitem(last=False)
        return manifest.payloads


def _read(read: Callable[[], T]) -> T:
    """What a document says."""
    try:
        return read()
    except DcrError as error:
        raise WrongError from error
