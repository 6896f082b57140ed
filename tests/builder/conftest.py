"""Fixtures of the builder's tests: random Llamas, in memory and on disk, whose every weight counts."""

import importlib
import logging

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_trace():
    """Torch traces an export into thousands of log records, and pytest would keep them all."""
    importlib.import_module("torch")  # sets its loggers up
    logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(autouse=True)
def _one_thread():
    """For products as small as these a second thread is a hindrance, and waits by spinning."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model():
    """`make_model(**LlamaConfig fields)`: a random float32 Llama, norms and biases random too."""

    def make(**fields):
        import torch
        from tiny_models import SIZES
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        defaults = SIZES | {"initializer_range": 0.2, "attn_implementation": "sdpa"}
        model = LlamaForCausalLM(LlamaConfig(**defaults | fields)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 1:
                    weight += 0.2 * torch.randn_like(weight)
        return model

    return make


@pytest.fixture(scope="session")
def make_sharp_checkpoint(make_checkpoint):
    """`make_checkpoint` with wide logits, so that no choice is a near-tie, and with random norms and biases."""

    def make(folder, **fields):
        import torch
        from safetensors.torch import load_file, save_file

        make_checkpoint(folder, **{"initializer_range": 0.4} | fields)
        generator = torch.Generator().manual_seed(1)
        for path in folder.glob("*.safetensors"):
            weights = load_file(path)
            for name, weight in weights.items():
                if weight.ndim == 1:
                    weights[name] = weight + 0.2 * torch.randn(weight.shape, generator=generator)
            save_file(weights, path, metadata={"format": "pt"})
        return folder

    return make
