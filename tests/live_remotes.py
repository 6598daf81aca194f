"""Remotes for tests of models that are patched where they serve: versions that are steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dcr_cli import PullResult, pull
from dcr_cli.push import push
from live_modules import FORMS, new_bits, train, write


class TrainedRemote:
    """A remote in a folder, whose versions can be decoded from slices, where its encodings are these."""

    encodings: tuple[str, ...] = ("gap", "whole")

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root / "remote")
        self.bits = new_bits(FORMS)
        self.versions: list[Path] = []
        self.publish()

    def publish(self, **options: Any) -> Path:
        """Publish the next step: its checkpoint."""
        if self.versions:
            self.bits = train(self.bits, FORMS, len(self.versions))
        path = write(self.root / f"v{len(self.versions) + 1}", FORMS, self.bits)
        push(path, self.url, baseline=self.root / "baseline", encodings=self.encodings, jobs=1, **options)
        self.versions.append(path)
        return path


class ReplicatedRemote(TrainedRemote):
    """A remote of `context` alone, a checkpoint that is pulled from it, and a folder for what that decodes."""

    encodings = ("context", "whole")

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.changes = root / "changes"
        self.changes.mkdir(0o700)
        self.pull()

    def pull(self, **options: Any) -> PullResult:
        return pull(self.url, self.root / "replica", publish_changes=self.changes, jobs=1, **options)
