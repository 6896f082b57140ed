"""GGUF files of tiny Llamas and Qwens, written as llama.cpp's converter writes them."""

import json

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def own_name(name):
    """A tensor's name in a GGUF file."""
    plain = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in plain:
        return f"{plain[name]}.weight"
    _, _, layer, inner = name.split(".", 3)
    inner, _, what = inner.rpartition(".")
    return f"blk.{layer}.{NAMES[inner]}.{what}"


def permuted(weight, heads):
    """Query's or key's rows as llama.cpp rotates them: pairs beside each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of scales


def quantized_rows(weight, kind):
    """A matrix's rows in a type; in one that gguf's package cannot make, blocks of any numbers of that size."""
    quantized = gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        return np.asarray(gguf.quants.quantize(weight, quantized))
    block, size = gguf.GGML_QUANT_SIZES[quantized]
    rng = np.random.default_rng(weight.size)
    raw = rng.integers(0, 256, (weight.size // block, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = rng.uniform(0.5, 1, (len(raw), 1)) * weight.std() / 256
        raw[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return raw.reshape(len(weight), -1)


def write_gguf(checkpoint, path, kind="F32", **changes):
    """The checkpoint of a Llama, or of what `arch` says, as GGUF, its matrices in `kind`.

    kind: of all matrices, or by a part of their names in GGUF, in order, the last being "".
    changes: `arch`, and metadata by its name with "__" for ".", that replaces what it would be; None leaves it out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = changes.pop("arch", "llama")
    writer = gguf.GGUFWriter(path, arch)
    for name, value in metadata(checkpoint, config).items():
        value = changes.pop(name.replace(".", "__"), value)
        _add(writer, name if not name.startswith("llama.") else f"{arch}{name[5:]}", value)
    for name, value in changes.items():
        _add(writer, name.replace("__", "."), value)
    kinds = {"": kind} if isinstance(kind, str) else kind
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        weight = weight.astype(np.float32)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = permuted(weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if weight.ndim == 1:
            writer.add_tensor(own_name(name), weight)
        else:
            own = next(each for part, each in kinds.items() if part in own_name(name))
            raw = quantized_rows(weight, own)
            writer.add_tensor(own_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(checkpoint, config):
    """What a Llama's GGUF says beside its tensors."""
    read = json.loads((checkpoint / "tokenizer.json").read_text())
    model, special = read["model"], {token["id"] for token in read["added_tokens"]}
    ids = model["vocab"] | {t["content"]: t["id"] for t in read["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if ids[token] in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer, name, value):
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif value is not None:
        writer.add_array(name, value)
