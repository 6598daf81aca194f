"""What vLLM calls in each of its processes: it makes the name `dcr` known among its backends for weights.

It is called wherever dcr is installed beside vLLM, whether or not anybody wants the backend: what prevents it is said,
and raises nothing.
"""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger(__name__)


@functools.cache
def register() -> None:
    """Register the backend, once in each process; its module is imported when it is asked for.

    A vLLM that has no such backends, or takes them in another way, is warned of, and left alone.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine("dcr", "dcr_cli.serving.vllm", "DcrWeightTransferEngine")
    except Exception as error:
        facts = (
            "this vLLM does not take the backend dcr for new weights, which 0.32 or later does; all else is as it was"
        )
        _logger.warning("%s: %s: %s", facts, type(error).__name__, error)
