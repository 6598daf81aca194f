"""vLLM's backend `dcr` for new weights: each worker takes them from a remote into the model that it serves.

    init_weight_transfer_engine  {"remote": URL, "version": N, ...}, the fields of `Settings`: learn, compare, say it
    start_weight_update          nothing
    update_weights               {"version": N}: begin to stage it, with `changes` once a pull has decoded it, and go on
                                 serving
    finish_weight_update         write it

vLLM calls it between steps of the model, and holds requests only while a call is answered. What was computed with the
old weights is vLLM's: /pause, /reset_prefix_cache and /resume, around `finish_weight_update`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import UsageError
from dcr_cli.serving.session import Rank, Session, Settings

# A model's own name and the program that wrote its configuration say nothing of where tensors lie.
_NO_MATTER = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class Update:
    """The version that the model is to come to."""

    version: int


class DcrWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's model as a live receiver."""

    init_info_cls = Settings
    update_info_cls = Update
    supports_draft_weight_update = False
    # Nothing is written before `finish_weight_update`.
    defers_processing = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: Session | None = None

    def init_transfer_engine(self, init_info: Settings) -> None:
        """Learn where the model holds what, and see that it is the version's. UsageError while an update is to be
        finished."""
        if self._session is not None and self._session.is_partial:
            raise UsageError("dcr", "holds a mixture: an update was stopped", hint="call finish_weight_update again")
        self.shutdown()
        settings, parallel = init_info, self.parallel_config
        if settings.checkpoint is None and os.path.isdir(self.model_config.model):
            settings = replace(settings, checkpoint=self.model_config.model)
        if parallel.pipeline_parallel_size > 1 and not settings.may_lack:
            # Most layers are other ranks'.
            settings = replace(settings, may_lack=("*",))
        torch.accelerator.synchronize()
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank = Rank(number, _key(self.model_config, parallel), _agree)
        self._session = Session(self.model, self.model.load_weights, settings, rank)

    def start_weight_update(self) -> None:
        """See that the model is a receiver of something."""
        self._require()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to stage a version."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        self._require().update(update_info.version)

    def drain_pending(self) -> None:
        """Bring the model to the version that was staged: on all workers, or on none."""
        session = self._require()
        torch.accelerator.synchronize()
        session.finish()
        torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        self.drain_pending()

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _require(self) -> Session:
        if self._session is None:
            raise UsageError("dcr", "is no receiver yet", hint="call init_weight_transfer_engine first")
        return self._session


def _key(model: Any, parallel: Any) -> str:
    """What the placement of this rank depends on, in words."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_MATTER}
    digest = object_digest(json.dumps(config, sort_keys=True, default=str).encode()).hex()[:32]
    return (
        f"vllm {vllm.__version__}, config {digest}, {model.dtype}, quantization {model.quantization}, "
        f"tensor {parallel.tensor_parallel_size}, pipeline {parallel.pipeline_parallel_size}, "
        f"data {parallel.data_parallel_size}, experts {parallel.enable_expert_parallel}, rank {parallel.rank}"
    )


def _agree(is_right: bool) -> bool:
    """Whether it is on all workers of this model: over one axis of ranks after the other."""
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        if group.world_size > 1:
            flag = torch.tensor([int(is_right)])
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group.cpu_group)
            is_right = bool(flag.item())
    return is_right
