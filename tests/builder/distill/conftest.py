"""Fixtures: tiny targets, and the drafts that are trained of them in a few steps."""

import pytest


@pytest.fixture(scope="session")
def target(make_checkpoint, tmp_path_factory):
    """Three layers, not tied, far from uniform; read it, do not change it."""
    folder = tmp_path_factory.mktemp("targets") / "target"
    return make_checkpoint(folder, num_hidden_layers=3, initializer_range=0.3)


@pytest.fixture
def asked(target, tmp_path):
    """`asked(**DistillConfig fields)`: a distillation of a second."""
    from specbuild.builder.distill.options import DistillConfig

    def make(**fields):
        small = {"target": str(target), "output": tmp_path / "draft", "generate": 96, "sequence_length": 24}
        few = {"depth": 3, "steps": 6, "batch_size": 2, "eval_every": 2, "save_every": 2, "dtype": "fp32"}
        return DistillConfig(**small | few | {"draft_vocab_size": 64} | fields)

    return make


MASK = 97  # of the parallel draft: one more than the random models' tokens


@pytest.fixture
def chain(make_model):
    """A `ChainStudent` whose head knows every other token."""
    import torch

    from specbuild.builder.distill.chain import ChainStudent, trim

    tokens = torch.arange(0, 97, 2)
    return ChainStudent(trim(make_model(), tokens), tokens)


@pytest.fixture
def parallel(make_model):
    """A `ParallelStudent` of all tokens, which drafts four of them."""
    import torch

    from specbuild.builder.distill.parallel import ParallelStudent, with_mask

    net = make_model()
    with_mask(net, MASK)
    with torch.no_grad():
        net.get_input_embeddings().weight[MASK] = torch.randn(32)
    return ParallelStudent(net, None, MASK, 4)
