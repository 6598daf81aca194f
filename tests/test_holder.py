"""A lock file names its holder, or, whatever else is in it, nobody who can be told to live."""

from __future__ import annotations

import socket

import pytest

from dcr_cli.holder import decode_holder, encode_holder, this_process


def test_this_process_lives() -> None:
    assert decode_holder(encode_holder(this_process())) == this_process()
    assert this_process().is_alive


@pytest.mark.parametrize("pid", ["²", "٣", "-1", "x", "1.5"])
def test_what_is_no_number_is_no_process(pid: str) -> None:
    found = decode_holder(f"{pid} 5 {socket.gethostname()}".encode())
    assert found is not None
    assert found.is_alive is None
