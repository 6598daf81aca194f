"""What vLLM finds of dcr, and that nothing of an engine is imported before one asks. The backend itself is shown by
tests/slow/test_live_vllm_server.py."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
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


@pytest.fixture
def register() -> Iterator[Callable[[], None]]:
    """What vLLM calls, in a process that has not called it yet."""
    module, _, name = entry_points()["dcr"].partition(":")
    found = getattr(import_module(module), name)
    found.cache_clear()
    yield found
    found.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, path: str, **members: object) -> None:
    """Have the packages of a path, the last one with some members."""
    names = path.split(".")
    for count in range(1, len(names) + 1):
        module = ModuleType(".".join(names[:count]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, member in members.items():
        monkeypatch.setattr(sys.modules[path], name, member, raising=False)


class Factory:
    """As vLLM's, as far as it is public."""

    def __init__(self) -> None:
        self.registered: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.registered:
            raise ValueError(f"{name} is already registered")
        self.registered[name] = (module, class_name)


PACKAGE = "vllm.distributed.weight_transfer"


def test_the_backend_is_registered_once(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    factory = Factory()
    install(monkeypatch, PACKAGE, WeightTransferEngineFactory=factory)
    # vLLM loads plugins in several processes, and perhaps more than once.
    register()
    register()
    assert factory.registered == {"dcr": ("dcr_cli.serving.vllm", "DcrWeightTransferEngine")}
    assert caplog.text == ""
    source = (ROOT / "dcr_cli/serving/vllm.py").read_text()
    assert "class DcrWeightTransferEngine(" in source


def older(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vllm.distributed")


def without_the_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PACKAGE)


def with_another_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PACKAGE, WeightTransferEngineFactory=object())


def with_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def register_engine(self, name: str) -> None: ...

    install(monkeypatch, PACKAGE, WeightTransferEngineFactory=Other())


def with_the_name_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = Factory()
    factory.register_engine("dcr", "another", "One")
    install(monkeypatch, PACKAGE, WeightTransferEngineFactory=factory)


@pytest.mark.parametrize(
    "begin", [older, without_the_factory, with_another_factory, with_other_arguments, with_the_name_taken]
)
def test_a_vllm_that_does_not_take_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    register: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    begin: Callable[[pytest.MonkeyPatch], None],
) -> None:
    begin(monkeypatch)
    register()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "does not take the backend dcr" in record.getMessage()


def test_nothing_of_an_engine_is_imported() -> None:
    code = "import sys, dcr_cli.serving.plugin, dcr_cli.serving.sglang, dcr_cli.live, dcr_cli.cli; "
    code += "print({'vllm', 'sglang'} & {name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "set()"
