"""Layouts of families of models and of loaders, made by the library and by commands, and what they are made for: shards
that NumPy has cut are compared and patched through them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from commands import Ran, Run, is_failure
from dcr_cli import apply, diff, megatron_layout, probe_layout, verify, vllm_layout
from dcr_cli.errors import LocalError
from dcr_cli.layout.document import decode_layout, encode_layout, read_layout
from dcr_cli.layout.megatron.assembly import Options, megatron_layout as make_megatron
from dcr_cli.layout.megatron.dividing import Naming
from dcr_cli.layout.megatron.ranks import Sizes
from fp8_models import write_fp8
from megatron_models import LLAMA, MODELS, Model, deepseek
from megatron_shards import AS_USUAL, Setup, as_tensors, dense_llama, write_ranks as write_megatron
from receivers import tree
from strategies import shard_bytes, tensor_of, write_checkpoint
from vllm_models import CASES, Case, canonical, held, write_ranks as write_vllm

COMMANDS = ["layout megatron", "layout fp8", "layout vllm-sharded-state", "layout probe"]
LOADER = """
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def whole(folder):
    return {name: each for path in Path(folder).glob("*.safetensors") for name, each in load_file(path).items()}


def ranks(folder):
    return {f"rank-{rank}.safetensors": rank_of(whole(folder), rank) for rank in (0, 1)}


def rank_of(tensors, rank):
    return {name: np.split(each, 2)[rank] if each.ndim > 1 else each for name, each in tensors.items()}


def first_rank(folder):
    return rank_of(whole(folder), 0)


def headless(folder):
    return {name: each for name, each in whole(folder).items() if name != "lm_head.weight"}


def fail(folder):
    raise OSError("no room")


number = 3
"""


def write_dense(root: Path, dense: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint of two shards with a config.json."""
    sidecars = {"config.json": json.dumps(config).encode()}
    return write_checkpoint(root, as_tensors(dense), shards=2, sidecars=sidecars)


def write_forms(root: Path, model: Model) -> Path:
    """Write a checkpoint of a model whose values do not matter."""
    tensors = {name: tensor_of("BF16", shape) for name, shape in model.shapes.items()}
    return write_checkpoint(root, tensors, sidecars={"config.json": json.dumps(model.config).encode()})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_dense(tmp_path / "base", dense_llama(), LLAMA.config)


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with loaders, found like any that is named on the command line."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/numpy_loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return "numpy_loader"


@pytest.fixture
def commands(base: Path, loader: str, tmp_path: Path) -> dict[str, tuple[str | Path, ...]]:
    """Each of the commands, with what it needs."""
    write_case(tmp_path / "vllm", DENSE)
    halves = {name: each.astype(np.float32) for name, each in dense_llama().items()}
    write_dense(tmp_path / "halves", halves, LLAMA.config)
    return {
        "layout megatron": ("layout", "megatron", base, "--tp", "2"),
        "layout fp8": ("layout", "fp8", *write_fp8(tmp_path / "fp8")),
        "layout vllm-sharded-state": (
            *("layout", "vllm-sharded-state", tmp_path / "vllm/base", tmp_path / "vllm/ranks-0"),
            *("--tp", "2"),
        ),
        "layout probe": ("layout", "probe", f"{loader}:ranks", tmp_path / "halves", "--scratch", tmp_path),
    }


# For people, as JSON, quietly.


@pytest.mark.parametrize("command", COMMANDS)
def test_for_people_a_command_prints_plain_lines(
    command: str, run: Run, commands: dict[str, tuple[str | Path, ...]], tmp_path: Path
) -> None:
    ran = run(*commands[command], "-o", tmp_path / "layout.json", "--tensors")
    assert ran.code == 0 and ran.out.endswith("\n") and ran.err == ""
    assert "\x1b" not in ran.out and "\r" not in ran.out
    assert f" {tmp_path / 'layout.json'}\n" in ran.out and "local tensor" in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document(
    command: str, run: Run, commands: dict[str, tuple[str | Path, ...]], tmp_path: Path
) -> None:
    ran = run(*commands[command], "--json", "-o", tmp_path / "layout.json")
    assert ran.code == 0 and ran.err == "" and ran.out.count("\n") == 1 and ran.out.isascii()
    found = ran.json
    assert (found["command"], found["ok"], found["exit_code"]) == (command, True, 0) and "error" not in found
    layout = read_layout(tmp_path / "layout.json")
    assert (found["output"], found["tensors"], found["shards"]) == (
        str(tmp_path / "layout.json"),
        len(layout.tensors),
        len(layout.shards),
    )
    assert found["elements"] == sum(form.elements for form in layout.tensors.values())
    assert found["rows"] == [] and run(*commands[command], "--json", "--tensors").json["rows"]


@pytest.mark.parametrize("command", COMMANDS)
def test_quiet_is_quiet(command: str, run: Run, commands: dict[str, tuple[str | Path, ...]], tmp_path: Path) -> None:
    ran = run(*commands[command], "-q", "-o", tmp_path / "layout.json")
    assert (ran.code, ran.out, ran.err) == (0, "", "") and (tmp_path / "layout.json").is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_written_over(
    command: str, run: Run, commands: dict[str, tuple[str | Path, ...]], tmp_path: Path
) -> None:
    (tmp_path / "layout.json").write_bytes(b"mine")
    ran = run(*commands[command], "-o", tmp_path / "layout.json")
    assert is_failure(ran, 6, "layout.json: is there already", "another name")
    assert (tmp_path / "layout.json").read_bytes() == b"mine"


# Megatron-Core.


@pytest.mark.parametrize(
    ("options", "setup"),
    [
        ((), AS_USUAL),
        (("--layers", "1,3"), Setup(layers=(1, 3))),
        (("--padded-vocab", "64"), Setup(rows=64)),
        (("--separate-norms",), Setup(has_fused_norms=False)),
        (("--path", "of-{pipeline}/{tensor:02}.safetensors"), Setup(path="of-{pipeline}/{tensor:02}.safetensors")),
    ],
    ids=lambda value: "-".join(value[:1]).strip("-") if isinstance(value, tuple) else "",
)
def test_ranks_that_numpy_cuts_are_the_model(
    options: tuple[str, ...], setup: Setup, run: Run, base: Path, tmp_path: Path
) -> None:
    layout = tmp_path / "layout.json"
    assert run("layout", "megatron", base, "--tp", 2, "--pp", 2, *options, "-o", layout, "-q").code == 0
    ranks = write_megatron(tmp_path / "ranks", dense_llama(), setup)
    checked = run("layout", "check", layout, ranks, "--base", base, "--deep", "--json").json
    assert checked["ok"] and checked["shards"] == 4 and checked["replica_elements"] > 0
    same = run("diff", base, ranks, "--layout", layout, "--exit-code", "--json")
    assert (same.code, same.json["changed_elements"], same.json["tensors"]) == (0, 0, len(LLAMA.shapes))
    # What ranks hold a step later is the delta to what the model is then.
    target = write_dense(tmp_path / "target", dense_llama(1), LLAMA.config)
    later = write_megatron(tmp_path / "later", dense_llama(1), setup)
    assert run("diff", base, later, "--layout", layout, "--exit-code", "-o", tmp_path / "delta").code == 1
    assert run("apply", tmp_path / "delta", base, "-q").code == 0
    assert tree(base) == tree(target)


def test_the_library_makes_what_the_command_makes(run: Run, base: Path, tmp_path: Path) -> None:
    result = megatron_layout(base, tensor=2, pipeline=2, output=tmp_path / "one.json", tensors=True)
    ran = run("layout", "megatron", base, "--tp", 2, "--pp", 2, "-o", tmp_path / "two.json", "--json", "--tensors")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    found = ran.json
    assert (found["boxes"], found["padding"], found["placed_elements"], found["skipped"]) == (
        result.boxes,
        result.padding,
        result.placed_elements,
        list(result.skipped),
    )
    assert [(row["shard"], row["name"]) for row in found["rows"]] == [(row.shard, row.name) for row in result.rows]
    assert run("layout", "show", tmp_path / "one.json", "--json").json["boxes"] == result.boxes


def test_a_tied_output_layer_that_the_model_has_is_the_embedding(run: Run, tmp_path: Path) -> None:
    dense = dense_llama()
    dense["lm_head.weight"] = dense["model.embed_tokens.weight"]
    base = write_dense(tmp_path / "base", dense, {**LLAMA.config, "tie_word_embeddings": True})
    ranks, layout = write_megatron(tmp_path / "ranks", dense), tmp_path / "layout.json"
    assert run("layout", "megatron", base, "--tp", 2, "--pp", 2, "-o", layout, "-q").code == 0
    assert run("layout", "check", layout, ranks, "--base", base, "--deep", "-q").code == 0
    assert run("diff", base, ranks, "--layout", layout, "--exit-code", "-q").code == 0


def test_ranks_that_do_not_agree_are_told(run: Run, base: Path, tmp_path: Path) -> None:
    megatron_layout(base, tensor=2, pipeline=2, output=tmp_path / "layout.json")
    ranks = write_megatron(tmp_path / "ranks", dense_llama())
    other = write_megatron(tmp_path / "other", dense_llama(1))
    shutil.copy(other / "mp_rank_01_001/model.safetensors", ranks / "mp_rank_01_001/model.safetensors")
    ran = run("layout", "check", tmp_path / "layout.json", ranks, "--base", base, "--deep")
    assert is_failure(ran, 4, "mp_rank_01_001") and "layer_norm_weight" in ran.err


def rounded(masters: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.uint16]]:
    """Masters as BF16, to the nearest and of two as near to the even one."""
    bits = {name: each.view(np.uint32) for name, each in masters.items()}
    return {name: ((each + 0x7FFF + (each >> 16 & 1)) >> 16).astype(np.uint16) for name, each in bits.items()}


def test_masters_are_cast(run: Run, tmp_path: Path) -> None:
    """Ranks hold F32, of norms BF16; what changes too little to be seen in BF16 is no change."""
    random = np.random.default_rng(0)
    before = {name: random.standard_normal(shape, np.float32) for name, shape in LLAMA.shapes.items()}
    after = {name: each + random.standard_normal(each.shape, np.float32) * 3e-4 for name, each in before.items()}
    base, target = (
        write_dense(tmp_path / name, rounded(each), LLAMA.config)
        for name, each in (("base", before), ("target", after))
    )
    layout = tmp_path / "layout.json"
    sizes = ("--tp", 2, "--pp", 2, "--stored", "*norm*=BF16", "--stored", "F32")
    made = run("layout", "megatron", base, *sizes, "-o", layout, "--json").json
    norms = [name for name in LLAMA.shapes if "norm" in name]
    assert made["rules"] == {"cast": len(LLAMA.shapes) - len(norms)}
    ranks = []
    for folder, masters in (("before", before), ("after", after)):
        local: dict[str, NDArray[Any]] = {**masters, **{name: rounded(masters)[name] for name in norms}}
        ranks.append(write_megatron(tmp_path / folder, local))
    assert run("layout", "check", layout, ranks[0], "--base", base, "--deep").code == 0
    assert run("diff", base, ranks[0], "--layout", layout, "--exit-code").code == 0
    found = run("diff", base, ranks[1], "--layout", layout, "-o", tmp_path / "delta", "--json").json
    expected = sum(int((rounded(before)[name] != rounded(after)[name]).sum()) for name in before)
    assert found["changed_elements"] == expected and 0 < expected < found["elements"] // 2
    assert run("apply", tmp_path / "delta", base, "-q").code == 0
    assert tree(base) == tree(target)


QWEN3_MOE = next(each for each in MODELS if each.config["model_type"] == "qwen3_moe")


@pytest.mark.parametrize(
    ("model", "options", "sizes", "setup"),
    [
        (LLAMA, "--pp 2 --vpp 2", Sizes(pipeline=2, virtual=2), Options()),
        (LLAMA, "--tp 2 --stored *.mlp.*=F32", Sizes(tensor=2), Options(stored={"*.mlp.*": "F32"})),
        (QWEN3_MOE, "--tp 2 --ep 2", Sizes(tensor=2, expert=2), Options()),
        (QWEN3_MOE, "--tp 2 --ep 2 --etp 1", Sizes(tensor=2, expert=2, expert_tensor=1), Options()),
        (
            QWEN3_MOE,
            "--ep 2 --separate-experts",
            Sizes(expert=2),
            Options(naming=Naming(has_grouped_experts=False)),
        ),
        (
            deepseek("deepseek_v3"),
            "--pp 2 --skip-tensor model.layers.2.* --skip-tensor *.norm.weight",
            Sizes(pipeline=2),
            Options(skip=("model.layers.2.*", "*.norm.weight")),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_say_what_they_are_called(
    model: Model, options: str, sizes: Sizes, setup: Options, run: Run, tmp_path: Path
) -> None:
    base = write_forms(tmp_path / "base", model)
    assert run("layout", "megatron", base, *options.split(), "-o", tmp_path / "layout.json", "-q").code == 0
    expected = encode_layout(make_megatron(model.config, model.forms, sizes, setup))
    found = read_layout(tmp_path / "layout.json")
    assert found == decode_layout(expected, found.what)


def test_skipped_tensors_are_the_bases(run: Run, base: Path, tmp_path: Path) -> None:
    """Ranks that lack a tensor, which then is no change."""
    dense, skipped, layout = dense_llama(1), "model.norm.weight", tmp_path / "layout.json"
    ranks = write_megatron(tmp_path / "ranks", dense, Setup(lacks=("decoder.final_layernorm.weight",)))
    made = run("layout", "megatron", base, "--tp", 2, "--pp", 2, "--skip-tensor", skipped, "-o", layout, "--json").json
    assert made["skipped"] == [skipped]
    told = f"  not read   taken as the base's: 1 tensor: {skipped}\n"
    compared = ("diff", base, ranks, "--layout", layout)
    assert told in run(*compared).out and run(*compared, "--json").json["not_read"] == [skipped]
    remote = tmp_path / "remote"
    for place, options in ((base, ()), (ranks, ("-n",)), (ranks, ("--part", "0/1")), (ranks, ())):
        published = ("push", place, remote, "--baseline", tmp_path / "baseline", *options)
        is_sharded = place == ranks
        ran = run(*published, *(("--layout", layout) if is_sharded else ()))
        assert ran.code == 0 and (told in ran.out) == is_sharded, ran
    assert run(*published, "--layout", layout, "--json").json["not_read"] == [skipped]
    assert run(*compared, "-o", tmp_path / "delta", "-q").code == 0
    assert run("apply", tmp_path / "delta", base, "-q").code == 0
    target = write_dense(tmp_path / "target", dense | {skipped: dense_llama()[skipped]}, LLAMA.config)
    assert tree(base) == tree(target)


def test_the_config_is_found_or_named(run: Run, base: Path, tmp_path: Path) -> None:
    command = ("layout", "megatron", base, "--json")
    expected = run(*command).json["boxes"]
    (base / "config.json").rename(tmp_path / "other.json")
    lacking = run(*command[:-1])
    assert is_failure(lacking, 3, "config.json: no such file", "--config names the model's config.json")
    assert run(*command, "--config", tmp_path / "other.json").json["boxes"] == expected
    for text, code, message in (
        ("{", 4, "is not valid JSON"),
        ("[]", 4, "is not a JSON object"),
        ('{"model_type": "bert"}', 8, "bert"),
    ):
        (base / "config.json").write_text(text)
        assert is_failure(run(*command[:-1]), code, message)
    (base / "config.json").unlink()
    (base / "config.json").mkdir()
    with pytest.raises(LocalError, match="cannot be read: Is a directory"):
        megatron_layout(base)
    assert is_failure(run(*command[:-1], "--config", ""), 2, "--config", "variable")


def test_dtypes_of_shards_are_the_same_in_any_order(run: Run, base: Path, tmp_path: Path) -> None:
    """One without a pattern is that of all tensors that no pattern names."""
    orders = ("--stored", "F32", "--stored", "*norm*=BF16"), ("--stored", "*norm*=BF16", "--stored", "F32")
    for number, order in enumerate(orders):
        assert run("layout", "megatron", base, *order, "-o", tmp_path / f"{number}.json", "-q").code == 0
    found = read_layout(tmp_path / "0.json")
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert set(found.rules) == {name for name in LLAMA.shapes if "norm" not in name}


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ("--tp 0", "size tensor: is 0", "parallel sizes"),
        ("--tp two", "--tp", "dcr layout megatron --help"),
        ("--tp 3", "cannot be divided by 3 ranks", "parallel sizes of the trainer"),
        ("--pp 3", "4 layers cannot be divided by 3 stages", "say how many layers each stage has"),
        ("--ep -1", "size expert: is -1", "parallel sizes"),
        ("--etp 0", "size expert_tensor: is 0", "parallel sizes"),
        ("--vpp 2", "size virtual: is 2", "pipeline"),
        ("--layers 1,3", "names the layers of 2 stages, there are 1", "for each stage"),
        ("--pp 2 --layers 1,2", "3 layers together, the model has 4", "for each stage"),
        ("--pp 2 --layers 1,-3", "numbers of layers expected", "--layers 7,8,8,7"),
        ("--pp 2 --layers 1;3", "numbers of layers expected", "--layers 7,8,8,7"),
        ("--pp 2 --layers ,", "numbers of layers expected", "--layers 7,8,8,7"),
        ("--pp 2 --layers 99999999999999999999,1", "numbers of layers expected", "--layers 7,8,8,7"),
        ("--padded-vocab 8", "30 rows, more than the 8 of the padded vocabulary", ""),
        ("--stored FP32", "dtype FP32: is none of", "F32"),
        ("--stored I32", "cast makes one of F64, F32, F16, BF16", "the dtypes that shards have"),
        ("--stored F32 --stored *nrom*=BF16", "pattern *nrom*: no tensor of the base matches", "dcr inspect --tensors"),
        ("--stored *w*=F32 --stored *norm.w*=BF16", "pattern *norm.w*: others before it match", "names are those"),
        ("--skip-tensor lm_haed.weight", "pattern lm_haed.weight: no tensor of the base", "dcr inspect --tensors"),
        ("--stored =F32", "[PATTERN=]DTYPE expected", "--stored F32"),
        ("--stored x=", "[PATTERN=]DTYPE expected", "--stored F32"),
        ("--stored F32 --stored *=BF16", "each pattern once", "--stored F32"),
        ("--path one.safetensors --tp 2", "names one file for several ranks", "{tensor:02d}"),
        ("--path {rank}.safetensors", "is no pattern of fields", "{tensor:02d}"),
        ("--path ../{tensor}.safetensors", "unsafe name", "{tensor:02d}"),
        ("--path {tensor}.bin", "does not end with .safetensors", "{tensor:02d}"),
        ("-o", "-o", "dcr layout megatron --help"),
        ("--tensor 2", "--tensor", "--tensors"),
    ],
)
def test_bad_values_are_told(options: str, message: str, hint: str, run: Run, base: Path) -> None:
    ran = run("layout", "megatron", base, *options.split())
    assert is_failure(ran, 2, message, hint) and "\nhint: " in ran.err


# The files that vLLM saves.

DENSE, TIED, *_, WITH_HEAD = MODELS_OF_VLLM = CASES[0], CASES[4], CASES[6], CASES[7], CASES[8]


def write_case(root: Path, case: Case) -> None:
    """Write the checkpoints base and target, and what ranks hold of each, ranks-0 and ranks-1; paddings are no
    zeros."""
    root.mkdir()
    config = json.dumps(case.config)
    for version, name in enumerate(("base", "target")):
        dense = canonical(case, version)
        write_dense(root / name, dense, case.config)
        ranks = [held(case, dense, rank, padding=0x1234) for rank in range(case.ranks)]
        (write_vllm(root / f"ranks-{version}", ranks) / "config.json").write_text(config)


@pytest.mark.parametrize("mode", ["replace", "in-place"])
@pytest.mark.parametrize("case", MODELS_OF_VLLM, ids=lambda case: f"{case.family}{'-head' * case.has_head}")
def test_files_of_vllm_are_patched(case: Case, mode: str, run: Run, tmp_path: Path) -> None:
    """Dense models, of experts, and tied ones; buffers and paddings stay."""
    root, layout, delta = tmp_path / "case", tmp_path / "layout.json", tmp_path / "delta"
    write_case(root, case)
    ranks = root / "ranks-0"
    made = run("layout", "vllm-sharded-state", root / "base", ranks, "--tp", case.ranks, "-o", layout, "-q")
    assert made.code == 0
    assert run("layout", "check", layout, ranks, "--base", root / "base", "-q").code == 0
    saved = write_vllm(root / "saved", [held(case, canonical(case), rank) for rank in range(case.ranks)])
    assert run("layout", "check", layout, saved, "--base", root / "base", "--deep", "-q").code == 0
    assert run("diff", root / "base", root / "target", "-o", delta, "-q").code == 0
    options = ["--in-place"] if mode == "in-place" else []
    assert tree(ranks) != tree(root / "ranks-1")
    assert run("apply", delta, ranks, "--layout", layout, *options, "-q").code == 0
    assert tree(ranks) == tree(root / "ranks-1")
    assert run("verify", ranks, "--against", root / "target", "-q").code == 0
    assert run("verify", ranks, "--delta", delta, "-q").code == 0
    assert run("verify", ranks, "--against", root / "base", "-q").code == 1


@pytest.mark.parametrize("mode", ["replace", "in-place"])
def test_many_changes_of_tied_tensors_are_placed_once(mode: str, tmp_path: Path) -> None:
    root, layout = tmp_path / "case", tmp_path / "layout.json"
    write_case(root, WITH_HEAD)
    vllm_layout(root / "base", root / "ranks-0", tensor=2, output=layout)
    dense = canonical(WITH_HEAD)
    embeddings = dense["model.embed_tokens.weight"]
    embeddings ^= (np.random.default_rng(0).random(embeddings.shape) < 0.6).astype("<u2") * 0x0101
    dense["lm_head.weight"] = embeddings
    diff(root / "base", write_dense(root / "new", dense, WITH_HEAD.config), tmp_path / "delta", encoding="gap")
    apply(tmp_path / "delta", root / "ranks-0", mode=mode, layout=layout)
    assert verify(root / "ranks-0", against=root / "new").matches
    expected = write_vllm(root / "expected", [held(WITH_HEAD, dense, rank, padding=0x1234) for rank in (0, 1)])
    shutil.copy(root / "new/config.json", expected)
    assert tree(root / "ranks-0") == tree(expected)


def test_tied_tensors_come_from_a_remote_and_do_not_part(run: Run, tmp_path: Path) -> None:
    """The checkpoint has an output layer, which ranks have tied; where it is another one they cannot follow."""
    root, layout, remote = tmp_path / "case", tmp_path / "layout.json", tmp_path / "remote"
    write_case(root, WITH_HEAD)
    ranks = root / "ranks-0"
    assert run("layout", "vllm-sharded-state", root / "base", ranks, "--tp", 2, "-o", layout, "-q").code == 0
    for version in ("base", "target"):
        assert run("push", root / version, remote, "-q").code == 0
    assert run("pull", remote, ranks, "--layout", layout, "-q").code == 0
    assert tree(ranks) == tree(root / "ranks-1")
    assert run("verify", ranks, "--remote", remote, "-q").code == run("verify", ranks, "-q").code == 0
    parted = canonical(WITH_HEAD, 1)
    parted["lm_head.weight"][3, 4] ^= 1
    write_dense(root / "parted", parted, WITH_HEAD.config)
    assert run("push", root / "parted", remote, "-q").code == 0
    message = "lm_head.weight and model.embed_tokens.weight, which are one tensor here, differ in the target"
    for options in ((), ("--in-place",)):
        assert is_failure(run("pull", remote, ranks, *options), 8, message, "make a layout of a load that has both")
    assert tree(ranks) == tree(root / "ranks-1") and run("verify", ranks, "-q").code == 0
    # Nor can they be what they are not at the start.
    assert run("diff", root / "parted", root / "base", "-o", tmp_path / "back", "-q").code == 0
    assert is_failure(run("apply", tmp_path / "back", ranks), 5, "is not the base of this delta")


def test_the_options_of_files_of_vllm(run: Run, tmp_path: Path) -> None:
    root, case = tmp_path / "case", TIED
    write_case(root, case)
    command = ("layout", "vllm-sharded-state", root / "base", root / "ranks-0")
    result = vllm_layout(root / "base", root / "ranks-0", tensor=case.ranks, output=tmp_path / "layout.json")
    assert result.padding > 0 and result.shards == 3 * case.ranks
    again = run(*command, "--tp", case.ranks, "-o", tmp_path / "again.json", "--json").json
    assert (again["padding"], again["boxes"]) == (result.padding, result.boxes)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "layout.json").read_bytes()
    # Another file beside them, and a config of another name.
    shutil.copy(root / "base" / "config.json", tmp_path / "other.json")
    (root / "base" / "config.json").unlink()
    shutil.copy(root / "ranks-0" / "model-rank-0-part-0.safetensors", root / "ranks-0" / "draft.safetensors")
    named = (*command, "--tp", case.ranks, "--config", tmp_path / "other.json")
    assert is_failure(run(*named), 8, "is not named as vLLM names")
    assert run(*named, "--skip", "draft.safetensors", "--json").json["boxes"] == result.boxes
    for options, message in ((("--tp", 0), "among 0 ranks"), (("--tp", 3), "among 3 ranks"), (("--tp", "a"), "--tp")):
        ran = run(*command, "--config", tmp_path / "other.json", "--skip", "draft.safetensors", *options)
        assert is_failure(ran, 2, message) and "\nhint: " in ran.err


# Loaders.


def test_a_loader_is_probed(run: Run, loader: str, tmp_path: Path) -> None:
    layout, scratch = tmp_path / "layout.json", tmp_path / "scratch"
    before, after = ({name: each.astype("f4") for name, each in dense_llama(version).items()} for version in (0, 1))
    base, target = (
        write_dense(tmp_path / name, each, LLAMA.config) for name, each in (("base", before), ("target", after))
    )
    scratch.mkdir()
    made = run("layout", "probe", f"{loader}:ranks", base, "--scratch", scratch, "-o", layout, "--json").json
    assert (made["tensors"], made["shards"], made["skipped"]) == (len(LLAMA.shapes), 2, [])
    assert list(scratch.iterdir()) == []
    result = probe_layout(f"{loader}:ranks", base, scratch=scratch, output=tmp_path / "again.json")
    assert result.boxes == made["boxes"] and (tmp_path / "again.json").read_bytes() == layout.read_bytes()
    ranks = []
    for name, dense in (("before", before), ("after", after)):
        (tmp_path / name).mkdir()
        for rank in (0, 1):
            local = {each: np.split(array, 2)[rank] if array.ndim > 1 else array for each, array in dense.items()}
            (tmp_path / name / f"rank-{rank}.safetensors").write_bytes(shard_bytes(as_tensors(local)))
        shutil.copy(base / "config.json", tmp_path / name)
        ranks.append(tmp_path / name)
    assert run("layout", "check", layout, ranks[0], "--base", base, "--deep", "-q").code == 0
    assert run("diff", base, ranks[0], "--layout", layout, "--exit-code", "-q").code == 0
    assert run("diff", base, target, "-o", tmp_path / "delta", "-q").code == 0
    assert run("apply", tmp_path / "delta", ranks[0], "--layout", layout, "-q").code == 0
    assert tree(ranks[0]) == tree(ranks[1])


@pytest.mark.parametrize(
    "order", ["lm_head.weight=model.embed_tokens.weight", "model.embed_tokens.weight=lm_head.weight"]
)
def test_a_loader_with_one_tensor_for_two_that_are_tied(order: str, run: Run, loader: str, tmp_path: Path) -> None:
    """The checkpoint has both; what the loader has is read as both, and is changed where both are."""
    layout, delta, engine = tmp_path / "layout.json", tmp_path / "delta", tmp_path / "engine"
    versions = []
    for version, name in enumerate(("base", "target", "parted")):
        dense = {each: array.astype("f4") for each, array in dense_llama(min(version, 1)).items()}
        if name != "parted":
            dense["lm_head.weight"] = dense["model.embed_tokens.weight"]
        versions.append(write_dense(tmp_path / name, dense, LLAMA.config))
        if version == 0:
            engine.mkdir()
            held = {each: array for each, array in dense.items() if each != "lm_head.weight"}
            (engine / "model.safetensors").write_bytes(shard_bytes(as_tensors(held)))
            shutil.copy(versions[0] / "config.json", engine)
    base, target, parted = versions
    probed = ("layout", "probe", f"{loader}:headless", base, "--scratch", tmp_path, "--tied", order, "-o", layout)
    assert run(*probed, "--json").json["skipped"] == []
    assert run("layout", "check", layout, engine, "--base", base, "--deep", "-q").code == 0
    assert run("diff", base, target, "-o", delta, "-q").code == 0
    assert run("apply", delta, engine, "--layout", layout, "-q").code == 0
    assert run("verify", engine, "--against", target, "-q").code == 0
    assert run("diff", target, parted, "-o", tmp_path / "part", "-q").code == 0
    assert is_failure(run("apply", tmp_path / "part", engine), 8, "which are one tensor here, differ in the target")


def test_the_options_of_a_probe(run: Run, loader: str, tmp_path: Path) -> None:
    dense = {name: each.astype("f4") for name, each in dense_llama().items()}
    base = write_dense(tmp_path / "base", dense, LLAMA.config)

    def probed(name: str, *options: str | Path) -> Ran:
        return run("layout", "probe", name, base, "--scratch", tmp_path, *options)

    lacking = probed(f"{loader}:headless")
    assert is_failure(lacking, 8, "holds nothing of tensors lm_head.weight", "right to leave out")
    lacking = probed(f"{loader}:headless", "--may-lack", "lm_head.*", "--may-lack", "nothing", "--json")
    assert lacking.json["skipped"] == ["lm_head.weight"]
    for options, message in (
        ("lm_head.weight", "A=B expected"),
        ("lm_head.weight=", "A=B expected"),
        ("lm_head.weight=head", "the base has no tensor head"),
        ("lm_head.weight=lm_head.weight", "these are F32 [30, 8] and F32 [30, 8]"),
        ("lm_head.weight=model.norm.weight", "these are F32 [30, 8] and F32 [8]"),
    ):
        assert is_failure(probed(f"{loader}:headless", "--tied", options), 2, message)
    tied = "--tied", "lm_head.weight=model.embed_tokens.weight"
    assert is_failure(probed(f"{loader}:whole", *tied), 2, "the loader has both, each for itself", "leave it out")
    lacking = probed(f"{loader}:first_rank", "--may-lack", "*")
    assert is_failure(lacking, 4, "lm_head.weight: element [15, 0] is in no shard")
    for name, code, message, hint in (
        (loader, 2, "is not of the form module:function", "such as package.module:load"),
        (f"{loader}:number", 2, "has no function of that name", "spelled"),
        (f"{loader}:none", 2, "has no function of that name", "spelled"),
        (f"no_{loader}:load", 2, "cannot be imported", "PYTHONPATH"),
        (f"{loader}:fail", 8, "OSError: no room", "try it alone"),
    ):
        assert is_failure(probed(name), code, message, hint), name
    assert is_failure(probed(f"{loader}:ranks", "--scratch", tmp_path / "none"), 9, "none: cannot be opened")
    assert is_failure(probed(f"{loader}:ranks", "--scratch", ""), 2, "--scratch", "variable")
