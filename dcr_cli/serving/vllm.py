"""vLLM's backend `dcr` for new weights: each worker takes them from a remote into the model that it serves.

    init_weight_transfer_engine  {"remote": URL, "version": N, ...}, the fields of `Settings`: learn, compare, say it
    start_weight_update          nothing
    update_weights               {"version": N}: begin to stage it, with `changes` once a pull has decoded it, and go on
                                 serving
    finish_weight_update         write it

What fails does so on all workers. vLLM (0.32) reads answers in the order of workers, and none after the first that is
an error: what is left it takes for answers to its next call. So `init_weight_transfer_engine` is refused by the last
worker alone; the others keep, each for itself, whether an update is under way, and have to fail alike.

vLLM calls it between steps of the model, and holds requests only while a call is answered. What was computed with the
old weights is vLLM's: /pause, /reset_prefix_cache and /resume, around `finish_weight_update`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from dcr_cli.checkpoint.digest import object_digest
from dcr_cli.errors import DcrError, UsageError
from dcr_cli.serving.agreeing import Answer, Answers, Rank, refuse
from dcr_cli.serving.session import Session, Settings, begin

# A model's own name and the program that wrote its configuration say nothing of where tensors lie.
_NO_MATTER = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class Init:
    """The members of a request, which are read where all workers hear of it if one of them is wrong."""

    members: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """The same, of one that asks for a version."""

    members: Mapping[str, Any]


class DcrWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's model as a live receiver. Each call is made on all workers at the same time, and done by all or by
    none."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False
    # Nothing is written before `finish_weight_update`.
    defers_processing = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: Session | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Init:
        return Init(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Update:
        return Update(update_dict)

    def init_transfer_engine(self, init_info: Init) -> None:
        """Learn where the model holds what, and see that it is the version's. What was begun before goes on if that
        cannot be done; IncompleteError while an update is to be finished."""
        rank = self._rank()

        def make(settings: Settings) -> Session:
            if settings.checkpoint is None and os.path.isdir(self.model_config.model):
                settings = replace(settings, checkpoint=self.model_config.model)
            if self.parallel_config.pipeline_parallel_size > 1 and not settings.may_lack:
                # Most layers are other ranks'.
                settings = replace(settings, may_lack=("*",))
            placed = replace(rank, key=_key(self.model_config, self.parallel_config))
            return Session(self.model, self.model.load_weights, settings, placed)

        try:
            self._session = begin(rank, self._session, lambda: init_info.members, make)
        except DcrError:
            # The same one on all workers.
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise

    def start_weight_update(self) -> None:
        """See that the model is a receiver of something: all workers' are, or none's."""
        if self._session is None:
            raise self._no_receiver()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to stage a version."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        self._require("update").update_as(update_info.members)

    def drain_pending(self) -> None:
        """Bring the model to the version that was staged: on all workers, or on none."""
        self._require("finish").finish()

    def finish_weight_update(self) -> None:
        self.drain_pending()

    def shutdown(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _require(self, call: str) -> Session:
        if self._session is None:
            refuse(self._rank(), call, self._no_receiver())
        return self._session

    def _no_receiver(self) -> UsageError:
        return UsageError("dcr", "is no receiver yet", hint="call init_weight_transfer_engine first")

    def _rank(self) -> Rank:
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return Rank(number, "", _hear, torch.accelerator.synchronize)


def _key(model: Any, parallel: Any) -> str:
    """What the placement of this rank depends on, in words."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_MATTER}
    digest = object_digest(json.dumps(config, sort_keys=True, default=str).encode()).hex()[:32]
    return (
        f"vllm {vllm.__version__}, config {digest}, {model.dtype}, quantization {model.quantization}, "
        f"tensor {parallel.tensor_parallel_size}, pipeline {parallel.pipeline_parallel_size}, "
        f"data {parallel.data_parallel_size}, experts {parallel.enable_expert_parallel}, rank {parallel.rank}"
    )


def _hear(answer: Answer) -> Answers:
    """What all workers of this model say: along one axis of ranks after the other."""
    heard: list[Answer] = [answer]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        if group.world_size > 1:
            others: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(others, heard, group.cpu_group)
            heard = [each for answers in others for each in answers]
    return sorted(heard, key=lambda each: each.rank)
