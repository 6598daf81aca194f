"""zstd frames: the size they state is the size they have, and nothing else is decoded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, strategies as st

from dcr_cli.delta.frame import decode_frame, encode_frame, stated_bytes
from documents import raw_frame


@given(st.binary(max_size=3000), st.sampled_from([1, 3, 19]))
def test_round_trip(content: bytes, level: int) -> None:
    frame = encode_frame(content, level)
    assert stated_bytes(frame, len(content), 1024) == len(content)
    assert decode_frame(memoryview(frame), len(content), 1024) == content
    for other in (len(content) + 1, max(0, len(content) - 1)):
        if other != len(content):
            with pytest.raises(ValueError, match="zstd"):
                decode_frame(frame, other, 1 << 20)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_cut_and_longer_frames_are_refused(content: bytes, data: st.DataObject) -> None:
    frame = encode_frame(content, 3)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for broken in (frame[:cut], frame + b"\0", frame + frame, b"\x50\x2a\x4d\x18\0\0\0\0" + frame):
        with pytest.raises(ValueError, match=r"zstd|frame"):
            decode_frame(broken, len(content), 1 << 20)


def test_empty_frames_are_looked_at_too() -> None:
    frame = encode_frame(b"", 3)
    assert decode_frame(frame, 0, 1024) == b""
    # Blocks of 128 KiB, each of 4 bytes, in a frame that states no bytes.
    bomb = frame[:6] + b"\x02\x00\x10x" * 10_000 + b"\x01\x00\x00"
    with pytest.raises(ValueError, match="frame of no bytes takes 40009"):
        decode_frame(bomb, 0, 1024)
    for broken in (frame[:-1], frame + b"\0", frame + frame, bomb[:46] + b"\x01\x00\x00"):
        with pytest.raises(ValueError, match=r"zstd|frame"):
            decode_frame(broken, 0, 1024)


def test_a_frame_that_holds_more_than_it_states_takes_no_memory() -> None:
    bomb = encode_frame(bytes(1 << 24), 3)
    assert len(bomb) < 2000
    with pytest.raises(ValueError, match="at most 1000"):
        stated_bytes(bomb, 1000, 1 << 27)
    with pytest.raises(ValueError, match="zstd"):
        decode_frame(raw_frame(bytes(5000), stated=1000), 1000, 1 << 27)


def test_windows_are_limited() -> None:
    assert decode_frame(raw_frame(b"abc", window_log=23), 3, 8 << 20) == b"abc"
    with pytest.raises(ValueError, match="window"):
        decode_frame(raw_frame(b"abc", window_log=24), 3, 8 << 20)


def test_threads_do_not_share() -> None:
    contents = [bytes([i]) * 10_000 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(lambda content: encode_frame(content, 1), contents * 10))
        decoded = list(pool.map(lambda frame: decode_frame(frame, 10_000, 1 << 20), frames))
    assert decoded == contents * 10
