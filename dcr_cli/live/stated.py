"""The version of a remote that somebody says a module is at: whether there is one, and whether the module is at it."""

from __future__ import annotations

from dcr_cli.errors import NotFoundError, UsageError, WrongBaseError
from dcr_cli.fetch.source import Source
from dcr_cli.remote.keys import MOST_VERSION
from dcr_cli.remote.version import Published, Version

_SAY = "say the version that the module's checkpoint is at"


def find_stated(source: Source, version: int) -> Published:
    """Read the commit of a version; UsageError for what is no number of one, NotFoundError if there is none, or none
    that may be read."""
    if type(version) is not int or not 0 <= version <= MOST_VERSION:
        raise UsageError("version", f"is {version!r:.40}, the number of a version expected", hint=_SAY)
    published = source.log.read(version, is_denied_absent=True) if version else None
    if published is None:
        newest = source.log.newest(0)
        there = f"1 to {newest} are there" if newest > 1 else "1 is there" if newest else "none is there yet"
        facts = f"there is no version {version}, or it may not be read: {there}"
        raise NotFoundError(source.shown, facts, hint=_SAY)
    return published


def check_stated(source: Source, version: Version, content: bytes | None) -> None:
    """Raise WrongBaseError, which says what else it is, if a module of this content is not at a version; without it,
    nobody knows."""
    if content is None or content == version.target.content:
        return
    found = source.log.find_content(content, source.log.newest(version.number))
    known = f" (version {found})" if found is not None else ""
    facts = f"the module is at content blake3:{content.hex()[:16]}{known}, which is not version {version.number}"
    raise WrongBaseError(source.shown, facts, hint=_SAY + (f": version={found}" if found is not None else ""))
