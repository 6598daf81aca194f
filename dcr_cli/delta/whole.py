"""The whole form: all bytes of a block, or of a file, in planes that are raw or zstd frames (FORMAT 5.1).

Where it stands for a block that another encoding would make larger is encoding.py's matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import dcr_kernels as kernels
from dcr_cli.delta.bits import read_varint, write_varint
from dcr_cli.delta.frame import decode_frame, encode_frame

FRAME_WINDOW_LIMIT = 8 << 20

Elements = NDArray[Any]


def encode_whole(elements: Elements) -> bytes:
    """Encode all of a block's elements (FORMAT 5.1)."""
    width = elements.dtype.itemsize
    mask, parts = 0, [b""]
    for plane, data in enumerate(kernels.whole_split(elements, width)):
        raw = data.tobytes()
        # The smallest frame of any content takes more than a dozen bytes.
        frame = encode_frame(raw, 1) if len(raw) >= 16 else b""
        size = write_varint(len(frame))
        if frame and len(size) + len(frame) < len(raw):
            mask |= 1 << plane
            parts += [size, frame]
        else:
            parts.append(raw)
    parts[0] = bytes([mask])
    return b"".join(parts)


def decode_whole(form: memoryview, elements: int, width: int) -> Elements:
    """Decode a whole form of `elements` elements; memory is bounded by them. ValueError if malformed."""
    if not len(form):
        raise ValueError("empty whole form: at byte 0")
    mask, at = form[0], 1
    if mask >> width:
        raise ValueError(f"planes beyond the {width} of the element: at byte 0")
    if not mask and len(form) == 1 + width * elements:
        raw = np.frombuffer(form, np.uint8, offset=1).reshape(width, elements)
        return np.frombuffer(raw.tobytes("F"), f"<u{width}")
    planes = np.empty((width, elements), np.uint8)
    for plane in range(width):
        size = elements
        if mask >> plane & 1:
            size, at = read_varint(form, at)
        if size > len(form) - at:
            raise ValueError(f"plane {plane} ends after the block: at byte {at}")
        data: bytes | memoryview = form[at : at + size]
        if mask >> plane & 1:
            data = decode_frame(data, elements, FRAME_WINDOW_LIMIT)
        planes[plane] = np.frombuffer(data, np.uint8)
        at += size
    if at != len(form):
        raise ValueError(f"bytes after the last plane: at byte {at}")
    return np.frombuffer(kernels.whole_join(planes, width), f"<u{width}")
