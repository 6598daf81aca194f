"""The blocks of which layers are built, as entries: attention of each kind, dense and expert MLPs, Mamba mixers.

Names are those of Megatron-Core with Transformer Engine: norms are members of the projection after them.
"""

from __future__ import annotations

from functools import partial

from dcr_cli.layout.megatron.entries import ADD_ONE, DECODER, EXPERT, LAYER, Config, Entry, entries
from dcr_cli.layout.megatron.mappings import (
    Section,
    by_heads,
    column,
    delta_net,
    delta_net_convolution,
    mamba_convolution,
    mamba_projection,
    qkv,
    replicated,
    row,
    undivided,
)
from dcr_cli.layout.megatron.views import (
    biases_alternating,
    gate_and_up,
    gate_and_up_alternating,
    of_expert,
    of_expert_transposed,
    rows_of,
    seen,
)

CANONICAL = f"model.layers.{LAYER}"
ROUTER = f"{CANONICAL}.mlp.gate.weight"


def attention(config: Config, *, is_gated: bool = False, has_norms_of_all_heads: bool = False) -> list[Entry]:
    """Attention whose queries, keys and values are canonical tensors of their own, and the norm before it."""
    of_heads = partial(qkv, query_heads=config.query_heads, groups=config.groups, is_gated=is_gated)
    query_norm = key_norm = replicated
    if has_norms_of_all_heads:
        query_norm, key_norm = (partial(by_heads, count=count) for count in (config.query_heads, config.groups))
    return entries(
        f"{DECODER}.self_attention",
        CANONICAL,
        ("linear_qkv.weight", of_heads, *(f"self_attn.{each}_proj.weight" for each in "qkv")),
        ("linear_qkv.bias", of_heads, *(f"self_attn.{each}_proj.bias" for each in "qkv")),
        ("linear_proj.weight", row, "self_attn.o_proj.weight"),
        ("linear_proj.bias", row, "self_attn.o_proj.bias"),
        ("q_layernorm.weight", query_norm, "self_attn.q_norm.weight"),
        ("k_layernorm.weight", key_norm, "self_attn.k_norm.weight"),
    ) + attention_norm("input_layernorm.weight", within=f"{CANONICAL}.self_attn.q_proj.weight")


def attention_norm(name: str, *, within: str) -> list[Entry]:
    """The norm before an attention."""
    row_of_norm = ("self_attention.linear_qkv.layer_norm_weight", replicated, name)
    return entries(DECODER, CANONICAL, row_of_norm, within=within)


def concatenated_attention(config: Config, at: str) -> list[Entry]:
    """Attention whose queries, keys and values are one canonical tensor, and the norm before it."""
    dim = config.count("head_dim", config.count("hidden_size") // config.query_heads)
    parts = rows_of([config.query_heads * dim, config.groups * dim, config.groups * dim])
    of_heads = seen(partial(qkv, query_heads=config.query_heads, groups=config.groups), parts)
    return entries(
        f"{DECODER}.self_attention",
        f"{CANONICAL}.{at}",
        ("linear_qkv.weight", of_heads, "query_key_value.weight"),
        ("linear_qkv.bias", of_heads, "query_key_value.bias"),
        ("linear_proj.weight", row, "dense.weight"),
        ("linear_proj.bias", row, "dense.bias"),
        ("q_layernorm.weight", replicated, "query_layernorm.weight"),
        ("k_layernorm.weight", replicated, "key_layernorm.weight"),
    ) + attention_norm("input_layernorm.weight", within=f"{CANONICAL}.{at}.query_key_value.weight")


def latent_attention() -> list[Entry]:
    """Multi-head latent attention: projections down are whole on every rank, those up again are divided by heads.

    Megatron-Core's own layers divide those down too, by rows.
    """
    at, canonical = f"{DECODER}.self_attention", f"{CANONICAL}.self_attn"
    own = entries(
        at,
        canonical,
        ("linear_q_down_proj.weight", replicated, "q_a_proj.weight"),
        ("linear_kv_down_proj.weight", replicated, "kv_a_proj_with_mqa.weight"),
        apart=column,
    )
    own += entries(
        at,
        canonical,
        ("linear_q_proj.weight", column, "q_proj.weight"),
        ("linear_q_up_proj.layer_norm_weight", replicated, "q_a_layernorm.weight"),
        ("linear_q_up_proj.weight", column, "q_b_proj.weight"),
        ("linear_kv_up_proj.layer_norm_weight", replicated, "kv_a_layernorm.weight"),
        ("linear_kv_up_proj.weight", column, "kv_b_proj.weight"),
        ("linear_proj.weight", row, "o_proj.weight"),
    )
    return own + entries(DECODER, CANONICAL, ("input_layernorm.weight", replicated, "input_layernorm.weight"))


def gated_delta_net(config: Config) -> list[Entry]:
    """A gated delta net. The norm of its output is stored less one, as Megatron-Core's norms are that have a centre."""
    key_heads, value_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    into = partial(delta_net, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)
    convolution = delta_net_convolution(keys=Section(key_heads, key_dim), values=Section(value_heads, value_dim))
    at, canonical = f"{DECODER}.self_attention", f"{CANONICAL}.linear_attn"
    own = entries(
        at,
        canonical,
        ("in_proj.weight", into, "in_proj_qkvz.weight", "in_proj_ba.weight"),
        ("conv1d.weight", convolution, "conv1d.weight"),
        ("A_log", column, "A_log"),
        ("dt_bias", column, "dt_bias"),
        ("out_proj.weight", row, "out_proj.weight"),
    )
    norm = entries(at, canonical, ("out_norm.weight", replicated, "norm.weight"), rule=ADD_ONE)
    before = ("in_proj.layer_norm_weight", replicated, "input_layernorm.weight")
    return own + norm + entries(at, CANONICAL, before, within=f"{canonical}.in_proj_qkvz.weight")


def mamba(config: Config, canonical: str) -> list[Entry]:
    """A Mamba mixer, and the norm before it."""
    heads = Section(config.count("mamba_num_heads"), config.count("mamba_head_dim"))
    groups = Section(config.count("n_groups"), config.count("ssm_state_size"))
    convolution = mamba_convolution(heads=heads, groups=groups)
    into = mamba_projection(heads=heads, groups=groups)
    own = entries(
        f"{DECODER}.mixer",
        f"{canonical}.mixer",
        ("in_proj.weight", into, "in_proj.weight"),
        ("conv1d_weight", convolution, "conv1d.weight"),
        ("conv1d_bias", convolution, "conv1d.bias"),
        *((name, column, name) for name in ("A_log", "D", "dt_bias", "norm.weight")),
        ("out_proj.weight", row, "out_proj.weight"),
    )
    before = ("mixer.in_proj.layer_norm_weight", replicated, "norm.weight")
    return own + entries(DECODER, canonical, before, within=f"{canonical}.mixer.in_proj.weight")


def mlp() -> list[Entry]:
    """A dense, gated MLP."""
    return gated_mlp("mlp", f"{CANONICAL}.mlp")


def gated_mlp(local: str, canonical: str) -> list[Entry]:
    """A gated MLP, a dense one or that of shared experts."""
    return entries(
        f"{DECODER}.{local}",
        canonical,
        ("linear_fc1.weight", column, "gate_proj.weight", "up_proj.weight"),
        ("linear_fc1.bias", column, "gate_proj.bias", "up_proj.bias"),
        ("linear_fc2.weight", row, "down_proj.weight"),
        ("linear_fc2.bias", row, "down_proj.bias"),
    )


def mlp_norm(name: str = "post_attention_layernorm.weight", *, router: str = ROUTER) -> list[Entry]:
    """The norm before an MLP. It is a tensor of its own in layers that have experts."""
    dense, of_experts = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    return entries(DECODER, CANONICAL, (dense, replicated, name), without=router) + entries(
        DECODER, CANONICAL, (of_experts, replicated, name), within=router
    )


def experts(config: Config) -> list[Entry]:
    """Gated experts, whether each has canonical tensors of its own or all have one."""
    canonical, hidden = f"{CANONICAL}.mlp.experts", config.count("hidden_size")
    return [
        *single_experts(canonical, "gate_proj.weight", "up_proj.weight", "down_proj.weight"),
        Entry(_fc1("weight"), column, (f"{canonical}.gate_up_proj",), partial(gate_and_up, columns=hidden)),
        Entry(_fc2("weight"), row, (f"{canonical}.down_proj",), partial(of_expert, rows=hidden)),
    ]


def transposed_experts(config: Config) -> list[Entry]:
    """Gated experts whose transposed weights, and biases, are canonical tensors of all experts; gate and up alternate.

    How several ranks would divide gate and up is not known: undivided they are one above the other.
    """
    canonical, hidden = f"{CANONICAL}.mlp.experts", config.count("hidden_size")
    gate_up, down = f"{canonical}.gate_up_proj", f"{canonical}.down_proj"
    return [
        Entry(_fc1("weight"), undivided, (gate_up,), partial(gate_and_up_alternating, columns=hidden)),
        Entry(_fc1("bias"), undivided, (f"{gate_up}_bias",), biases_alternating),
        Entry(_fc2("weight"), row, (down,), partial(of_expert_transposed, rows=hidden)),
        Entry(_fc2("bias"), row, (f"{down}_bias",), partial(of_expert, rows=hidden)),
    ]


def single_experts(canonical: str, *names: str) -> list[Entry]:
    """Experts that have canonical tensors of their own: those before the last make up the first projection."""
    *first, second = (f"{canonical}.{EXPERT}.{name}" for name in names)
    return [Entry(_fc1("weight"), column, tuple(first)), Entry(_fc2("weight"), row, (second,))]


def router(name: str = "mlp.gate.weight", bias: str = "mlp.gate.e_score_correction_bias") -> list[Entry]:
    """What sends tokens to experts, on every rank. The bias is F32 in Megatron-Core, whatever the model's dtype."""
    local = f"{DECODER}.mlp.router"
    weight = entries(local, CANONICAL, ("weight", replicated, name))
    return weight + entries(local, CANONICAL, ("expert_bias", replicated, bias), stored="F32")


def shared_experts(name: str) -> list[Entry]:
    """Experts that see every token, divided as a dense MLP is, and the gate that weighs them."""
    local = "mlp.shared_experts"
    gate = ("gate_weight", replicated, f"mlp.{name}_gate.weight")
    return gated_mlp(local, f"{CANONICAL}.mlp.{name}") + entries(f"{DECODER}.{local}", CANONICAL, gate)


def _fc1(what: str) -> str:
    return f"{DECODER}.mlp.experts.linear_fc1.{what}{EXPERT}"


def _fc2(what: str) -> str:
    return f"{DECODER}.mlp.experts.linear_fc2.{what}{EXPERT}"
