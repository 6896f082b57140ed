"""Random checkpoints of many families, small enough to build in seconds, whose every weight counts."""

import shutil

import pytest
from small_models import randomize
from tiny_families import SIZES

BASE = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}


@pytest.fixture(scope="session")
def make_family(pair):
    """`make_family(folder, model_type, noise, **fields)`: a random checkpoint; noise tells it from another one.

    Logits are wide, so that few choices are near-ties; the tokenizer is the reference pair's.
    """

    def make(folder, model_type, noise=0.0, **fields):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(model_type, **BASE | fields)
        randomize(AutoModelForCausalLM.from_config(config).eval(), noise).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pair / "target" / name, folder / name)
        return folder

    return make
