"""One rank of nano-vllm on a processor, whose model is a live receiver: after each delta it has to be, bit for bit,
what nano-vllm's own loader makes of the target's folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import transformers
from torch import distributed

from dcr_cli.live import Receiver
from live_ranks import follow, leave, told_in


def main(rank: int, folder: Path) -> None:
    do_without_a_device()
    from nanovllm.utils.loader import load_model

    told, steps = told_in(folder)
    (base, *_), _ = steps
    distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=told["ranks"])
    config = transformers.AutoConfig.from_pretrained(base)
    # It knows no scaling, and takes for one that transformers says there is none.
    config.rope_scaling = None

    def loaded(path: Path) -> Any:
        model = empty_model(config)
        load_model(model, str(path))
        return model

    module = loaded(base)
    receiver = Receiver(module, partial(load_weights, module), checkpoint=base, jobs=1)
    leave(folder, rank, [shares for _, shares in follow(receiver, module, steps, loaded)])
    distributed.destroy_process_group()


def do_without_a_device() -> None:
    """Have what nano-vllm computes with on a device be there to be imported; here nothing is computed."""
    # Torch looks for Triton itself when it first compiles, and must not find what stands for it.
    torch.compile(lambda: None)
    for name in ("flash_attn", "triton", "triton.language"):
        sys.modules[name] = Mock()


def empty_model(config: Any) -> Any:
    from nanovllm.layers.rotary_embedding import get_rope
    from nanovllm.models.qwen3 import Qwen3ForCausalLM

    # Models of one process would share their rotary tables, and comparing them would be comparing one with itself.
    get_rope.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


class Given:
    """Stands for an open file: weights that come one after the other, each taken before the next one comes."""

    def __init__(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._weights = weights
        self._current: tuple[str, Any] = ("", None)

    def keys(self) -> Iterator[str]:
        for each in self._weights:
            self._current = each
            yield each[0]

    def get_tensor(self, name: str) -> Any:
        assert name == self._current[0]
        return self._current[1]


def load_weights(model: Any, weights: Iterable[tuple[str, Any]]) -> None:
    """Have nano-vllm's own loader, which reads a folder, take weights as they come: only what it opens is another."""
    from nanovllm.utils import loader

    with patch.multiple(loader, glob=lambda _: ["given"], safe_open=lambda *_: nullcontext(Given(weights))):
        loader.load_model(model, "")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
