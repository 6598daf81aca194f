"""scripts/bench: every part runs on small data, baselines are what they say, and a wrong result is noticed."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray
from safetensors import deserialize

Load = Callable[[str], ModuleType]

SCRIPTS = Path(__file__).parent.parent / "scripts"
GOALS = {
    "wire": 0,
    "codec": 4,
    "commands": 3,
    "layouts": 7,
    "live": 0,
    "memory": 3,
    "tiny": 6,
    "startup": 1,
    "relay": 2,
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module of the benchmark by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load_module(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load_module


def sorted_tensors(shard: Path) -> list[tuple[str, dict[str, Any]]]:
    tensors: list[tuple[str, dict[str, Any]]] = deserialize(shard.read_bytes())  # type: ignore[no-untyped-call]
    return sorted(tensors, key=lambda item: item[0])


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPTS / "bench"), *arguments], capture_output=True, text=True)


def test_all_parts_run_quickly_and_leave_nothing(tmp_path: Path) -> None:
    done = bench("--quick", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    for part, goals in GOALS.items():
        rows = [row for row in document["rows"] if row["part"] == part]
        assert rows
        if part == "relay" and any("nginx" in line for line in document["left_out"]):
            goals = 0
        assert sum(row["goal"] is not None for row in rows) == goals, part
        for row in rows:
            assert row["what"] in done.stdout
            assert row["value"] >= 0
    assert document["machine"]["kernels"]
    assert document["arguments"]["quick"] is True
    assert document["left_out"]
    assert list(tmp_path.iterdir()) == []


def test_json_alone_is_one_document(tmp_path: Path) -> None:
    done = bench("--quick", "--json", "--only", "startup", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {row["part"] for row in json.loads(done.stdout)["rows"]} == {"startup"}
    assert "dcr --help" in done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = bench("--only", "speed")
    assert done.returncode == 2
    assert "parts are wire, codec" in done.stderr


def test_no_room_is_said(tmp_path: Path) -> None:
    done = bench("--gib", "1e9", "--only", "memory", "--dir", str(tmp_path))
    assert done.returncode == 1
    assert "--gib" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_synthetic_pairs_change_as_asked_and_are_the_same_every_time(load: Load, tmp_path: Path) -> None:
    pairs = load("bench_pairs")
    made = [
        pairs.make_pair(tmp_path / name, pairs.decoder(1 << 20), rate=0.03, shards=3, seed=5) for name in ("a", "b")
    ]
    assert 0.02 < made[0].changed / made[0].elements < 0.04
    elements = changed = 0
    for shard in sorted(made[0].base.glob("*.safetensors")):
        assert shard.read_bytes() == (made[1].base / shard.name).read_bytes()
        other = made[0].target / shard.name
        assert other.read_bytes() == (made[1].target / shard.name).read_bytes()
        sides = zip(sorted_tensors(shard), sorted_tensors(other), strict=True)
        for (name, old), (other_name, new) in sides:
            assert (name, old["dtype"], old["shape"]) == (other_name, new["dtype"], new["shape"])
            bits = [np.frombuffer(side["data"], np.uint16) for side in (old, new)]
            elements += len(bits[0])
            changed += int(np.count_nonzero(bits[0] != bits[1]))
    assert (elements, changed) == (made[0].elements, made[0].changed)


def test_tiny_pairs_have_tensors_of_1_to_16_bytes(load: Load, tmp_path: Path) -> None:
    pairs = load("bench_pairs")
    pair = pairs.make_tiny_pair(tmp_path, count=96, rate=1.0, seed=0)
    sizes = []
    for shard in pair.base.glob("*.safetensors"):
        sizes += [tensor["shape"][0] for _, tensor in sorted_tensors(shard)]
    assert len(sizes) == 96
    assert pair.changed == pair.elements == sum(sizes)
    assert 96 <= pair.bytes <= 96 * 16


def pair_of(methods: ModuleType, base: NDArray[np.uint16], target: NDArray[np.uint16]) -> Any:
    header = importlib.import_module("dcr_cli.checkpoint.header")
    return methods.TensorPair("t", header.DTYPES["BF16"], (len(base),), base, target)


def test_long_gaps_are_cut_by_empty_masks(load: Load) -> None:
    methods = load("bench_methods")
    base = np.zeros(200_000, np.uint16)
    target = base.copy()
    target[[3, 150_000, 150_001]] = 7
    positions = np.flatnonzero(target)
    plain = zstandard.ZstdDecompressor().decompress(methods.gaps_16_bit(pair_of(methods, base, target), positions))
    gaps, masks = np.frombuffer(plain, np.uint16).reshape(2, -1)
    found = base.copy()
    found[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= masks
    # A filler's own place counts: its gap of 65535 and its mask of 0 move on by 65536 elements.
    assert np.array_equal(found, target)


def test_limits_are_entropies(load: Load) -> None:
    methods = load("bench_methods")
    base = np.repeat(np.array([0x3F80, 0x3C00], np.uint16), 4)
    target = base.copy()
    target[[0, 1]] += 1
    found = methods.measure([pair_of(methods, base, target)])
    # Two of eight elements, one mask; given the exponent, two of the four that have it.
    assert found.limit_bits["plain"] == pytest.approx(2 * 2 + 6 * np.log2(8 / 6))
    assert found.limit_bits["given base"] == found.limit_bits["given base, ulp"] == pytest.approx(4)
    assert (found.elements, found.changed, found.dense_bytes) == (8, 2, 16)


def test_peaks_are_of_the_command_alone(load: Load) -> None:
    child = load("bench_child")
    ballast = bytearray(b"x" * (256 << 20))
    finished = child.run(sys.executable, "-S", "-c", "print(1)")
    assert finished.output == "1\n"
    assert finished.peak_bytes < len(ballast) // 2
    large = child.run(sys.executable, "-S", "-c", "bytearray(b'x' * (200 << 20))")
    assert large.peak_bytes > 200 << 20


def test_a_failing_command_ends_the_run(load: Load) -> None:
    child = load("bench_child")
    with pytest.raises(child.CommandError, match="exit code 3: why"):
        child.run(sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)")


@pytest.mark.parametrize("wrong", ["other", "longer!", None])
def test_results_that_differ_are_noticed(load: Load, tmp_path: Path, wrong: str | None) -> None:
    files = load("bench_files")
    for side in ("found", "expected"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "file").write_text("right")
    files.check_same_files(tmp_path / "found", tmp_path / "expected")
    if wrong is None:
        (tmp_path / "found" / "file").unlink()
    else:
        (tmp_path / "found" / "file").write_text(wrong)
    with pytest.raises(files.BenchError):
        files.check_same_files(tmp_path / "found", tmp_path / "expected")


def test_verdicts(load: Load) -> None:
    report = load("bench_report")
    goals = [report.at_most(2), report.at_most(2), report.at_most(2), report.at_least(2), report.at_least(2), None]
    rows = [
        report.Row("p", "c", "w", value, "x", goal, "")
        for value, goal in zip((2.1, 2.0, 1.5, 1.9, 2.5, 1.0), goals, strict=True)
    ]
    assert [row.verdict for row in rows] == ["NO", "yes", "with ease", "NO", "with ease", ""]
    assert [row.document()["met"] for row in rows] == [False, True, True, False, True, None]


def test_a_device_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    for wish, said in (
        ("cpu", "cuda or cuda:N expected"),
        ("gpu", "expected, found 'gpu'"),
        ("cuda:4096", "cuda:4096: "),
    ):
        done = bench("--quick", "--dir", str(tmp_path), "--device", wish)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
