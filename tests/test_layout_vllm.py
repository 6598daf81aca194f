"""The files that vLLM saves of its own, against ranks that are cut and joined with NumPy, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from box_cases import places
from dcr_cli.checkpoint.checkpoint import open_checkpoint
from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, UsageError
from dcr_cli.layout.coverage import tied_tensors
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import KEEP, ZERO, Form, Layout
from dcr_cli.layout.opening import forms_of
from dcr_cli.layout.shards import open_shards
from dcr_cli.layout.vllm import sharded_state_layout
from strategies import write_checkpoint
from vllm_models import CASES, IDS, VOCABULARY, Arrays, Case, canonical, held, write_ranks


def write_case(tmp_path: Path, case: Case, change: Callable[[list[Arrays]], None] = lambda ranks: None) -> list[Arrays]:
    base = canonical(case)
    write_checkpoint(tmp_path / "base", {name: ("BF16", each.shape, each.tobytes()) for name, each in base.items()})
    ranks = [held(case, base, rank) for rank in range(case.ranks)]
    change(ranks)
    write_ranks(tmp_path / "ranks", ranks)
    return ranks


def layout_of(tmp_path: Path, case: Case, *, ranks: int | None = None, **config: Any) -> Layout:
    forms = forms_of(open_checkpoint(tmp_path / "base"))
    shards = open_shards(tmp_path / "ranks")
    return sharded_state_layout({**case.config, **config}, forms, shards, tensor_parallel=ranks or case.ranks)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_ranks_are_read_as_the_checkpoint(tmp_path: Path, case: Case) -> None:
    write_case(tmp_path, case)
    base = open_checkpoint(tmp_path / "base")
    laid = lay(open_shards(tmp_path / "ranks"), layout_of(tmp_path, case), base)
    with base.reader() as reader, laid.reader() as other:
        for tensor in base.tensors:
            expected, found = bytearray(tensor.bytes), bytearray(tensor.bytes)
            reader.read_into(tensor, 0, expected)
            other.read_into(laid.by_name[tensor.name], 0, found)
            assert found == expected, tensor.name


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_ranks_hold_is_made_of_the_checkpoint(tmp_path: Path, case: Case) -> None:
    ranks = write_case(tmp_path, case)
    base = canonical(case)
    layout = layout_of(tmp_path, case)
    tied = tied_tensors(layout)
    seen = set()
    for rank, name, tensor in tensors_of(layout):
        if name.endswith("_scale"):
            assert (tensor.form, tensor.placements, tensor.fill) == (Form("F32", ()), (), KEEP)
            continue
        made = np.zeros(tensor.form.elements, np.uint16)
        covered = 0
        for placement in tensor.placements:
            flat = base[placement.tensor].reshape(-1)
            for there, here in places(placement.box).items():
                made[here] = flat[there]
            covered += placement.box.elements if placement.tensor not in tied else 0
        expected = ranks[rank][name]
        assert made.reshape(tensor.form.shape).tolist() == expected.tolist(), name
        assert tensor.fill == (KEEP if covered == expected.size else ZERO)
        seen.add((rank, name))
    assert seen == {(rank, name) for rank, arrays in enumerate(ranks) for name in arrays}


def tensors_of(layout: Layout) -> Iterator[tuple[int, str, Any]]:
    for path, tensors in layout.shards.items():
        for name, tensor in tensors.items():
            yield int(path.split("-")[2]), name, tensor


def test_what_no_rank_holds_is_skipped(tmp_path: Path) -> None:
    case = CASES[4]
    write_case(tmp_path, case)
    forms = dict(forms_of(open_checkpoint(tmp_path / "base")))
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    forms[inverse] = Form("F32", (2,))
    shards = open_shards(tmp_path / "ranks")
    layout = sharded_state_layout(case.config, forms, shards, tensor_parallel=2)
    assert layout.skipped == {inverse}


def test_a_tied_head_that_the_checkpoint_has_is_the_embeddings(tmp_path: Path) -> None:
    case = CASES[-1]
    write_case(tmp_path, case)
    layout = layout_of(tmp_path, case)
    assert tied_tensors(layout) == {"model.embed_tokens.weight": "lm_head.weight"}
    forms = dict(forms_of(open_checkpoint(tmp_path / "base")))
    forms["lm_head.weight"] = Form("BF16", (VOCABULARY - 1, 12))
    with pytest.raises(DamagedError, match=r"lm_head.weight: is BF16 \[69, 12\], but tied to .*BF16 \[70, 12\]"):
        sharded_state_layout(case.config, forms, open_shards(tmp_path / "ranks"), tensor_parallel=2)


def test_tied_embeddings_under_both_names(tmp_path: Path) -> None:
    def both(ranks: list[Arrays]) -> None:
        for arrays in ranks:
            arrays["model.embed_tokens.weight"] = arrays["lm_head.weight"]

    write_case(tmp_path, CASES[4], both)
    tensors = {(rank, name): tensor for rank, name, tensor in tensors_of(layout_of(tmp_path, CASES[4]))}
    assert tensors[0, "lm_head.weight"] == tensors[0, "model.embed_tokens.weight"]


def test_a_head_beside_the_embeddings_is_not_tied(tmp_path: Path) -> None:
    """Whatever the config says: vLLM takes the one that the checkpoint has."""
    write_case(tmp_path, CASES[0])
    assert layout_of(tmp_path, CASES[0], tie_word_embeddings=True).shards == layout_of(tmp_path, CASES[0]).shards


def test_a_head_that_the_checkpoint_lacks_is_a_replica(tmp_path: Path) -> None:
    write_case(tmp_path, CASES[0])
    forms = dict(forms_of(open_checkpoint(tmp_path / "base")))
    del forms["lm_head.weight"]
    config = {**CASES[0].config, "tie_word_embeddings": True}
    shards = open_shards(tmp_path / "ranks")
    laid = lay(shards, sharded_state_layout(config, forms, shards, tensor_parallel=2), None)
    tensor = laid.by_name["model.embed_tokens.weight"]
    with laid.reader() as reader, pytest.raises(DamagedError, match=r"lm_head\.weight"):
        reader.read_into(tensor, 0, bytearray(tensor.bytes))


@pytest.mark.parametrize("family", ["gpt2", None, 3])
def test_another_family_is_refused(tmp_path: Path, family: object) -> None:
    write_case(tmp_path, CASES[1])
    with pytest.raises(UnsupportedError, match="is none of llama, mistral") as caught:
        layout_of(tmp_path, CASES[1], model_type=family)
    assert "dcr layout probe" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("config", "ranks", "error", "facts"),
    [
        ({"num_attention_heads": None}, 2, DamagedError, "num_attention_heads is not an integer"),
        ({"num_key_value_heads": True}, 2, DamagedError, "num_key_value_heads is not an integer"),
        ({"tie_word_embeddings": 0}, 2, DamagedError, "tie_word_embeddings is neither"),
        ({}, 3, UsageError, "4 heads, 2 of keys and values, cannot be divided among 3 ranks"),
        ({"num_key_value_heads": 3}, 2, UsageError, "cannot be divided among 2 ranks"),
        ({}, -1, UsageError, "among -1 ranks"),
        ({}, 1, DamagedError, "is of rank 1, but there are 1"),
        ({}, 4, DamagedError, r"is BF16 \[64, 12\], BF16 \[32, 12\] expected of 4 ranks"),
    ],
)
def test_a_config_that_is_not_the_models_is_refused(
    tmp_path: Path, config: dict[str, Any], ranks: int, error: type[DcrError], facts: str
) -> None:
    case = CASES[0]
    write_case(tmp_path, case)
    with pytest.raises(error, match=facts):
        layout_of(tmp_path, case, ranks=ranks, **config)


def lose(ranks: list[Arrays]) -> None:
    del ranks[1]["model.layers.1.mlp.experts.routed_experts.w2_weight"]


def add(ranks: list[Arrays]) -> None:
    ranks[1]["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.uint16)


def shorten(ranks: list[Arrays]) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    ranks[1][name] = ranks[1][name][:-4]


def leave(ranks: list[Arrays]) -> None:
    ranks.pop()


@pytest.mark.parametrize(
    ("change", "error", "facts"),
    [
        (lose, DamagedError, r"rank 1 of 2 lacks tensors: model.layers.1.mlp.experts.w2_weight$"),
        (
            add,
            UnsupportedError,
            r"model-rank-1-part-\d.safetensors: tensor model.layers.0.mlp.extra.weight is made of no",
        ),
        (shorten, DamagedError, r"qkv_proj.weight is BF16 \[12, 12\], BF16 \[16, 12\] expected of 2 ranks"),
        (leave, DamagedError, r"rank 1 of 2 lacks tensors"),
    ],
)
def test_ranks_that_are_not_the_models_are_refused(
    tmp_path: Path, change: Callable[[list[Arrays]], None], error: type[DcrError], facts: str
) -> None:
    write_case(tmp_path, CASES[5], change)
    with pytest.raises(error, match=facts):
        layout_of(tmp_path, CASES[5])


@pytest.mark.parametrize(
    "name", ["model-pp-0-tp-0-part-0.safetensors", "model.safetensors", "more/model-rank-0-part-9.safetensors"]
)
def test_files_of_other_names_are_refused(tmp_path: Path, name: str) -> None:
    write_case(tmp_path, CASES[1])
    (tmp_path / "ranks/more").mkdir()
    (tmp_path / "ranks/model-rank-0-part-0.safetensors").rename(tmp_path / "ranks" / name)
    with pytest.raises(UnsupportedError, match="is not named as vLLM names"):
        layout_of(tmp_path, CASES[1])


W2 = "model.layers.1.mlp.experts.{}.down_proj.weight"


@pytest.mark.parametrize(
    ("forms", "error", "facts"),
    [
        ({"model.layers.0.mlp.extra.weight": Form("BF16", (3,))}, UnsupportedError, "extra.weight is of no kind"),
        ({"model.layers.0.self_attn.q_proj.bias": Form("BF16", (16,))}, DamagedError, "lacks .*qkv_proj.bias"),
        ({W2.format(9): Form("BF16", (12, 8))}, DamagedError, "there are only 0, 1, 2, 9"),
        ({W2.format(2): Form("BF16", (12, 7))}, UnsupportedError, "cannot be divided into 2 parts"),
        ({W2.format(2): Form("BF16", (12, 6))}, UnsupportedError, "cannot be one tensor with"),
        ({W2.format(2): Form("F16", (12, 8))}, UnsupportedError, "cannot be one tensor with"),
        ({"model.norm.weight": Form("F32", (12,))}, DamagedError, "model.norm.weight is BF16 .* F32 .* expected"),
        ({"model.norm.weight": Form("F4", (12,))}, UnsupportedError, "cannot be one tensor with"),
    ],
)
def test_a_checkpoint_that_is_not_the_models_is_refused(
    tmp_path: Path, forms: Mapping[str, Form], error: type[DcrError], facts: str
) -> None:
    write_case(tmp_path, CASES[5])
    known = forms_of(open_checkpoint(tmp_path / "base"))
    with pytest.raises(error, match=facts):
        sharded_state_layout(CASES[5].config, {**known, **forms}, open_shards(tmp_path / "ranks"), tensor_parallel=2)
