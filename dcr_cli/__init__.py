"""dcr: bit-exact weight deltas for RL refit.

    import dcr_cli

    result = dcr_cli.diff("step-1", "step-2", "delta")
    dcr_cli.apply("delta", "receiver")
    assert dcr_cli.verify("receiver", against="step-2").matches

What is named in `__all__` is public; everything else may change. Names are imported when they are first used, so that
`import dcr_cli` costs nothing.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcr_cli.anchor import AnchorResult as AnchorResult, anchor as anchor
    from dcr_cli.apply import ApplyResult as ApplyResult, apply as apply
    from dcr_cli.commit import CommitResult as CommitResult, commit as commit
    from dcr_cli.diff import DiffResult as DiffResult, diff as diff
    from dcr_cli.diff_tensors import TensorsDiffResult as TensorsDiffResult, diff_tensors as diff_tensors
    from dcr_cli.errors import (
        ConflictError as ConflictError,
        DamagedError as DamagedError,
        DcrError as DcrError,
        HookError as HookError,
        IncompleteError as IncompleteError,
        LocalError as LocalError,
        NotFoundError as NotFoundError,
        TransportError as TransportError,
        UnsupportedError as UnsupportedError,
        UsageError as UsageError,
        WrongBaseError as WrongBaseError,
    )
    from dcr_cli.families import (
        fp8_layout as fp8_layout,
        megatron_layout as megatron_layout,
        probe_layout as probe_layout,
        vllm_layout as vllm_layout,
    )
    from dcr_cli.follow import Arrival as Arrival, follow as follow
    from dcr_cli.inspect import InspectResult as InspectResult, inspect as inspect
    from dcr_cli.layouts import (
        CheckLayoutResult as CheckLayoutResult,
        LayoutResult as LayoutResult,
        check_layout as check_layout,
        compose_layouts as compose_layouts,
        show_layout as show_layout,
    )
    from dcr_cli.log import LogResult as LogResult, log as log
    from dcr_cli.prune import PruneResult as PruneResult, prune as prune
    from dcr_cli.publish import Publisher as Publisher
    from dcr_cli.pull import PullResult as PullResult, pull as pull
    from dcr_cli.push import PushResult as PushResult, push as push
    from dcr_cli.reload import ReloadResult as ReloadResult, reload as reload
    from dcr_cli.show import show as show
    from dcr_cli.show_result import ShowAnchorResult as ShowAnchorResult, ShowResult as ShowResult
    from dcr_cli.status import StatusResult as StatusResult, status as status
    from dcr_cli.verify import VerifyResult as VerifyResult, verify as verify
    from dcr_cli.verify_remote import VerifyRemoteResult as VerifyRemoteResult, verify_remote as verify_remote

__version__ = "0.1.0"

_HOME_OF = {
    "diff": "diff",
    "DiffResult": "diff",
    "diff_tensors": "diff_tensors",
    "TensorsDiffResult": "diff_tensors",
    "apply": "apply",
    "ApplyResult": "apply",
    "verify": "verify",
    "VerifyResult": "verify",
    "verify_remote": "verify_remote",
    "VerifyRemoteResult": "verify_remote",
    "show": "show",
    "ShowResult": "show",
    "ShowAnchorResult": "show",
    "inspect": "inspect",
    "pull": "pull",
    "PullResult": "pull",
    "follow": "follow",
    "Arrival": "follow",
    "InspectResult": "inspect",
    "LayoutResult": "layouts",
    "CheckLayoutResult": "layouts",
    "show_layout": "layouts",
    "check_layout": "layouts",
    "compose_layouts": "layouts",
    "fp8_layout": "families",
    "megatron_layout": "families",
    "vllm_layout": "families",
    "probe_layout": "families",
    "log": "log",
    "LogResult": "log",
    "reload": "reload",
    "ReloadResult": "reload",
    "status": "status",
    "StatusResult": "status",
    "prune": "prune",
    "PruneResult": "prune",
    "Publisher": "publish",
    "push": "push",
    "PushResult": "push",
    "commit": "commit",
    "CommitResult": "commit",
    "anchor": "anchor",
    "AnchorResult": "anchor",
    "DcrError": "errors",
    "UsageError": "errors",
    "NotFoundError": "errors",
    "DamagedError": "errors",
    "IncompleteError": "errors",
    "WrongBaseError": "errors",
    "ConflictError": "errors",
    "TransportError": "errors",
    "UnsupportedError": "errors",
    "LocalError": "errors",
    "HookError": "errors",
}

__all__ = [
    "AnchorResult",
    "ApplyResult",
    "Arrival",
    "CheckLayoutResult",
    "CommitResult",
    "ConflictError",
    "DamagedError",
    "DcrError",
    "DiffResult",
    "HookError",
    "IncompleteError",
    "InspectResult",
    "LayoutResult",
    "LocalError",
    "LogResult",
    "NotFoundError",
    "PruneResult",
    "Publisher",
    "PullResult",
    "PushResult",
    "ReloadResult",
    "ShowAnchorResult",
    "ShowResult",
    "StatusResult",
    "TensorsDiffResult",
    "TransportError",
    "UnsupportedError",
    "UsageError",
    "VerifyRemoteResult",
    "VerifyResult",
    "WrongBaseError",
    "__version__",
    "anchor",
    "apply",
    "check_layout",
    "commit",
    "compose_layouts",
    "diff",
    "diff_tensors",
    "follow",
    "fp8_layout",
    "inspect",
    "log",
    "megatron_layout",
    "probe_layout",
    "prune",
    "pull",
    "push",
    "reload",
    "show",
    "show_layout",
    "status",
    "verify",
    "verify_remote",
    "vllm_layout",
]


class _Door(types.ModuleType):
    """A package whose public functions have the names of their modules.

    Importing a submodule binds it in its package; that must not put the module `diff` where the function `diff` is
    expected, whichever was imported first. `from dcr_cli.diff import X` is not affected.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_HOME_OF[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Door
