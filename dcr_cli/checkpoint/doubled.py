"""What to do about a shard whose tensors lie in other shards as well: a second copy of the weights, or a rank's part.

That it is refused is its caller's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dcr_cli.checkpoint.folder import Files, pattern_of, skip_hint
from dcr_cli.checkpoint.header import Header, TensorEntry

_RANKS = "shards of ranks need --layout"
# How programs call the files of ranks: rank-0, rank_0, mp_rank_00, tp0, pp-1.
_RANK_NAME = re.compile(r"rank[-_.]?\d|(?<![a-z])(tp|pp|ep|dp|mp)[-_.]?\d", re.IGNORECASE)
# So much of the beginning of each tensor is looked at.
_SEEN_BYTES = 1 << 16


def hint_about_doubled(files: Files, headers: Mapping[str, Header], path: str) -> str:
    """What to do about shard `path`. To leave it out is said only where that loses nothing, as far as can be seen
    without reading all of it: each of its tensors lies in another shard too, of the same form and bits."""
    if _RANK_NAME.search(path) is not None or not _is_copy(files, headers, path):
        return _RANKS
    return f"{_RANKS}; a second copy of the weights goes out: {skip_hint(pattern_of(path))}"


def _is_copy(files: Files, headers: Mapping[str, Header], path: str) -> bool:
    others = {
        entry.name: (other, entry) for other, header in headers.items() if other != path for entry in header.tensors
    }
    found = [(entry, others.get(entry.name)) for entry in headers[path].tensors]
    pairs = [(entry, *other) for entry, other in found if other is not None]
    if len(pairs) < len(found) or any((e.dtype, e.shape) != (o.dtype, o.shape) for e, _, o in pairs):
        return False
    return all(
        _beginning(files, headers, path, entry) == _beginning(files, headers, other, twin)
        for entry, other, twin in pairs
    )


def _beginning(files: Files, headers: Mapping[str, Header], path: str, entry: TensorEntry) -> bytes:
    data = bytearray(min(_SEEN_BYTES, entry.end - entry.begin))
    files.read_path_into(path, len(headers[path].raw) + entry.begin, data)
    return bytes(data)
