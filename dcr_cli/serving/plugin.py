"""What vLLM calls in each of its processes: it makes the name `dcr` known among its backends for weights."""

from __future__ import annotations


def register() -> None:
    """Register the backend, once in each process; its module is imported when it is asked for."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if "dcr" not in Factory._registry:
        Factory.register_engine("dcr", "dcr_cli.serving.vllm", "DcrWeightTransferEngine")
