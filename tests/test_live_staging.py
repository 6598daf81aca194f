"""What of a delta a module is concerned with."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dcr_cli import diff
from dcr_cli.changes.blocks import is_moved, may_change
from dcr_cli.delta.chain import ChainPayloads
from dcr_cli.delta.delta import open_delta
from dcr_cli.delta.documents import Documents
from dcr_cli.delta.manifest import TensorRow
from dcr_cli.delta.payload_reader import PayloadReader
from dcr_cli.errors import UnsupportedError
from dcr_cli.live import Receiver
from dcr_cli.live.offer import Offer
from live_modules import FORMS, MADE, Converting, Engine, held, loaded, new_bits, write


def test_rows_that_change_something() -> None:
    row = TensorRow("a", "F32", (2,), "a", (), None)
    assert not is_moved(row) and not may_change(row)
    assert is_moved(replace(row, source="b")) and may_change(replace(row, source="b"))
    assert not is_moved(replace(row, source=None))


@pytest.mark.parametrize("name", ["norm.weight", "a_log"])
def test_a_tensor_that_is_made_of_another_one_is_refused(tmp_path: Path, name: str) -> None:
    """Placed or made something else of: it is never passed over."""
    forms = {**FORMS, **MADE} if name == "a_log" else FORMS
    bits = new_bits(forms)
    base = write(tmp_path / "base", forms, bits)
    bits["conv.weight"][0] ^= 1
    diff(base, write(tmp_path / "target", forms, bits), tmp_path / "delta")
    module = loaded(Converting if name == "a_log" else partial(Engine, 0, 1), base)
    before = held(module)
    opened = open_delta(tmp_path / "delta")
    rows = [replace(row, source="other") if row.name == name else row for row in opened.manifest.tensors]
    documents = Documents(opened.commit, replace(opened.manifest, tensors=rows), opened.digests)
    with PayloadReader(opened.folder, opened.manifest.payloads) as payloads:
        offer = Offer("delta", documents, ChainPayloads([payloads]))
        message = "starts from tensor other, and not from what it is itself|what it was given is not known"
        for checkpoint in (base, None):
            with pytest.raises(UnsupportedError, match=message):
                Receiver(module, checkpoint=checkpoint).stage_offer(offer)
    assert held(module) == before
