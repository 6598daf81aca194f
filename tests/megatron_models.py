"""Tiny models of every family whose layout on Megatron-Core's ranks is known: config.json and shapes, by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

from dcr_cli.layout.layout import Form

HIDDEN, DIM, HEADS, GROUPS, INNER, EXPERTS, VOCABULARY = 8, 4, 8, 4, 16, 4, 30
Shapes = dict[str, tuple[int, ...]]


class Model(NamedTuple):
    config: dict[str, Any]
    shapes: Shapes

    @property
    def forms(self) -> dict[str, Form]:
        return {name: Form("BF16", shape) for name, shape in self.shapes.items()}


def model(model_type: str, layers: list[Shapes], extra: Shapes | None = None, **config: Any) -> Model:
    """A model of such layers, whose names lack what is before them."""
    known = {
        "model_type": model_type,
        "num_hidden_layers": len(layers),
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "hidden_size": HIDDEN,
        "head_dim": DIM,
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for number, layer in enumerate(layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return Model(known | config, shapes | (extra or {}))


def norms(*more: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm", *more)}


def attention(*, has_bias: bool = False, has_norms: bool = False, gates: int = 1) -> Shapes:
    rows = {"q": gates * HEADS * DIM, "k": GROUPS * DIM, "v": GROUPS * DIM}
    shapes: Shapes = {f"self_attn.{each}_proj.weight": (count, HIDDEN) for each, count in rows.items()}
    if has_bias:
        shapes |= {f"self_attn.{each}_proj.bias": (count,) for each, count in rows.items()}
    if has_norms:
        shapes |= {f"self_attn.{each}_norm.weight": (DIM,) for each in "qk"}
    return shapes | {"self_attn.o_proj.weight": (HIDDEN, HEADS * DIM)}


def mlp(at: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = (f"{at}.{name}.weight" for name in names)
    return {gate: (INNER, HIDDEN), up: (INNER, HIDDEN), down: (HIDDEN, INNER)}


def experts(at: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    shapes: Shapes = {f"{at}.gate.weight": (EXPERTS, HIDDEN)}
    for number in range(EXPERTS):
        shapes |= mlp(f"{at}.experts.{number}", names)
    return shapes


def stacked_experts() -> Shapes:
    return {
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
        "mlp.experts.down_proj": (EXPERTS, HIDDEN, INNER),
    }


def latent() -> Shapes:
    rank, rope = 6, 2
    return {
        "self_attn.q_a_proj.weight": (rank, HIDDEN),
        "self_attn.q_a_layernorm.weight": (rank,),
        "self_attn.q_b_proj.weight": (HEADS * (DIM + rope), rank),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (HEADS * 2 * DIM, rank),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
    }


def delta_net() -> Shapes:
    return {
        "linear_attn.in_proj_qkvz.weight": (4 * (2 * DIM + 2 * 2 * DIM), HIDDEN),
        "linear_attn.in_proj_ba.weight": (4 * 4, HIDDEN),
        "linear_attn.conv1d.weight": (4 * (2 * DIM + 2 * DIM), 1, 4),
        "linear_attn.A_log": (8,),
        "linear_attn.dt_bias": (8,),
        "linear_attn.norm.weight": (DIM,),
        "linear_attn.out_proj.weight": (HIDDEN, 8 * DIM),
    }


def after_last(layer: Shapes, number: int) -> Shapes:
    """The layer that predicts one token more, as a canonical one after the last."""
    more: Shapes = {"enorm.weight": (HIDDEN,), "hnorm.weight": (HIDDEN,), "shared_head.norm.weight": (HIDDEN,)}
    more |= {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    return {f"model.layers.{number}.{name}": shape for name, shape in (layer | more).items()}


def own_mtp(layer: Shapes) -> Shapes:
    """The layer that predicts one token more, as Qwen names it."""
    own: Shapes = {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,)}
    own |= {f"mtp.pre_fc_norm_{each}.weight": (HIDDEN,) for each in ("embedding", "hidden")}
    return own | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}


def nemotron() -> Model:
    inner, state = 8 * DIM, 4 * 2
    mixers: list[Shapes] = [
        {
            "in_proj.weight": (2 * inner + 2 * state + 8, HIDDEN),
            "conv1d.weight": (inner + 2 * state, 1, 4),
            "conv1d.bias": (inner + 2 * state,),
            "A_log": (8,),
            "D": (8,),
            "dt_bias": (8,),
            "norm.weight": (inner,),
            "out_proj.weight": (HIDDEN, inner),
        },
        {"up_proj.weight": (INNER, HIDDEN), "down_proj.weight": (HIDDEN, INNER)},
        {name.removeprefix("self_attn."): shape for name, shape in attention().items()},
        {
            "gate.weight": (EXPERTS, HIDDEN),
            "gate.e_score_correction_bias": (EXPERTS,),
            **{f"experts.{number}.up_proj.weight": (INNER, HIDDEN) for number in range(EXPERTS)},
            **{f"experts.{number}.down_proj.weight": (HIDDEN, INNER) for number in range(EXPERTS)},
            "shared_experts.up_proj.weight": (INNER, HIDDEN),
            "shared_experts.down_proj.weight": (HIDDEN, INNER),
        },
    ]
    shapes: Shapes = {"backbone.embeddings.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes |= {"backbone.norm_f.weight": (HIDDEN,)}
    for number, mixer in enumerate(mixers):
        shapes |= {f"backbone.layers.{number}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes[f"backbone.layers.{number}.norm.weight"] = (HIDDEN,)
    found = model("nemotron_h", [{}] * 4, mamba_num_heads=8, mamba_head_dim=DIM, n_groups=4, ssm_state_size=2)
    return Model(found.config, shapes)


def gpt_oss() -> Model:
    layer: Shapes = {
        **norms(),
        **attention(has_bias=True),
        "self_attn.o_proj.bias": (HIDDEN,),
        "self_attn.sinks": (HEADS,),
        "mlp.router.weight": (EXPERTS, HIDDEN),
        "mlp.router.bias": (EXPERTS,),
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
        "mlp.experts.down_proj": (EXPERTS, INNER, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
    }
    return model("gpt_oss", [layer] * 2)


def minimax() -> Model:
    layer = {
        **norms(),
        **attention(),
        "self_attn.q_norm.weight": (HEADS * DIM,),
        "self_attn.k_norm.weight": (GROUPS * DIM,),
        **experts("block_sparse_moe", ("w1", "w3", "w2")),
        "block_sparse_moe.e_score_correction_bias": (EXPERTS,),
    }
    return model("minimax_m2", [layer] * 2)


def bailing() -> Model:
    layer: Shapes = {
        **norms(),
        "attention.query_key_value.weight": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
        "attention.dense.weight": (HIDDEN, HEADS * DIM),
        "attention.query_layernorm.weight": (DIM,),
        "attention.key_layernorm.weight": (DIM,),
    }
    sparse = {**layer, **experts(), "mlp.gate.expert_bias": (EXPERTS,), **mlp("mlp.shared_experts")}
    found = model("bailing_moe_v2", [{**layer, **mlp()}, sparse])
    found.shapes["model.word_embeddings.weight"] = found.shapes.pop("model.embed_tokens.weight")
    return found


def deepseek(model_type: str) -> Model:
    sparse = {**norms(), **latent(), **experts(), **mlp("mlp.shared_experts")}
    sparse["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    dense = {**norms(), **latent(), **mlp()}
    return model(model_type, [dense, sparse], after_last(sparse, 2), num_nextn_predict_layers=1)


def glm() -> Model:
    sparse = {**norms(), **attention(has_bias=True), **stacked_experts(), **mlp("mlp.shared_experts")}
    sparse["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    return model("glm4_moe", [{**norms(), **attention(has_norms=True), **mlp()}, sparse])


def qwen3_next() -> Model:
    shared = {**norms(), **experts(), **mlp("mlp.shared_expert"), "mlp.shared_expert_gate.weight": (1, HIDDEN)}
    full = {**shared, **attention(has_norms=True, gates=2)}
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    dims = {"linear_key_head_dim": DIM, "linear_value_head_dim": DIM}
    return model("qwen3_next", [{**shared, **delta_net()}, full], own_mtp(full), **heads, **dims)


def tied(found: Model) -> Model:
    return Model(found.config, {name: shape for name, shape in found.shapes.items() if name != "lm_head.weight"})


QWEN2_MOE = {**norms(), **attention(has_bias=True), **experts(), **mlp("mlp.shared_expert")}
GEMMA = {**norms("pre_feedforward_layernorm", "post_feedforward_layernorm"), **attention(), **mlp()}
GEMMA3 = {**GEMMA, **attention(has_norms=True)}
QWEN3 = {**norms(), **attention(has_norms=True), **mlp()}
LLAMA = model("llama", [{**norms(), **attention(), **mlp()}] * 4)
MODELS = [
    LLAMA,
    model("mistral", [{**norms(), **attention(), **mlp()}] * 2),
    model("qwen2", [{**norms(), **attention(has_bias=True), **mlp()}] * 2),
    model("qwen3", [QWEN3] * 2, own_mtp(QWEN3)),
    model("qwen2_moe", [{**QWEN2_MOE, "mlp.shared_expert_gate.weight": (1, HIDDEN)}] * 2),
    model("qwen3_moe", [{**norms(), **attention(has_norms=True), **experts()}] * 2),
    model("mixtral", [{**norms(), **attention(), **experts("block_sparse_moe", ("w1", "w3", "w2"))}] * 2),
    tied(model("gemma", [{**norms(), **attention(), **mlp()}] * 2)),
    tied(model("gemma2", [GEMMA] * 2)),
    tied(model("gemma3_text", [GEMMA3] * 2)),
    deepseek("deepseek_v2"),
    deepseek("deepseek_v3"),
    glm(),
    gpt_oss(),
    minimax(),
    bailing(),
    qwen3_next(),
    nemotron(),
]
