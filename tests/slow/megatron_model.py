"""What a rank of Megatron-Core runs: it builds models of Megatron-Core and says which tensors it holds of each.

It knows nothing of dcr. Arguments: rank, a folder. There, sizes.json says how many ranks divide what, and
models-RANK.json is what came out: for each model its tensors' shapes. Layers are Megatron-Core's own, not those of
Transformer Engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

DENSE = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 4,
    "ffn_hidden_size": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "activation_func": functional.silu,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "pipeline_dtype": torch.float32,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16}
LATENT = {
    "num_query_groups": 8,
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "moe_layer_freq": [0, 1],
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


def stay_on_the_cpu() -> None:
    """Let what would be moved to a device of CUDA stay where it is."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self: self


def without_channels(init: Any) -> Any:
    """Latent attention gives the attention at its core two arguments that only Transformer Engine's knows."""

    def call(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **others: Any) -> None:
        init(self, *args, **others)

    return call


def main(rank: int, folder: Path) -> None:
    sizes = json.loads((folder / "sizes.json").read_text())
    world = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    mpu.initialize_model_parallel(**sizes)
    stay_on_the_cpu()
    attention: Any = DotProductAttention
    attention.__init__ = without_channels(attention.__init__)
    dense = TransformerConfig(**DENSE, **{name: size for name, size in sizes.items() if "expert" not in name})
    experts = TransformerConfig(**DENSE, **EXPERTS, **sizes, moe_shared_expert_gate=True)
    latent = MLATransformerConfig(**{**DENSE, **EXPERTS, **LATENT}, **sizes)
    local: Any = {"qk_layernorm": True, "normalization": "RMSNorm"}
    specs = {
        "qwen3": (dense, get_gpt_layer_local_spec(**local)),
        "qwen2_moe": (experts, get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, **local)),
        "deepseek_v3": (latent, get_gpt_decoder_block_spec(latent, use_transformer_engine=False)),
    }
    found = {}
    for name, (config, spec) in specs.items():
        for is_tied in (False, True):
            model = GPTModel(
                config,
                spec,
                vocab_size=32,
                max_sequence_length=16,
                pre_process=mpu.is_pipeline_first_stage(),
                post_process=mpu.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=is_tied,
                position_embedding_type="rope",
            )
            tensors = {name: each for name, each in model.state_dict().items() if "_extra_state" not in name}
            found[f"{name}, tied" if is_tied else name] = {name: list(each.shape) for name, each in tensors.items()}
    place = {
        "tensor": mpu.get_tensor_model_parallel_rank(),
        "pipeline": mpu.get_pipeline_model_parallel_rank(),
        "expert": mpu.get_expert_model_parallel_rank(),
        "expert_tensor": mpu.get_expert_tensor_parallel_rank(),
    }
    (folder / f"models-{rank}.json").write_text(json.dumps({"rank": place, "models": found}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
