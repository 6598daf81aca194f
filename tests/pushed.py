"""Remotes for tests: histories that push makes from little checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.publisher.anchors import AnchorPlan, publish_anchor
from dcr_cli.push import PushResult, push
from dcr_cli.remote.history import require_history
from dcr_cli.remote.keys import manifest_key
from dcr_cli.remote.log import Log
from dcr_cli.remote.signing import load_signing_key
from dcr_cli.remote.version import Published
from dcr_cli.store.opening import open_store
from dcr_cli.store.retry import Patience
from dcr_cli.store.store import Store
from strategies import TensorData, tensor_of, with_changes, write_checkpoint

SHAPE = (64, 64)


def states(count: int, tensors: int = 4) -> list[dict[str, TensorData]]:
    """So many states of a little model, each a few elements away from the one before."""
    found = [{f"layers.{number}.weight": tensor_of("BF16", SHAPE, number) for number in range(tensors)}]
    for step in range(1, count):
        state = dict(found[-1])
        name = f"layers.{step % tensors}.weight"
        state[name] = with_changes(state[name], [step, 64 * step, 4095 - step], 1 + step)
        found.append(state)
    return found


@dataclass
class History:
    """A remote in this process's memory, and the checkpoints that its versions were published from."""

    folder: Path
    name: str = field(default_factory=lambda: uuid4().hex)
    key: Path | None = None
    checkpoints: list[Path] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"memory://{self.name}"

    def open(self) -> Store:
        return open_store(self.url, patience=Patience(deadline_seconds=0.0))

    def publish(self, tensors: dict[str, TensorData], **options: Any) -> PushResult:
        """Publish a state as the next version."""
        number = len(self.checkpoints) + 1
        config = f'{{"model_type": "tiny", "step": {number}}}\n'.encode()
        sidecars = {"config.json": config, "tokenizer/vocab.txt": b"a\nb\n"}
        path = write_checkpoint(
            self.folder / f"v{number}", tensors, shards=2, sidecars=sidecars, metadata={"format": "pt"}
        )
        result = push(path, self.url, baseline=self.folder / "baseline", sign_key=self.key, jobs=1, **options)
        self.checkpoints.append(path)
        return result

    def version(self, number: int) -> Path:
        """The checkpoint that a version was published from."""
        return self.checkpoints[number - 1]

    def commit(self, number: int) -> Published:
        with self.open() as store:
            return Log(store, require_history(store).id).require(number)

    def anchor(self, number: int) -> None:
        """Publish an anchor of a version that has a delta."""
        published = self.commit(number).version
        plan = AnchorPlan(published.history, published.place, published.target)
        with self.open() as store:
            key = load_signing_key(self.key) if self.key is not None else None
            publish_anchor(store, open_checkpoint(self.version(number)), plan, key=key)

    def remove_delta(self, number: int) -> None:
        """Remove a version's objects, as prune does: its manifest first."""
        place = self.commit(number).version.place
        with self.open() as store:
            store.delete(manifest_key(place))
            for entry in store.list(f"versions/{place}/"):
                store.delete(entry.key)


def history(folder: Path, versions: int, **options: Any) -> History:
    """A remote of so many versions: an anchor, then deltas."""
    folder.mkdir(exist_ok=True)
    found = History(folder, **options)
    for state in states(versions):
        found.publish(state)
    return found
