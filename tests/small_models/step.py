"""Names and shapes of the checkpoints of Step 3 and Step 3.5, whose classes come with the weights.

Read from vLLM's loaders (``model_executor/models/step3_text.py``, ``step3p5.py``). The towers of Step 3 are left out.
"""

from collections.abc import Mapping
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def step_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor of the language model."""
    part = config.get("text_config", config)
    hidden, vocabulary = part["hidden_size"], part["vocab_size"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    with_experts = {int(layer) for layer in part["moe_layers_enum"].split(",")}
    for layer in range(part["num_hidden_layers"]):
        names = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        names |= _attention(part) if "share_q_dim" in part else _grouped_attention(part, layer)
        names |= _experts(part) if layer in with_experts else _mlp("mlp", hidden, part["intermediate_size"])
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in names.items()}
    return shapes


def _attention(part: Mapping[str, Any]) -> Shapes:
    hidden, head, queries = part["hidden_size"], part["head_dim"], part["share_q_dim"]
    all_heads = part["num_attention_heads"] * head
    return {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (head, hidden),
        "self_attn.v_proj.weight": (head, hidden),
        "self_attn.inter_norm.weight": (queries,),
        "self_attn.wq.weight": (all_heads, queries),
        "self_attn.o_proj.weight": (hidden, all_heads),
    }


def _grouped_attention(part: Mapping[str, Any], layer: int) -> Shapes:
    is_full = part["layer_types"][layer] == "full_attention"
    sizes = part if is_full else part["attention_other_setting"]
    hidden, head = part["hidden_size"], sizes["head_dim"]
    heads, groups = sizes["num_attention_heads"], sizes["num_attention_groups"]
    return {
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (groups * head, hidden),
        "self_attn.v_proj.weight": (groups * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "self_attn.g_proj.weight": (heads, hidden),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _mlp(prefix: str, hidden: int, size: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }


def _experts(part: Mapping[str, Any]) -> Shapes:
    hidden, experts = part["hidden_size"], part["moe_num_experts"]
    stacks = _mlp("moe", hidden, part["moe_intermediate_size"])
    return {
        "moe.gate.weight": (experts, hidden),
        **({"moe.router_bias": (experts,)} if part.get("use_moe_router_bias") else {}),
        **{name: (experts, *shape) for name, shape in stacks.items()},
        **_mlp("share_expert", hidden, part["share_expert_dim"]),
    }
