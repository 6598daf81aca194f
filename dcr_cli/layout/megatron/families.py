"""Which entries the models of a family have, by the model_type of their config.json. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dcr_cli.checkpoint.names import shown
from dcr_cli.errors import UnsupportedError
from dcr_cli.layout.megatron.blocks import (
    CANONICAL,
    attention,
    concatenated_attention,
    experts,
    gated_delta_net,
    latent_attention,
    mamba,
    mlp,
    mlp_norm,
    router,
    shared_experts,
    single_experts,
    transposed_experts,
)
from dcr_cli.layout.megatron.entries import DECODER, LAYER, MTP, Config, Entry, entries, moved
from dcr_cli.layout.megatron.mappings import column, qkv, replicated, row

_EMBEDDING = "model.embed_tokens.weight"
BLOCK_SPARSE = f"{CANONICAL}.block_sparse_moe.gate.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """The entries of a family's models but for those of the vocabulary, and the canonical names of these.

    The copies of the embedding and of the output layer are canonical tensors that a model may have once more.
    """

    entries: list[Entry]
    embedding: str = _EMBEDDING
    is_tied: bool = False
    embedding_copies: tuple[str, ...] = ()
    head_copies: tuple[str, ...] = ()


def family_of(config: Config) -> Family:
    """The entries of a model. UnsupportedError, naming those that are known, if its family is not."""
    make = _FAMILIES.get(config.model_type)
    if make is None:
        facts = f"the layout of a model of type {shown(config.model_type)} is not known"
        raise UnsupportedError("config.json", facts, hint=f"known are {', '.join(sorted(_FAMILIES))}")
    return make(config)


def _final(name: str = "model.norm.weight", local: str = "decoder.final_layernorm.weight") -> list[Entry]:
    return [Entry(local, replicated, (name,))]


def _dense(config: Config) -> Family:
    return Family([*attention(config), *mlp_norm(), *mlp(), *_final()])


def _qwen3(config: Config) -> Family:
    layers = [*attention(config), *mlp_norm(), *mlp()]
    return Family([*layers, *_final(), *_next_token(layers)])


def _qwen_experts(config: Config) -> Family:
    layers = [*attention(config), *mlp_norm(), *mlp(), *router(), *experts(config), *shared_experts("shared_expert")]
    return Family([*layers, *_final()])


def _qwen3_next(config: Config) -> Family:
    layers = [*attention(config, is_gated=True), *gated_delta_net(config), *mlp_norm(), *mlp()]
    layers += [*router(), *experts(config), *shared_experts("shared_expert")]
    return Family([*layers, *_final(), *_next_token(layers)])


def _next_token(layers: list[Entry]) -> list[Entry]:
    """The layer that predicts one token more, as Qwen names it."""
    return moved(layers, (DECODER, f"{MTP}.0.mtp_model_layer"), (CANONICAL, "mtp.layers.0")) + entries(
        f"{MTP}.0",
        "mtp",
        ("eh_proj.weight", column, "fc.weight"),
        ("enorm.weight", replicated, "pre_fc_norm_embedding.weight"),
        ("hnorm.weight", replicated, "pre_fc_norm_hidden.weight"),
        ("final_layernorm.weight", replicated, "norm.weight"),
    )


def _deepseek(config: Config) -> Family:
    layers = [*latent_attention(), *mlp_norm(), *mlp(), *router(), *experts(config), *shared_experts("shared_experts")]
    return _with_next_tokens(config, layers)


def _glm4_moe(config: Config) -> Family:
    layers = [*attention(config), *mlp_norm(), *mlp(), *router(), *experts(config), *shared_experts("shared_experts")]
    return _with_next_tokens(config, layers)


def _with_next_tokens(config: Config, layers: list[Entry], embedding: str = _EMBEDDING) -> Family:
    """A family with layers that predict tokens more, which are canonical ones after the last. These may have copies of
    the embedding and of the output layer, which ranks do not hold once more."""
    count = config.count_or_none("num_nextn_predict_layers")
    after = [f"model.layers.{config.layers + number}" for number in range(count)]
    return Family(
        [*layers, *_final(), *_next_tokens(layers, after)],
        embedding,
        embedding_copies=tuple(f"{canonical}.embed_tokens.weight" for canonical in after),
        head_copies=tuple(f"{canonical}.shared_head.head.weight" for canonical in after),
    )


def _next_tokens(layers: list[Entry], after: list[str]) -> list[Entry]:
    found: list[Entry] = []
    for number, canonical in enumerate(after):
        local = f"{MTP}.{number}"
        found += moved(layers, (DECODER, f"{local}.mtp_model_layer"), (CANONICAL, canonical))
        found += entries(
            local,
            canonical,
            ("eh_proj.weight", column, "eh_proj.weight"),
            ("enorm.weight", replicated, "enorm.weight"),
            ("hnorm.weight", replicated, "hnorm.weight"),
            ("final_layernorm.weight", replicated, "shared_head.norm.weight"),
        )
    return found


def _mixtral(config: Config) -> Family:
    return _block_sparse(attention(config))


def _minimax_m2(config: Config) -> Family:
    return _block_sparse(attention(config, has_norms_of_all_heads=True))


def _block_sparse(layers: list[Entry]) -> Family:
    sparse = f"{CANONICAL}.block_sparse_moe"
    layers += [
        *mlp_norm(router=BLOCK_SPARSE),
        *router("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"),
        *single_experts(f"{sparse}.experts", "w1.weight", "w3.weight", "w2.weight"),
    ]
    return Family([*layers, *_final()])


def _bailing(config: Config) -> Family:
    layers = [*concatenated_attention(config, "attention"), *mlp_norm(), *mlp()]
    layers += [*router(bias="mlp.gate.expert_bias"), *experts(config), *shared_experts("shared_experts")]
    return _with_next_tokens(config, layers, embedding="model.word_embeddings.weight")


def _gemma(config: Config) -> Family:
    """Its norms have a centre of zero in Hugging Face's files as in Megatron-Core's: their bits are the same."""
    return Family([*attention(config), *mlp_norm(), *mlp(), *_final()], is_tied=True)


def _gemma_with_norms_after(config: Config) -> Family:
    after = entries(
        DECODER,
        CANONICAL,
        ("self_attention.linear_proj.post_layernorm.weight", replicated, "post_attention_layernorm.weight"),
        ("mlp.linear_fc2.post_layernorm.weight", replicated, "post_feedforward_layernorm.weight"),
    )
    before = mlp_norm("pre_feedforward_layernorm.weight")
    return Family([*attention(config), *before, *mlp(), *after, *_final()], is_tied=True)


def _gpt_oss(config: Config) -> Family:
    others = entries(
        DECODER,
        CANONICAL,
        ("self_attention.core_attention.softmax_offset", column, "self_attn.sinks"),
        ("mlp.router.weight", replicated, "mlp.router.weight"),
        ("mlp.router.bias", replicated, "mlp.router.bias"),
    )
    norm = mlp_norm(router=f"{CANONICAL}.mlp.router.weight")
    return Family([*attention(config), *others, *norm, *transposed_experts(config), *_final()])


def _nemotron_h(config: Config) -> Family:
    canonical = f"backbone.layers.{LAYER}"
    mixer = f"{canonical}.mixer"
    of_heads = partial(qkv, query_heads=config.query_heads, groups=config.groups)
    layers = entries(
        DECODER,
        mixer,
        ("self_attention.linear_qkv.weight", of_heads, *(f"{each}_proj.weight" for each in "qkv")),
        ("self_attention.linear_proj.weight", row, "o_proj.weight"),
        ("mlp.linear_fc1.weight", column, "up_proj.weight"),
        ("mlp.linear_fc2.weight", row, "down_proj.weight"),
        ("mlp.router.weight", replicated, "gate.weight"),
        ("mlp.fc1_latent_proj.weight", replicated, "fc1_latent_proj.weight"),
        ("mlp.fc2_latent_proj.weight", replicated, "fc2_latent_proj.weight"),
        ("mlp.shared_experts.linear_fc1.weight", column, "shared_experts.up_proj.weight"),
        ("mlp.shared_experts.linear_fc2.weight", row, "shared_experts.down_proj.weight"),
    )
    bias = ("expert_bias", replicated, "gate.e_score_correction_bias")
    layers += entries(f"{DECODER}.mlp.router", mixer, bias, stored="F32")
    for local, within in (
        ("self_attention.linear_qkv.layer_norm_weight", "q_proj.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "up_proj.weight"),
        ("pre_mlp_layernorm.weight", "gate.weight"),
    ):
        layers += entries(DECODER, canonical, (local, replicated, "norm.weight"), within=f"{mixer}.{within}")
    layers += [*mamba(config, canonical), *single_experts(f"{mixer}.experts", "up_proj.weight", "down_proj.weight")]
    final = _final("backbone.norm_f.weight", "decoder.final_norm.weight")
    return Family([*layers, *final], embedding="backbone.embeddings.weight")


_FAMILIES: dict[str, Callable[[Config], Family]] = {
    "bailing_moe_v2": _bailing,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma_with_norms_after,
    "gemma3_text": _gemma_with_norms_after,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _dense,
    "minimax_m2": _minimax_m2,
    "mistral": _dense,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "qwen2": _dense,
    "qwen2_moe": _qwen_experts,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen_experts,
    "qwen3_next": _qwen3_next,
}
