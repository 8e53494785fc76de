"""Checkpoints of about a megabyte with real random weights, written in under a second.

Weights are wide on purpose: with the tiny uniform ones an engine makes up for a dummy load,
attention hardly matters and greedy answers do not depend on the KV cache, so that loading the wrong
bytes would pass unnoticed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
}

WINDOWED = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "sliding_window": 64,
}
"""Every layer looks back 64 tokens: one KV-cache group, of which blocks leave the window."""

SLIDING = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
"""Three layers with a window and one without: several KV-cache groups."""


def write_model(folder: Path, config: dict[str, Any], seed: int = 1234, std: float = 0.3) -> Path:
    """Write config and weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        _weights(config, torch.Generator().manual_seed(seed), std),
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )
    return folder


def _weights(
    config: dict[str, Any], generator: torch.Generator, std: float
) -> dict[str, torch.Tensor]:
    def normal(*shape: int, scale: float = std) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    gemma = config["model_type"].startswith("gemma")
    # Gemma multiplies its embeddings and ties them to the output: small ones, or every answer would
    # be the last token again.
    norm = torch.zeros if gemma else torch.ones  # gemma adds one itself
    weights = {"model.embed_tokens.weight": normal(vocab, hidden, scale=0.05 if gemma else 1.0)}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = normal(*shape)
        for name in norms:
            weights[f"{prefix}{name}.weight"] = norm(hidden)
        if gemma:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = norm(config["head_dim"])
    return weights
