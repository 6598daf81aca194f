"""The kernels of dcr: one set of functions, compiled if they are there, else the NumPy reference.

The choice is made once, when this package is imported, and `describe` says what it was and why. Both sets give the same
bytes.
"""

from __future__ import annotations

try:
    from dcr_kernels.native import (
        Comparison,
        Decoded,
        Draft,
        Ranking,
        compare,
        context_decode,
        copy_box,
        digest,
        digest_changes,
        digest_spans,
        draft,
        gap_decode,
        gap_encode,
        gather,
        level,
        magnitude_bins,
        magnitude_encode,
        patch,
        patch_xor,
        position_bits,
        scan,
        whole_join,
        whole_split,
    )
except ImportError as _error:
    from dcr_kernels.reference import (
        Comparison,
        Decoded,
        Draft,
        Ranking,
        compare,
        context_decode,
        copy_box,
        digest,
        digest_changes,
        digest_spans,
        draft,
        gap_decode,
        gap_encode,
        gather,
        magnitude_bins,
        magnitude_encode,
        patch,
        patch_xor,
        position_bits,
        scan,
        whole_join,
        whole_split,
    )

    _reason: str | None = str(_error)
else:
    _reason = None

__all__ = [
    "Comparison",
    "Decoded",
    "Draft",
    "Ranking",
    "compare",
    "context_decode",
    "copy_box",
    "describe",
    "digest",
    "digest_changes",
    "digest_spans",
    "draft",
    "gap_decode",
    "gap_encode",
    "gather",
    "magnitude_bins",
    "magnitude_encode",
    "patch",
    "patch_xor",
    "position_bits",
    "scan",
    "whole_join",
    "whole_split",
]


def describe() -> str:
    """Say which set of functions is bound, and why if it is the slow one."""
    if _reason is not None:
        return f"reference (no compiled kernels: {_reason})"
    return f"native ({level()})"
