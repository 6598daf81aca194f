"""What all tests share: Hypothesis's settings and the tiny pair."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from commands import Ran, Run
from dcr_cli.cli import main
from dcr_cli.store import opening, retry
from strategies import write_tiny_pair

# A background job of a shell ignores these, and so would every process that a test starts and wants to stop.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL)

# Machines are slow at times, and a temporary folder is meant to be shared by the examples of one test.
settings.register_profile(
    "dcr",
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("dcr")


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Leave this process as many descriptors as a new one has that may open 64."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, taken + 54), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def impatient() -> Iterator[None]:
    """Nothing is tried for longer than a moment."""
    defaults = retry.Patience.__init__.__defaults__
    assert defaults is not None
    with (
        mock.patch.object(retry.Patience.__init__, "__defaults__", (0.05, 0.01, 0.01, *defaults[3:])),
        mock.patch.object(opening, "LOOK_SECONDS", 0.05),
    ):
        yield


@pytest.fixture
def tiny_pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints of 2 shards, 4 BF16 tensors of 64x64, that differ in 5 elements."""
    return write_tiny_pair(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def call(*arguments: str | Path) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Two private keys as OpenSSH writes them, and beside each its public one."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    paths = []
    for name in ("one", "two"):
        key = Ed25519PrivateKey.generate()
        path = tmp_path / name
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        paths.append(path)
    return paths[0], paths[1]
