"""zstd frames: one whole frame to bytes and back, with nothing taken on trust.

What is in a frame is not its business. Errors are ValueError; who knows the document names it.
"""

from __future__ import annotations

import threading

import zstandard

# An empty frame needs 9 bytes. The library does not look at the blocks of a frame that states size 0.
_EMPTY_FRAME_LIMIT = 64


def encode_frame(content: bytes | memoryview, level: int) -> bytes:
    """Compress `content` into one frame that states its size, without checksum."""
    return _ZSTD.compressor(level).compress(content)


def stated_bytes(frame: bytes | memoryview, content_limit: int, window_limit: int) -> int:
    """Read from its head how many bytes `frame` holds. ValueError if it does not say, or says more than the limits."""
    try:
        facts = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"is not a zstd frame: {error}") from error
    if facts.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise ValueError("the zstd frame does not state its size")
    if facts.content_size > content_limit:
        raise ValueError(f"the zstd frame states {facts.content_size} bytes, at most {content_limit} are allowed")
    # A frame in a single segment has a window of its own size; there is no smaller one than 1024 otherwise.
    if facts.window_size > max(window_limit, 1024):
        raise ValueError(
            f"the zstd frame has a window of {facts.window_size} bytes, at most {window_limit} are allowed"
        )
    return int(facts.content_size)


def decode_frame(frame: bytes | memoryview, content_bytes: int, window_limit: int) -> bytes:
    """Decode exactly one frame that states `content_bytes`. ValueError if it is anything else.

    Memory is bounded by `content_bytes`, whatever the frame says.
    """
    stated_bytes(frame, content_bytes, window_limit)
    try:
        if content_bytes:
            content = _ZSTD.decompressor.decompress(
                frame, max_output_size=content_bytes, read_across_frames=False, allow_extra_data=False
            )
        else:
            content = _decode_empty(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    if len(content) != content_bytes:
        raise ValueError(f"the zstd frame holds {len(content)} bytes, not {content_bytes}")
    return content


def _decode_empty(frame: bytes | memoryview) -> bytes:
    if len(frame) > _EMPTY_FRAME_LIMIT:
        raise ValueError(f"a zstd frame of no bytes takes {len(frame)}")
    decoder = _ZSTD.decompressor.decompressobj()
    content = decoder.decompress(frame)
    if not decoder.eof or decoder.unused_data:
        raise ValueError("is not one whole zstd frame")
    return content


class _Zstd(threading.local):
    """Compressors and a decompressor for each thread; shared ones crash the process."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        if level not in self._compressors:
            self._compressors[level] = zstandard.ZstdCompressor(level=level)
        return self._compressors[level]


_ZSTD = _Zstd()
