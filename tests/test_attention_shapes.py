"""One seed, one text, where attention is long and of another shape: wide heads, few of them, windows, 1,500 tokens."""

import random
import shutil

import pytest

from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.backends.agreement import read
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.backends.executor import StepInput

SHAPES = {  # heads, KV heads, size of a head, window
    "wide": (4, 1, 256, 0),
    "wide-window": (4, 1, 256, 512),
    "odd": (4, 1, 104, 0),
    "own": (4, 4, 64, 0),
    "narrow": (2, 2, 80, 0),
    "grouped": (8, 2, 128, 0),
    "between": (4, 2, 192, 0),
    "many": (16, 1, 64, 0),
}
LONGEST, NEW_TOKENS = 1536, 24
WAYS = ("off", "auto", "chain:1", "chain:4", "best:8")
_soak = pytest.mark.soak
_cases = [
    pytest.param(shape, precision, marks=() if (shape, precision) in {("wide", "fp32"), ("odd", "int8")} else _soak)
    for shape in SHAPES
    for precision in ("fp32", "int8", "int4")
]


@pytest.fixture(scope="module")
def built(once, pair, build_shared):
    """A random model of a shape, built in a precision, without a draft."""

    def make(shape, precision):
        from specbuild.builder.config.build_config import QuantizeOptions

        checkpoint = once(f"shape-{shape}", lambda folder: save(folder, pair, *SHAPES[shape]))
        quantize = QuantizeOptions() if precision == "fp32" else QuantizeOptions(max_kl=100.0)  # its texts mean nothing
        return once(
            f"shape-{shape}-{precision}.bundle",
            lambda path: build_shared(
                target=str(checkpoint), output=path, precision=precision, max_seq_len=LONGEST, quantize=quantize
            ),
        )

    return make


def save(folder, pair, heads, kv_heads, size, window):
    """A checkpoint of two layers with random weights and the reference pair's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
    sizes |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.1}
    model = (
        MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
        if window
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair / "target" / name, folder / name)


def request(index, speculation=None):
    """A prompt of any length, part of it said before so that lookup drafts, and parameters that its index decides."""
    rng = random.Random(index)
    begun = [rng.randrange(1, 4096) for _ in range(rng.randrange(8, (LONGEST - NEW_TOKENS) // 2 - 64))]
    prompt = begun + begun[-rng.randrange(1, len(begun) + 1) :]
    tree = rng.choice(WAYS)
    temperature = rng.choice((0.0, 0.8))
    return prompt, SamplingParams(NEW_TOKENS, seed=index, temperature=temperature, speculation=speculation or tree)


@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "precision"), _cases)
def test_no_long_text_differs(built, shape, precision):
    """Batches of four with trees mixed and prefixes cached, against plain decoding alone."""
    bundle, indices = built(shape, precision), list(range(84))
    with Engine.load(bundle, prefix_caching=False) as engine:
        assert engine.exact
        expected = [engine.generate(*request(index, "off"))[0].token_ids for index in indices]
    random.Random(0).shuffle(indices)
    mixed = [request(index) for index in indices]
    with Engine.load(bundle, batch_size=4) as engine:
        results = engine.generate([prompt for prompt, _ in mixed], [params for _, params in mixed])
    assert all(result.error is None for result in results)
    assert [result.token_ids for result in results] == [expected[index] for index in indices]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape", [pytest.param(each, marks=() if each in {"wide", "odd"} else _soak) for each in SHAPES]
)
def test_a_step_of_any_size_says_the_same_of_its_last_token(built, shape):
    executor = load_model(Bundle.open(built(shape, "fp32")), "target", 1, 1)
    text = random.Random(1).choices(range(4096), k=700)
    read(executor, 0, text, 64)
    for end in (256, 331, 700):
        said = set[bytes]()
        for start in range(end - 256, end):  # what is overwritten has the same bits
            tokens = text[start:end]
            said.add(executor.step([StepInput(0, start, start, tokens, range(start, end), None, 1)])[0].tobytes())
        assert len(said) == 1
