"""What the builder's tests compare random models by."""

from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn

from specbuild.builder.frontend.eagle3_head import EagleHead, head_config
from specbuild.runtime.speculation.tree import Tree

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


_FUSED = {}


def fused(model, capacity):
    """A model's portable graph after all passes, exported once a process; read it, do not change it."""
    from specbuild.builder.frontend.attention_layout import probe
    from specbuild.builder.frontend.export import export
    from specbuild.builder.passes import run_portable

    sums = tuple(float(weight.detach().double().sum()) for weight in model.parameters())
    key = model.config.to_json_string(), capacity, sums
    if key not in _FUSED:
        _FUSED[key] = export(model, probe(model.config, capacity), capacity, capacity)
        run_portable(_FUSED[key])
    return _FUSED[key]


def reference(model, tokens):
    """transformers' logits after each token of a text, `[T, V]`."""
    with torch.no_grad():
        return np.asarray(model(input_ids=torch.tensor([tokens])).logits[0])


def branching(seed, nodes):
    """A random tree of the random models' 97 tokens."""
    rng = np.random.default_rng(seed)
    tree = Tree([int(rng.integers(97))])
    while len(tree) < nodes:
        tree.add(int(rng.integers(97)), int(rng.integers(len(tree))))
    return tree


def random_model(model_type, **fields):
    """A random float32 model of a family, of 97 tokens and 3 layers; norms and biases random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    size |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
    wide = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "gpt2": {"n_inner": 96}, "gptj": {"rotary_dim": 8}}
    llama = {"intermediate_size": 96, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **size | wide.get(model_type, llama) | fields)
    return randomize(AutoModelForCausalLM.from_config(config).eval())


def randomize(model, noise=0.0):
    """Give a model random weights; norms and biases random too. Noise tells it from another one."""
    generator, other = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    with torch.no_grad():
        for weight in model.parameters():
            centre = weight.mean().round() if weight.ndim == 1 else 0.0  # of a norm: 0 or 1
            scale = 0.2 if weight.ndim == 1 else 2.0 * weight.shape[-1] ** -0.5
            weight.copy_(centre + scale * torch.randn(weight.shape, generator=generator))
            if noise:
                weight += noise * scale * torch.randn(weight.shape, generator=other)
    return model


def rows(module):
    """A module's weight with a row for each output."""
    return module.weight.detach().T if type(module).__name__ == "Conv1D" else module.weight.detach()


@contextmanager
def holding(model, found):
    """The whole model, in memory, with quantized weights and with inputs rounded for them."""
    with ExitStack() as undo:
        for name, each in found.items():
            module, numbers = model.get_submodule(name), each.whole().restored()
            undo.callback(module._parameters.__setitem__, "weight", module._parameters["weight"])
            turned = type(module).__name__ == "Conv1D"
            module._parameters["weight"] = nn.Parameter(numbers.T.contiguous() if turned else numbers)
            if not isinstance(module, nn.Embedding):
                hook = partial(_rounded, each)
                undo.callback(module.register_forward_pre_hook(hook).remove)
        yield


def _rounded(each, _, inputs):
    return (each.seen(inputs[0]), *inputs[1:])


def random_texts(count=4, length=24, seed=1):
    """Texts of the random models' tokens, of several lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 97, length - each).tolist() for each in range(count)]


def random_head(config, known):
    """An EAGLE-3 head for a target of this configuration, which drafts these tokens."""
    torch.manual_seed(1)
    raw = config.to_dict() | {"draft_vocab_size": len(known), "initializer_range": 0.2, "model_type": "llama"}
    head = EagleHead(head_config(raw, config)).eval()
    head.d2t.copy_(torch.tensor(known) - torch.arange(len(known)))
    head.t2d[known] = True
    return head


def head_chain(model, head, known):
    """A head's greedy drafting in PyTorch, of `known` tokens: each step from the text's beginning on, uncached."""
    taps = head.taps

    @torch.no_grad()
    def chain(text, depth):
        with taps.watching(model):
            model(torch.tensor([text]))
            hidden = taps.fuse(taps.states())[:, :-1]
        tokens = text[1:]
        for _ in range(depth):
            positions = torch.arange(len(tokens))[None]
            logits, after = head(torch.tensor([tokens]), hidden, positions)
            tokens = [*tokens, known[int(logits[0, -1].argmax())]]
            hidden = torch.cat((hidden, after[:, -1:]), 1)
        return tokens[len(text) - 1 :]

    return chain


def parallel_chain(model, mask):
    """All tokens of one pass, after masks."""

    @torch.no_grad()
    def chain(text, depth):
        logits = model(torch.tensor([[*text, *[mask] * (depth - 1)]])).logits[0, len(text) - 1 :, :mask]
        found = logits.argmax(-1).tolist()
        return found

    return chain
