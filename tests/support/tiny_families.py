"""A tiny configuration of each of transformers' text decoders, with layers of all of the family's kinds."""

LAYERS = 4
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Sizes that only some families have, where their configurations have them.
MORE = {
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
    "model_max_length": 256,
}
LATENT = {"num_key_value_heads": 4, "head_dim": None}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
LOCAL = ["sliding_attention", "full_attention"] * 2
OF_LAYERS = {"layer_types": LOCAL, "num_kv_shared_layers": 2}
OF_LAYERS |= {"vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 8}
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
OWN = {
    "axk1": LATENT | DENSE_FIRST,
    "axk2": LATENT | DENSE_FIRST,
    "bailing_hybrid": LATENT | {"first_k_dense_replace": 1, "layer_types": LINEAR, "q_lora_rank": None},
    "codegen": {"rotary_dim": 8},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "deepseek_v2": LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 1},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "dots3_note_text": LATENT | DENSE_FIRST,
    "falcon": {"head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 96},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": LOCAL},
    "gemma3n_text": OF_LAYERS | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": OF_LAYERS | {"global_head_dim": 32},
    "glm4_moe_lite": LATENT | DENSE_FIRST,
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], 2]], "window_size": 6, "num_heads": 4},
    "gptj": {"rotary_dim": 8},
    "hrm_text": {
        "num_hidden_layers": None,
        "num_layers_per_stack": 1,
        "H_cycles": 1,
        "L_cycles": 2,
        "prefix_lm": False,
    },
    "jetmoe": {"kv_channels": 16, "num_attention_heads": 4},
    "kimi_linear": LATENT | {"layer_types": LINEAR, "q_lora_rank": None} | DENSE_FIRST,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 8,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 0, 1, 1],
    },
    "longcat_flash": LATENT
    | {"head_dim": 8, "num_hidden_layers": None, "num_layers": 2}
    | {"ffn_hidden_size": 96, "moe_topk": 2, "zero_expert_num": 2},
    "mimo_v2_flash": DENSE_FIRST,
    "minicpm3": LATENT,
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    | {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8}
    | {"moe_shared_expert_intermediate_size": 32, "num_hidden_layers": None},
    "olmo_hybrid": {"layer_types": LINEAR, "linear_num_key_heads": 4},
    "phi3": {"rope_parameters": PARTIAL},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "sarvam_mla": LATENT,
    "youtu": LATENT,
    "granitemoehybrid": {"layer_types": LINEAR, "shared_intermediate_size": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_ngroups": 2, "mamba_headdim": 16}
    | {"head_dim": None},
    "bamba": {"attn_layer_indices": [1, 3]},
    "glm5_next": LATENT,
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
}


def families():
    """The model types of transformers' decoders of text alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        encoders = getattr(kind, "is_encoder_decoder", False) or kind.model_type in ENCODERS
        if (kind.sub_configs and kind.model_type not in OWN) or encoders or kind.model_type in found:
            continue
        found.append(kind.model_type)
    return sorted(found)


# Encoders, and decoders of an encoder's output, which have a class for causal language modelling too.
ENCODERS = (
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
    "electra ernie git got_ocr2 marian mbart megatron-bert musicgen musicgen_melody mvp pegasus plbart prophetnet "
    "reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl "
    "xlnet xmod"
).split()


def tiny(model_type, **fields):
    """The configuration of a family, with fields of one's own."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = _fields(kind)
    more = {name: value for name, value in MORE.items() if name in known}
    asked = SIZES | more | OWN.get(model_type, {}) | fields
    if "vocab_size_per_layer_input" in asked:
        asked["vocab_size_per_layer_input"] = asked["vocab_size"]
    return kind(**{name: value for name, value in asked.items() if value is not None or name == "q_lora_rank"})


def _fields(kind):
    import dataclasses
    import inspect

    names = {each.name for each in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return names | set(inspect.signature(kind.__init__).parameters)
