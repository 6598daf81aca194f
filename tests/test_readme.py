"""The README's commands and code run as they stand, and its tree names every file that there is."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dcr_cli import commit
from dcr_cli.cli import COMMANDS, main
from dcr_cli.live import Fate, Member, Receiver
from dcr_cli.push import push
from engine_servers import serving
from layouts import layout_bytes, layout_document, local, part_of, write_dcp
from live_modules import Engine, held as held_by, loaded
from live_remotes import TrainedRemote
from strategies import shard_bytes, tiny_tensors, write_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoints that the README speaks of, tiny ones."""
    for name in ("step-1", "rollout"):
        shutil.copytree(tiny_pair[0], tmp_path / name)
    shutil.copytree(tiny_pair[1], tmp_path / "step-2")
    _write_shards(tmp_path)
    _write_other_dtypes(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_shards(folder: Path) -> None:
    """Write the target's tensors as two ranks hold them: by rows, as PyTorch does, and by columns; so those of a
    receiver at the base, with its other files."""
    before, tensors = tiny_tensors()
    write_dcp(folder / "dcp-shards", tensors, [[(name, (at, 0), (32, 64)) for name in tensors] for at in (0, 32)])
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(folder / "step-1", folder / "tp-rollout", ignore=weights)
    (folder / "tp-shards").mkdir()
    described = {}
    for rank, at in enumerate((0, 32)):
        for place, held in (("tp-rollout", before), ("tp-shards", tensors)):
            parts = {name: part_of(tensor, (0, at), (64, 32)) for name, tensor in held.items()}
            (folder / place / f"rank-{rank}.safetensors").write_bytes(shard_bytes(parts))
        described[f"rank-{rank}.safetensors"] = {
            name: local(part, [[name, at, 0, [[64, 64, 32], [32, 1, 1]]]]) for name, part in parts.items()
        }
    (folder / "tp.json").write_bytes(layout_bytes(layout_document(tensors, described)))


def _write_other_dtypes(folder: Path) -> None:
    """Write a BF16 shard and an FP8 checkpoint of other weights."""
    (folder / "bf16-shards").mkdir()
    held = torch.randn((256, 384), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    data = {"w": ("BF16", (256, 384), held.view(torch.int16).numpy().tobytes())}
    (folder / "bf16-shards/rank-0.safetensors").write_bytes(shard_bytes(data))
    scales = np.ones((2, 3), np.float32)
    data = {"w": ("F8_E4M3", (256, 384), bytes(256 * 384)), "w_scale_inv": ("F32", (2, 3), scales.tobytes())}
    write_checkpoint(folder / "fp8-rollout", data)


def test_fp8_weights_and_scales_are_those_of_pytorch(folder: Path) -> None:
    for line in next(block for block in blocks("console") if "fp8.json" in block).splitlines():
        assert main(shlex.split(line[2:], comments=True)[1:]) == 0
    found = load_file(folder / "fp8-rollout/model.safetensors")
    held = load_file(folder / "bf16-shards/rank-0.safetensors")["w"].float()
    tiles = held.reshape(2, 128, 3, 128)
    scales = tiles.abs().amax(dim=(1, 3)) / 448
    expected = (tiles / scales[:, None, :, None]).reshape(256, 384).to(torch.float8_e4m3fn)
    assert torch.equal(found["w_scale_inv"], scales)
    assert torch.equal(found["w"].view(torch.uint8), expected.view(torch.uint8))


def test_the_commands_run(folder: Path) -> None:
    relaying = relay_blocks()
    lines = [line for block in blocks("console") if block not in relaying for line in block.splitlines()]
    commands = [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ dcr ")]
    assert {command[1] for command in commands} | {"relay"} == {name.partition(" ")[0] for name in COMMANDS}
    with serving("vllm") as engine:
        for command in commands:
            arguments = [each.replace("http://localhost:8000", engine.url) for each in command[1:]]
            assert main(arguments) == 0, command
        assert engine.weights == [str(folder / "replica")]


def relay_blocks() -> list[str]:
    """The blocks of the section on relays, which need the one before them."""
    return [block for block in blocks("console") if block in README.partition("## Relays\n")[2].partition("\n## ")[0]]


def _started(command: str, port: str) -> str:
    """Start a relay, and wait until it listens."""
    said = f"relay-{port}.said"
    return f"{command}>{said} 2>&1 & until [ -s {said} ]; do kill -0 $!; sleep 0.05; done"


def test_the_relays_run(folder: Path) -> None:
    """All of it in one shell, in which a command that fails ends it, at places where nothing else listens."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed: apt-get install curl")
    text = "".join(line[2:] + "\n" for block in relay_blocks() for line in block.splitlines())
    for port in ("8080", "8081"):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            text = text.replace(port, str(listener.getsockname()[1]))
    # Each relay is waited for until it listens, as somebody who types would.
    text = re.sub(r"^(dcr relay .*--listen \S+:(\d+) .*)&$", lambda one: _started(one[1], one[2]), text, flags=re.M)
    (folder / "bin").mkdir()
    (folder / "bin/dcr").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dcr_cli "$@"\n')
    (folder / "bin/dcr").chmod(0o755)
    script = f"PATH=\"$PWD/bin:$PATH\"\nset -euo pipefail\ntrap 'kill $(jobs -p); wait' EXIT\n{text}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    for word in ("ok\n", '"head": 2', "HTTP/1.1 404", "the key is taken", "dcr_relay_head_version 2", "eu-1"):
        assert word in ran.stdout, word
    assert (folder / "first.bytes").stat().st_size == 64


def test_the_code_runs(folder: Path) -> None:
    push("step-1", "live", baseline="baseline")
    for step in ("step-1", "step-2"):
        push(step, "remote")
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", block], check=True, cwd=folder)


class _OverError(Exception):
    """Ends a loop that has no end."""


def test_the_loop_of_a_rank_goes_on_whatever_becomes_of_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there, prepared, still not committed, given up, and committed while it is waited for or not."""
    remote = TrainedRemote(tmp_path)
    remote.publish()
    namespace: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "def follow" in block), namespace)
    seen: list[object] = []

    def again() -> None:
        raise _OverError

    happenings: list[Callable[[], object]] = [
        lambda: remote.publish(prepare=True),
        lambda: None,
        lambda: commit(remote.url, abort=True),
        lambda: remote.publish(prepare=True),
        lambda: commit(remote.url, quorum=1),
        remote.publish,
        again,
    ]

    def happen(seconds: float) -> None:
        seen.append("slept" if seconds == 1 else "waited")
        happenings.pop(0)()

    wait = Member.wait

    def wait_at_once(member: Member, seconds: float) -> Fate:
        if member.fate() is Fate.OPEN:
            happen(seconds)
        seen.append(wait(member, 0))
        return wait(member, 0)

    namespace["time"] = SimpleNamespace(sleep=happen)
    monkeypatch.setattr(Member, "wait", wait_at_once)
    module = loaded(Engine, remote.versions[0])
    receiver = Receiver(module, checkpoint=remote.versions[0])
    with pytest.raises(_OverError):
        namespace["follow"](receiver, remote.url, 1, "rank-0")
    waits = ["waited", Fate.OPEN, "waited", Fate.GIVEN_UP, "slept", "waited", Fate.COMMITTED]
    assert seen == ["slept", *waits, "slept", Fate.COMMITTED, "slept"]
    assert held_by(module) == held_by(loaded(Engine, remote.versions[-1])) and receiver.published is not None
    assert receiver.published.version.number == 4


def test_the_scripts_are_there() -> None:
    for script in re.findall(r"^\$ (scripts/\w+)", README, re.MULTILINE):
        assert (ROOT / script).stat().st_mode & 0o111


def test_a_set_of_packages_that_is_not_there(tmp_path: Path) -> None:
    ran = subprocess.run(
        [ROOT / "scripts/setup", "--into", tmp_path / "new", "nonsense"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, "there is no set nonsense; usage: " in ran.stderr) == (2, True)
    assert not (tmp_path / "new").exists()


def test_an_installation_that_takes_long_says_so(tmp_path: Path) -> None:
    """With a Python that installs nothing until a minute has been told of, in seconds that pass at once."""
    stubs = {
        "new/bin/python": 'until grep -q "for 60 s" "$SAID"; do /bin/sleep 0.01; done',
        "path/sleep": "exec /bin/sleep 0.001",
    }
    for name, text in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/path:/usr/bin:/bin", "SAID": str(tmp_path / "said")}
    with (tmp_path / "said").open("w") as said:
        command = [str(ROOT / "scripts/setup"), "--into", str(tmp_path / "new")]
        subprocess.run(command, stderr=said, env=environment, check=True, timeout=60)
    lines = (tmp_path / "said").read_text().splitlines()
    assert lines[0] == f"setup: installing run into {tmp_path / 'new'}"
    assert re.fullmatch(r"setup: still installing run, for 15 s; \S+ so far", lines[1])
    assert (tmp_path / "new/stamp-run").is_file()


def test_sets_of_packages_name_the_same_versions() -> None:
    pins = [line for file in sorted((ROOT / "scripts").glob("requirements-*.txt")) for line in file.read_text().split()]
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    assert all(versions[name] == version for name, version in (pin.split("==") for pin in pins if "==" in pin))


def test_the_table_names_every_command() -> None:
    rows = re.findall(r"^\| `dcr (.*?)`", README.partition("## Commands\n")[2].partition("\n## ")[0], re.MULTILINE)
    told = {name for name in COMMANDS for row in rows if f"{row} ".startswith(f"{name} ")}
    assert told == set(COMMANDS)


def test_the_tree_names_every_file() -> None:
    tree = next(block for block in blocks("text") if "dcr_cli/" in block)
    told = set(re.findall(r"[\w*]+(?:\.\w+)?(?= |,|$)", tree, re.MULTILINE))
    files = [file for place in ("dcr_cli", "kernels/dcr_kernels") for file in (ROOT / place).rglob("*.*")]
    for file in sorted([*files, *(ROOT / "scripts").iterdir()]):
        is_code = file.suffix in (".py", ".md") or (file.parent.name == "scripts" and not file.suffix)
        if file.is_file() and is_code and file.name != "__init__.py":
            assert any(fnmatchcase(file.name, name) for name in told), f"no {file.relative_to(ROOT)} in the tree"


def test_the_contents_name_every_section() -> None:
    told = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", README.partition("\n## ")[0])
    sections = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert sorted(told) == sorted((name, name.lower().replace(" ", "-")) for name in sections)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert "://" in link or (ROOT / link).exists(), link
