"""Imports the functions that somebody has named: loaders, and what rules of a layout call.

Which names may be imported is for others to say; here a name is only what leads to a function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dcr_cli.errors import UnsupportedError, UsageError

_WHERE = "PYTHONPATH names the folders in which modules are found"


def import_function(name: str, what: str) -> Callable[..., Any]:
    """Import the function that `module:function` names, which is a `what` in messages.

    UsageError where there is none such, UnsupportedError where its module fails while it is imported.
    """
    module, _, attributes = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{what} {name}", f"cannot be imported: {error}", hint=_WHERE) from error
    except (Exception, SystemExit) as error:
        facts = f"its module failed: {type(error).__name__}: {error}"
        raise UnsupportedError(f"{what} {name}", facts, hint="import it alone") from error
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        facts = f"module {module} has no function of that name"
        raise UsageError(f"{what} {name}", facts, hint="is it spelled as there?")
    function: Callable[..., Any] = found
    return function
