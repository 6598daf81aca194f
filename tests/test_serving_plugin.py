"""What vLLM finds of dcr, and that nothing of an engine is imported before one asks. The backend itself is shown by
tests/slow/test_live_vllm_server.py."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def entry_points() -> dict[str, str]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = project["entry-points"]["vllm.general_plugins"]
    return found


def test_the_backend_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, tuple[str, str]] = {}

    class WeightTransferEngineFactory:
        _registry = registered

        @staticmethod
        def register_engine(name: str, module: str, class_name: str) -> None:
            assert name not in registered
            registered[name] = (module, class_name)

    path = "vllm.distributed.weight_transfer.factory"
    names = path.split(".")
    for count in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), ModuleType(names[count - 1]))
    monkeypatch.setattr(sys.modules[path], "WeightTransferEngineFactory", WeightTransferEngineFactory, raising=False)
    module, _, name = entry_points()["dcr"].partition(":")
    register = getattr(import_module(module), name)
    # vLLM loads plugins in several processes, and perhaps more than once.
    register()
    register()
    assert registered == {"dcr": ("dcr_cli.serving.vllm", "DcrWeightTransferEngine")}
    source = (ROOT / "dcr_cli/serving/vllm.py").read_text()
    assert "class DcrWeightTransferEngine(" in source


def test_nothing_of_an_engine_is_imported() -> None:
    code = "import sys, dcr_cli.serving.plugin, dcr_cli.serving.sglang, dcr_cli.live, dcr_cli.cli; "
    code += "print({'vllm', 'sglang'} & {name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "set()"
