"""What --to and --aside do around the folder that they build: what is in their way, what they keep, and modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcr_cli.apply import apply
from dcr_cli.delta.encoding import Encoding
from dcr_cli.delta.manifest import Box
from faults import StoppedError, watching
from receivers import make_delta, put_into_boxes, tree
from strategies import tensor_of, with_changes, write_checkpoint


def test_a_spool_that_a_killed_run_left(tmp_path: Path) -> None:
    shape = (90, 70)
    old = {"w": tensor_of("BF16", shape)}
    new = {"w": with_changes(old["w"], range(0, 6300, 101))}
    base, target = write_checkpoint(tmp_path / "base", old), write_checkpoint(tmp_path / "target", new)
    delta = make_delta(base, base, tmp_path / "delta")
    boxes = [(Box((0, at), (1, 1), (90, 35)), Encoding.CONTEXT) for at in (0, 35)]
    put_into_boxes(delta, "w", (old["w"], new["w"]), boxes)

    def stop(kind: str, path: str, other: str) -> None:
        if (tmp_path / ".out.dcr-partial/.dcr/spool").exists():
            raise StoppedError

    with watching(stop), pytest.raises(StoppedError):
        apply(delta, base, to=tmp_path / "out")
    apply(delta, base, to=tmp_path / "out")
    assert tree(tmp_path / "out") == tree(target)
