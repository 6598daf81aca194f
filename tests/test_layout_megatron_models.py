"""Layouts of whole models on Megatron-Core's ranks: which file has which tensors, every element owned once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_cli.errors import DamagedError, DcrError, UnsupportedError, UsageError
from dcr_cli.layout.coverage import Coverage
from dcr_cli.layout.laid import lay
from dcr_cli.layout.layout import ZERO, Form, Layout, Rule
from dcr_cli.layout.megatron.assembly import Options, megatron_layout
from dcr_cli.layout.megatron.dividing import Naming
from dcr_cli.layout.megatron.families import _FAMILIES
from dcr_cli.layout.megatron.ranks import Rank, Sizes
from dcr_cli.layout.residual.rules import Elementwise, conversion_of
from dcr_cli.layout.shards import open_shards
from megatron_models import (
    DIM,
    EXPERTS,
    HEADS,
    HIDDEN,
    LLAMA,
    MODELS,
    VOCABULARY,
    Model,
    after_last,
    deepseek,
    gpt_oss,
    minimax,
    nemotron,
    qwen3_next,
    tied,
)
from megatron_shards import dense_llama, write_ranks

SIZES = [
    Sizes(),
    Sizes(tensor=2),
    Sizes(tensor=8),
    Sizes(tensor=2, pipeline=2),
    Sizes(tensor=2, expert=2),
    Sizes(tensor=2, pipeline=2, expert=2, expert_tensor=1),
    Sizes(tensor=4, expert=4, expert_tensor=1),
    Sizes(tensor=1, expert=2, expert_tensor=2),
]


def of_type(model_type: str) -> Model:
    return next(each for each in MODELS if each.config["model_type"] == model_type)


def owners(layout: Layout) -> dict[str, int]:
    """How many boxes own elements of each tensor; DamagedError unless every element is owned once."""
    coverage, forms = Coverage(layout), layout.forms()
    return {
        name: len(coverage.owners_of(name, forms[name], placed).owners)
        for name, placed in layout.placed().items()
        if name not in layout.skipped
    }


def with_next_tokens(found: Model) -> Model:
    """A model of two layers whose last one is there once more, to predict one token more."""
    last = {name.removeprefix("model.layers.1."): shape for name, shape in found.shapes.items() if ".layers.1." in name}
    return Model({**found.config, "num_nextn_predict_layers": 1}, found.shapes | after_last(last, 2))


def folder(shape: str) -> str:
    return f"mp_rank_{shape}/model.safetensors"


def test_there_is_a_model_of_every_family() -> None:
    assert sorted(each.config["model_type"] for each in MODELS) == sorted(_FAMILIES)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_element_of_every_family_is_owned_once(sizes: Sizes) -> None:
    for each in MODELS:
        if each.config["model_type"] == "gpt_oss" and sizes.tensor_of_experts > 1:
            with pytest.raises(UsageError, match=r"gate_up_proj: is not known to be divided by \d ranks"):
                megatron_layout(each.config, each.forms, sizes)
            continue
        # Gated delta nets and Mamba mixers have four heads of a kind here.
        if sizes.tensor > 4 and each.config["model_type"] in ("qwen3_next", "nemotron_h"):
            with pytest.raises(UsageError, match="cannot be divided by 8 ranks"):
                megatron_layout(each.config, each.forms, sizes)
            continue
        layout = megatron_layout(each.config, each.forms, sizes)
        assert set(owners(layout)) == set(each.shapes)
        assert len(layout.shards) == len(list(sizes.ranks()))


def test_shards_cut_by_numpy_are_the_dense_model(tmp_path: Path) -> None:
    dense = dense_llama()
    layout = megatron_layout(LLAMA.config, LLAMA.forms, Sizes(tensor=2, pipeline=2))
    laid = lay(open_shards(write_ranks(tmp_path, dense)), layout, None)
    with laid.reader() as reader:
        for tensor in laid.tensors:
            found = bytearray(tensor.bytes)
            reader.read_into(tensor, 0, found)
            assert found == dense[tensor.name].tobytes(), tensor.name
    assert {tensor.name for tensor in laid.tensors} == set(dense)


def test_stages_number_their_own_layers() -> None:
    layout = megatron_layout(LLAMA.config, LLAMA.forms, Sizes(pipeline=2, layers=(1, 3)))
    first, last = layout.shards[folder("00_000")], layout.shards[folder("00_001")]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in first and "decoder.layers.1.mlp.linear_fc2.weight" not in first
    assert last["decoder.layers.2.mlp.linear_fc2.weight"].placements[0].tensor == "model.layers.3.mlp.down_proj.weight"


def test_virtual_stages_take_turns() -> None:
    layout = megatron_layout(LLAMA.config, LLAMA.forms, Sizes(pipeline=2, virtual=2))
    assert set(layout.shards) == {folder("00_000"), folder("00_001")}
    layers = {
        (path, name): local.placements[0].tensor.split(".")[2]
        for path, tensors in layout.shards.items()
        for name, local in tensors.items()
        if name.endswith("linear_fc2.weight")
    }
    end = "decoder.layers.0.mlp.linear_fc2.weight"
    assert layers == {
        (folder("00_000"), f"model0.{end}"): "0",
        (folder("00_001"), f"model0.{end}"): "1",
        (folder("00_000"), f"model1.{end}"): "2",
        (folder("00_001"), f"model1.{end}"): "3",
    }
    assert "model0.embedding.word_embeddings.weight" in layout.shards[folder("00_000")]
    assert "model1.output_layer.weight" in layout.shards[folder("00_001")]


def test_a_tied_embedding_is_in_the_last_stage_too() -> None:
    each = tied(LLAMA)
    one = megatron_layout(each.config, each.forms, Sizes())
    assert "output_layer.weight" not in one.shards[folder("00")]
    two = megatron_layout(each.config, each.forms, Sizes(pipeline=2))
    local = two.shards[folder("00_001")]["output_layer.weight"]
    assert [placement.tensor for placement in local.placements] == ["model.embed_tokens.weight"]
    assert "embedding.word_embeddings.weight" not in two.shards[folder("00_001")]
    # The base may have it twice, under both names.
    both = megatron_layout({**LLAMA.config, "tie_word_embeddings": True}, LLAMA.forms, Sizes(pipeline=2))
    for file, name in (("00_000", "embedding.word_embeddings.weight"), ("00_001", "output_layer.weight")):
        found = [placement.tensor for placement in both.shards[folder(file)][name].placements]
        assert found == ["model.embed_tokens.weight", "lm_head.weight"]
    assert owners(both)


def test_the_last_stage_has_the_embedding_where_it_predicts_more() -> None:
    each = deepseek("deepseek_v3")
    layout = megatron_layout(each.config, each.forms, Sizes(pipeline=2))
    last = layout.shards[folder("00_001")]
    assert "embedding.word_embeddings.weight" in last and "mtp.layers.0.eh_proj.weight" in last
    name = "mtp.layers.0.mtp_model_layer.self_attention.linear_kv_up_proj.weight"
    assert last[name].placements[0].tensor == "model.layers.2.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("is_tied", [False, True])
def test_layers_after_the_last_may_have_copies_of_the_vocabulary(is_tied: bool) -> None:
    """Bases have the embedding and the output layer once more there, ranks have not."""
    for each in (deepseek("deepseek_v3"), with_next_tokens(of_type("glm4_moe"))):
        copies = {
            f"model.layers.2.{name}.weight": (VOCABULARY, HIDDEN) for name in ("embed_tokens", "shared_head.head")
        }
        forms = Model(each.config, each.shapes | copies).forms
        layout = megatron_layout({**each.config, "tie_word_embeddings": is_tied}, forms, Sizes(tensor=2))
        assert set(owners(layout)) == set(forms)
        placed = layout.placed()
        for copy, name in zip(copies, ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
            assert placed[copy] == placed[name]
        # One that cannot be a copy is none.
        forms["model.layers.2.embed_tokens.weight"] = Form("F32", (VOCABULARY, HIDDEN))
        with pytest.raises(DamagedError, match=r"embed_tokens\.weight: is F32 .*, but tied to one that is BF16"):
            megatron_layout(each.config, forms, Sizes(tensor=2))
        # What is skipped is none of them.
        options = Options(skip=("model.layers.2.*",))
        assert copies.keys() <= megatron_layout(each.config, forms, Sizes(), options).skipped


def test_padding_is_zeros() -> None:
    layout = megatron_layout(LLAMA.config, LLAMA.forms, Sizes(tensor=2), Options(padded_vocabulary=64))
    first, last = (layout.shards[folder(each)]["embedding.word_embeddings.weight"] for each in ("00", "01"))
    assert first.form.shape == last.form.shape == (32, HIDDEN)
    assert (first.fill, last.fill) == (ZERO, ZERO)
    assert sum(placement.box.elements for placement in first.placements) == VOCABULARY * HIDDEN
    assert not last.placements
    assert owners(layout)


def test_experts_are_dealt_to_expert_ranks() -> None:
    each = of_type("qwen3_moe")
    layout = megatron_layout(each.config, each.forms, Sizes(tensor=2, expert=2, expert_tensor=1))
    # Both ranks hold whole experts, and one of two parts of everything else.
    assert set(layout.shards) == {folder("00_000"), folder("01_001")}
    second = layout.shards[folder("01_001")]
    found = {
        name: local.placements[0].tensor.split(".")[5]
        for name, local in second.items()
        if ".experts.linear_fc2" in name
    }
    at = "mlp.experts.linear_fc2.weight"
    assert found == {f"decoder.layers.{layer}.{at}{own}": str(2 + own) for layer in (0, 1) for own in (0, 1)}
    assert second["decoder.layers.0.mlp.experts.linear_fc2.weight0"].form.shape == (HIDDEN, 16)
    assert second["decoder.layers.0.self_attention.linear_proj.weight"].form.shape == (HIDDEN, HEADS * DIM // 2)


def test_expert_ranks_hold_replicas_of_dense_tensors() -> None:
    each = of_type("mixtral")
    layout = megatron_layout(each.config, each.forms, Sizes(tensor=2, expert=2))
    assert set(layout.shards) == {folder(f"{t:02}_{e:03}") for t in range(2) for e in range(2)}
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert layout.shards[folder("01_000")][name] == layout.shards[folder("01_001")][name]
    placed = layout.placed()["model.layers.1.self_attn.k_proj.weight"]
    assert [each.path for each in placed] == [folder(f"{t:02}_{e:03}") for e in range(2) for t in range(2)]


def test_a_layer_with_experts_has_a_norm_of_its_own() -> None:
    each = of_type("deepseek_v2")
    layout = megatron_layout(each.config, each.forms, Sizes())
    names = set(layout.shards[folder("00")])
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.0.pre_mlp_layernorm.weight" not in names
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" not in names


def test_names_without_transformer_engine() -> None:
    each = of_type("qwen3_moe")
    naming = Naming(has_fused_norms=False, has_grouped_experts=False)
    layout = megatron_layout(each.config, each.forms, Sizes(expert=2), Options(naming=naming))
    names = set(layout.shards[folder("00_001")])
    assert {
        "decoder.layers.1.input_layernorm.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
    } <= names
    assert not any("layer_norm_weight" in name or name.endswith("weight1") for name in names)
    with_latent = of_type("deepseek_v3")
    layout = megatron_layout(with_latent.config, with_latent.forms, Sizes(tensor=2), Options(naming=naming))
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in layout.shards[folder("00")]
    # What Transformer Engine's layers have whole on every rank, Megatron-Core's own divide.
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert layout.shards[folder("00")][name].form.shape == (4, HIDDEN)
    layout = megatron_layout(with_latent.config, with_latent.forms, Sizes(tensor=2))
    assert layout.shards[folder("00")][name].form.shape == (8, HIDDEN)


def test_names_of_a_gated_delta_net_and_its_rule() -> None:
    each = qwen3_next()
    layout = megatron_layout(each.config, each.forms, Sizes(tensor=2))
    own = {name for name in layout.shards[folder("00")] if name.startswith("decoder.layers.0.self_attention")}
    ends = ["in_proj.layer_norm_weight", "in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight"]
    assert own == {f"decoder.layers.0.self_attention.{end}" for end in [*ends, "out_proj.weight"]}
    name = "model.layers.0.linear_attn.norm.weight"
    assert {of: (rule.kind, rule.of) for of, rule in layout.rules.items()} == {name: ("add-one", name)}
    assert layout.stored == {name: Form("BF16", (DIM,))}


@pytest.mark.parametrize("half", ["BF16", "F16"])
def test_masters_of_norms_less_one_are_rounded_before_one_is_added(half: str) -> None:
    """Megatron-Core adds 1 to parameters, which are rounded masters: what PyTorch makes of many of them."""
    torch = pytest.importorskip("torch")
    each, name = qwen3_next(), "model.layers.0.linear_attn.norm.weight"
    forms = {**each.forms, name: Form(half, (DIM,))}
    layout = megatron_layout(each.config, forms, Sizes(), Options(stored={"*": "F32"}))
    assert layout.rules[name] == Rule("add-one", name, {"through": half})
    random = np.random.default_rng(0)
    exponents = np.ldexp(np.float32(1), random.integers(-20, 4, 1 << 18)).astype(np.float32)
    masters = (random.standard_normal(1 << 18).astype(np.float32) - np.float32(0.5)) * exponents
    parameters = torch.from_numpy(masters).to(torch.bfloat16 if half == "BF16" else torch.float16)
    expected = (parameters + 1).view(torch.int16).numpy().view(np.uint16)
    conversion = conversion_of(name, layout)
    assert isinstance(conversion, Elementwise)
    np.testing.assert_array_equal(conversion.convert(masters.view(np.uint32)), expected)
    # What is not rounded first is another number now and then.
    assert (Elementwise("F32", half, 1).convert(masters.view(np.uint32)) != expected).any()
    # Parameters that are there themselves, and norms of F32, are not rounded.
    assert not megatron_layout(each.config, forms, Sizes()).rules[name].options
    forms[name] = Form("F32", (DIM,))
    assert not megatron_layout(each.config, forms, Sizes(), Options(stored={"*": "F32"})).rules[name].options


def test_names_of_a_mamba_model() -> None:
    each = nemotron()
    layout = megatron_layout(each.config, each.forms, Sizes(tensor=2, expert=2))
    names = set(layout.shards[folder("01_001")])
    assert {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.0.mixer.conv1d_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight1",
        "decoder.final_norm.weight",
    } <= names


def test_norms_of_heads_are_shared_where_there_are_few() -> None:
    each = minimax()
    layout = megatron_layout(each.config, each.forms, Sizes(tensor=8))
    name = "decoder.layers.0.self_attention.k_layernorm.weight"
    boxes = [layout.shards[folder(f"{rank:02}")][name].placements[0].box for rank in range(8)]
    assert [box.canonical for box in boxes] == [rank // 2 * DIM for rank in range(8)]


def test_masters_are_cast() -> None:
    layout = megatron_layout(LLAMA.config, LLAMA.forms, Sizes(tensor=2), Options(stored={"*norm*": "BF16", "*": "F32"}))
    cast = {name for name in LLAMA.shapes if "norm" not in name}
    assert {name: (rule.kind, rule.of) for name, rule in layout.rules.items()} == {
        name: ("cast", name) for name in cast
    }
    assert layout.stored == {name: Form("F32", LLAMA.shapes[name]) for name in cast}
    local = layout.shards[folder("00")]
    assert local["decoder.layers.0.mlp.linear_fc1.weight"].form.dtype == "F32"
    assert local["decoder.final_layernorm.weight"].form.dtype == "BF16"
    assert owners(layout)


def test_the_bias_of_a_router_is_always_f32() -> None:
    each = deepseek("deepseek_v3")
    layout = megatron_layout(each.config, each.forms, Sizes())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert layout.rules[name].kind == "cast" and layout.stored[name] == Form("F32", (EXPERTS,))
    as_stored = {**each.forms, name: Form("F32", (EXPERTS,))}
    assert name not in megatron_layout(each.config, as_stored, Sizes()).rules
    # Unless a pattern says so of it.
    assert name not in megatron_layout(each.config, as_stored, Sizes(), Options(stored={"*": "BF16"})).rules
    assert name in megatron_layout(each.config, as_stored, Sizes(), Options(stored={"*bias": "BF16"})).rules


def test_weights_of_every_family_may_be_fp8() -> None:
    """Ranks hold what they hold of a BF16 model; every tensor but the scales is in the same boxes."""
    for each in MODELS:
        forms = each.forms
        for name, shape in each.shapes.items():
            if len(shape) == 2 and name.endswith("_proj.weight"):
                scales = Form("F32", tuple(-(-count // 128) for count in shape))
                forms |= {name: Form("F8_E4M3", shape), f"{name}_scale_inv": scales}
        sizes = Sizes(tensor=2, expert_tensor=1)
        plain, layout = (megatron_layout(each.config, some, sizes) for some in (each.forms, forms))
        assert layout.shards == plain.shards and layout.tensors == forms
        assert owners(layout) == owners(plain)
        made = {name for name, rule in layout.rules.items() if rule.kind == "fp8-block"}
        assert made == {name for name in forms if forms[name].dtype == "F8_E4M3" or name.endswith("_scale_inv")}


def test_scales_of_skipped_weights_are_skipped() -> None:
    name = f"{LAYER}.self_attn.o_proj.weight"
    scales = {f"{name}_scale_inv": Form("F32", (1, 1))}
    forms = {**reshaped(name, HIDDEN, HEADS * DIM, dtype="F8_E4M3"), **scales}
    assert megatron_layout(LLAMA.config, forms, Sizes()).rules.keys() == {name, *scales}
    layout = megatron_layout(LLAMA.config, forms, Sizes(), Options(skip=(name,)))
    assert layout.skipped == {name, *scales} and not layout.rules
    assert owners(layout)


def test_skipped_tensors_are_in_no_shard() -> None:
    each = deepseek("deepseek_v3")
    layout = megatron_layout(each.config, each.forms, Sizes(pipeline=2), Options(skip=("model.layers.2.*",)))
    assert layout.skipped == {name for name in each.shapes if name.startswith("model.layers.2.")}
    assert not any(name.startswith("mtp.") for tensors in layout.shards.values() for name in tensors)
    assert "embedding.word_embeddings.weight" not in layout.shards[folder("00_001")]
    assert owners(layout)


def test_files_by_a_pattern() -> None:
    sizes = Sizes(tensor=2, pipeline=2)
    options = Options(path="tp{tensor}-pp{pipeline}.safetensors")
    layout = megatron_layout(LLAMA.config, LLAMA.forms, sizes, options)
    assert set(layout.shards) == {f"tp{t}-pp{p}.safetensors" for t in range(2) for p in range(2)}
    odd = Sizes(expert=2, expert_tensor=2)
    assert set(odd.paths().values()) == {folder(f"00_{e:03}_{x:02}") for e in range(2) for x in range(2)}


def changed(**members: Any) -> dict[str, Any]:
    return {**LLAMA.config, **members}


def more(**shapes: tuple[int, ...]) -> dict[str, Form]:
    return LLAMA.forms | {name.replace("__", "."): Form("BF16", shape) for name, shape in shapes.items()}


def without(name: str) -> dict[str, Form]:
    return {each: form for each, form in LLAMA.forms.items() if each != name}


def reshaped(name: str, *shape: int, dtype: str = "BF16") -> dict[str, Form]:
    return {**LLAMA.forms, name: Form(dtype, shape)}


ONE, LAYER = Sizes(), "model.layers.1"
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Form], Sizes, Options, type[DcrError], str]] = {
    "an unknown family": (
        changed(model_type="bert"),
        LLAMA.forms,
        ONE,
        Options(),
        UnsupportedError,
        "bert is not known",
    ),
    "no family": (changed(model_type=None), LLAMA.forms, ONE, Options(), DamagedError, "has no model_type"),
    "no number": (changed(num_hidden_layers="4"), LLAMA.forms, ONE, Options(), DamagedError, "num_hidden_layers is no"),
    "no truth": (changed(tie_word_embeddings=1), LLAMA.forms, ONE, Options(), DamagedError, "neither true nor false"),
    "an unknown tensor": (
        LLAMA.config,
        more(model__rotary=(1,)),
        ONE,
        Options(),
        UnsupportedError,
        r"tensors of a llama lie: model\.rotary",
    ),
    "a layer too many": (
        changed(num_hidden_layers=3),
        LLAMA.forms,
        ONE,
        Options(),
        UnsupportedError,
        r"lie: model\.layers\.3\.",
    ),
    "no embedding": (
        LLAMA.config,
        without("model.embed_tokens.weight"),
        ONE,
        Options(),
        DamagedError,
        "no tensor model.embed_tokens",
    ),
    "half a gate": (
        LLAMA.config,
        without(f"{LAYER}.mlp.up_proj.weight"),
        ONE,
        Options(),
        DamagedError,
        r"lacks .*: .*1\.mlp\.up_proj",
    ),
    "rows": (
        LLAMA.config,
        LLAMA.forms,
        Sizes(tensor=3),
        Options(),
        UsageError,
        r"q_proj.*cannot be divided by 3 ranks",
    ),
    "columns": (
        LLAMA.config,
        reshaped(f"{LAYER}.mlp.down_proj.weight", HIDDEN, 15),
        Sizes(tensor=2),
        Options(),
        UsageError,
        r"tensor model\.layers\.1\.mlp\.down_proj\.weight: 15 columns cannot be divided by 2 ranks",
    ),
    "heads": (
        changed(num_attention_heads=4),
        LLAMA.forms,
        ONE,
        Options(),
        UsageError,
        "are not those of 4 query heads",
    ),
    "gate unlike up": (
        LLAMA.config,
        reshaped(f"{LAYER}.mlp.up_proj.weight", 16, HIDDEN + 1),
        ONE,
        Options(),
        UsageError,
        "differ in more than their rows",
    ),
    "tied unlike": (
        changed(tie_word_embeddings=True),
        reshaped("lm_head.weight", 3, HIDDEN),
        ONE,
        Options(),
        DamagedError,
        "but tied to",
    ),
    "a vocabulary too small": (
        LLAMA.config,
        LLAMA.forms,
        ONE,
        Options(padded_vocabulary=8),
        UsageError,
        "more than the 8 of the padded vocabulary",
    ),
    "stages": (LLAMA.config, LLAMA.forms, Sizes(pipeline=3), Options(), UsageError, "4 layers cannot be divided by 3"),
    "layers of stages": (
        LLAMA.config,
        LLAMA.forms,
        Sizes(pipeline=2, layers=(1, 2)),
        Options(),
        UsageError,
        "3 layers together",
    ),
    "experts": (
        of_type("qwen3_moe").config,
        of_type("qwen3_moe").forms,
        Sizes(expert=3),
        Options(),
        UsageError,
        "4 experts cannot be divided by 3 ranks",
    ),
    "a file for two": (
        LLAMA.config,
        LLAMA.forms,
        Sizes(tensor=2),
        Options(path="one.safetensors"),
        UsageError,
        "one file for several",
    ),
    "an unknown field": (
        LLAMA.config,
        LLAMA.forms,
        ONE,
        Options(path="{rank}.safetensors"),
        UsageError,
        "is no pattern of fields",
    ),
    "an unsafe file": (
        LLAMA.config,
        LLAMA.forms,
        ONE,
        Options(path="../{tensor}.safetensors"),
        UsageError,
        "unsafe name",
    ),
    "no shard": (LLAMA.config, LLAMA.forms, ONE, Options(path="{tensor}.bin"), UsageError, "does not end with"),
    "an unknown dtype": (LLAMA.config, LLAMA.forms, ONE, Options(stored={"*": "FP32"}), UsageError, "is none of"),
    "two dtypes in one": (
        LLAMA.config,
        reshaped(f"{LAYER}.mlp.up_proj.weight", 16, HIDDEN, dtype="F32"),
        ONE,
        Options(),
        UnsupportedError,
        "have dtypes BF16, F32, in one tensor",
    ),
    "elements that share bytes": (
        LLAMA.config,
        reshaped("model.norm.weight", HIDDEN, dtype="F4"),
        ONE,
        Options(),
        UnsupportedError,
        "share bytes",
    ),
    "experts the wrong way round": (
        gpt_oss().config,
        {**gpt_oss().forms, f"{LAYER}.mlp.experts.down_proj": Form("BF16", (EXPERTS, HIDDEN, 16))},
        ONE,
        Options(),
        UsageError,
        "of which number 3 is not 8",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    config, forms, sizes, options, error, message = FAULTS[name]
    with pytest.raises(error, match=message):
        megatron_layout(config, forms, sizes, options)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"tensor": 0}, "size tensor: is 0"),
        ({"expert_tensor": -1}, "size expert_tensor: is -1"),
        ({"virtual": 2}, "one pipeline stage alone"),
        ({"pipeline": 2, "layers": (4,)}, "names the layers of 1 stages, there are 2"),
        ({"pipeline": 2, "layers": (5, -1)}, "no stage has less than 0 layers"),
    ],
)
def test_sizes_that_cannot_be_are_refused(members: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sizes(**members)


def test_ranks_are_those_of_a_world_of_the_least_size() -> None:
    # A stage of four ranks: two by two, or four ranks of experts.
    ranks = list(Sizes(tensor=2, expert=4, expert_tensor=1).ranks())
    assert ranks == [Rank(0, 0, 0, 0), Rank(1, 0, 1, 0), Rank(0, 0, 2, 0), Rank(1, 0, 3, 0)]
