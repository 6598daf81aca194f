"""The public door: what it names, and that the error tree, the README and the exit codes say the same."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import dcr_cli
from dcr_cli import errors
from dcr_cli.cli import main
from dcr_cli.store.opening import _EXTRAS

ROOT = Path(__file__).parents[1]
FUNCTIONS = (
    "apply",
    "diff",
    "diff_tensors",
    "follow",
    "inspect",
    "log",
    "prune",
    "pull",
    "show",
    "status",
    "verify",
    "verify_remote",
)


def error_classes() -> dict[str, type[errors.DcrError]]:
    return {
        name: member
        for name, member in vars(errors).items()
        if inspect.isclass(member) and issubclass(member, errors.DcrError)
    }


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_every_public_name_is_there() -> None:
    for name in dcr_cli.__all__:
        assert getattr(dcr_cli, name) is not None
    assert dir(dcr_cli) == sorted(dcr_cli.__all__)


def test_every_error_is_public_and_has_its_code_in_the_tree() -> None:
    tree = dict(re.findall(r"^ +(\w+) +(\d+) ", errors.__doc__ or "", re.MULTILINE))
    classes = error_classes()
    assert set(tree) == set(classes) - {"DcrError"}
    for name, member in classes.items():
        assert name in dcr_cli.__all__
        assert getattr(dcr_cli, name) is member
        assert name == "DcrError" or member.exit_code == int(tree[name])


def test_the_readme_explains_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| .*?\|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = {int(code): set(re.findall(r"`(\w+Error)`", classes)) for code, classes in rows}
    codes: dict[int, set[str]] = {0: set(), 1: set(), 70: set()}
    for name, member in error_classes().items():
        if name != "DcrError":
            codes.setdefault(member.exit_code, set()).add(name)
    assert told == codes


@pytest.mark.parametrize("first", [*(f"import dcr_cli.{name}" for name in FUNCTIONS), "import dcr_cli.cli", ""])
def test_functions_stay_functions_whatever_is_imported_first(first: str) -> None:
    code = f"{first}\nimport dcr_cli\nfrom dcr_cli import {', '.join(FUNCTIONS)}\n"
    code += f"print(all(callable(f) and callable(getattr(dcr_cli, f.__name__)) for f in ({', '.join(FUNCTIONS)})))"
    assert run_python(code) == "True\n"


def test_importing_the_package_and_its_help_is_cheap() -> None:
    code = (
        "import sys, dcr_cli, dcr_cli.cli\n"
        "dcr_cli.cli.main(['--help']), dcr_cli.cli.main(['diff', '--help'])\n"
        "print(sorted({'numpy', 'torch', 'rich', 'pydantic', 'fsspec', 'zstandard', 'blake3'} & sys.modules.keys()))"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_no_command_imports_torch(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, target = (str(path) for path in tiny_pair)
    delta = str(tmp_path / "delta")
    commands = [
        ["diff", base, target, "-o", delta],
        ["show", delta],
        ["apply", delta, base],
        ["verify", base, "--against", target],
        ["inspect", base, "--digest"],
    ]
    code = "import sys\nfrom dcr_cli.cli import main\n"
    code += f"print([main(c + ['-q']) for c in {commands!r}], 'torch' in sys.modules)"
    assert run_python(code) == "[0, 0, 0, 0, 0] False\n"


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dcr_cli.__version__ == project["version"]


def test_hints_name_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "dcr_cli").rglob("*.py")]
    hinted = {extra for source in sources for extra in re.findall(r'install_hint\("(\w+)"\)', source)}
    assert hinted == {"gpu", "relay", "sign"} and hinted | set(_EXTRAS.values()) <= set(extras)
    own = [source for source in sources if "pip install 'dcr-cli[" in source]
    assert len(own) == 1 and errors.install_hint("s3") == "pip install 'dcr-cli[s3]'"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"trusted_keys": ["nonsense"]}, "trusted_keys nonsense"),
        ({"sign_key": "/nowhere"}, "sign_key /nowhere"),
        ({"anchor_every": 0}, "anchor_every"),
    ],
)
def test_errors_of_what_has_no_command_name_the_parameter(given: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.DcrError) as caught:
        dcr_cli.Publisher(tmp_path, tmp_path / "baseline", **given)
    assert caught.value.what == name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["status", "R", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["log", "R", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["show", "R@1", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["verify", "C", "--remote", "R", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["verify", "--remote", "R", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["pull", "R", "C", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["pull", "R", "C", "--receiver", "a/b"], "--receiver"),
        (["push", "C", "R", "--trusted-key", "nonsense"], "--trusted-key nonsense"),
        (["push", "C", "R", "--sign-key", "nowhere"], "--sign-key nowhere"),
        (["push", "C", "R", "--part", "0/2", "--attempt", "a", "--sign-key", "nowhere"], "--sign-key nowhere"),
        (["push", "C", "R", "--anchor-every", "0"], "--anchor-every"),
        (["anchor", "C", "R", "--sign-key", "nowhere"], "--sign-key nowhere"),
        (["commit", "R", "--quorum", "1", "--receivers", "nonsense"], "--receivers nonsense"),
    ],
)
def test_errors_of_commands_name_the_option(
    arguments: list[str],
    name: str,
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("C").symlink_to(tiny_pair[0])
    assert main(arguments) in (2, 9)
    assert capsys.readouterr().err.startswith(f"dcr: {name}: ")


def test_types_are_published() -> None:
    assert (Path(dcr_cli.__file__).parent / "py.typed").is_file()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        dcr_cli.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_function_takes_less_than_one_thread(jobs: int, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, target = tiny_pair
    dcr_cli.diff(base, target, tmp_path / "delta")
    calls = (
        lambda: dcr_cli.diff(base, target, jobs=jobs),
        lambda: dcr_cli.apply(tmp_path / "delta", base, jobs=jobs),
        lambda: dcr_cli.verify(base, against=base, jobs=jobs),
        lambda: dcr_cli.show(tmp_path / "delta", jobs=jobs),
        lambda: dcr_cli.inspect(base, digest=True, jobs=jobs),
    )
    for call in calls:
        with pytest.raises(dcr_cli.UsageError, match=rf"jobs: a number from 1 on expected, found {jobs}"):
            call()
