"""Inflated checkpoints: the source's function in another shape, and the same bytes each time."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.nightly
VOCAB, WIDE = 4096, "hidden=96,layers=5,intermediate=80,heads=12,kv_heads=3,head_dim=16,vocab=4100"
GROUPS = ["heads=4,kv_heads=2", "heads=6,kv_heads=2", "heads=8,kv_heads=2", "heads=6,kv_heads=6", "heads=12,kv_heads=4"]
SHAPES = st.tuples(
    st.sampled_from(["hidden=48", "hidden=72", "hidden=192"]),
    st.sampled_from(["layers=2", "layers=3", "layers=7"]),
    st.sampled_from(["intermediate=48", "intermediate=49", "intermediate=96"]),
    st.sampled_from(GROUPS),
    st.sampled_from(["head_dim=8", "head_dim=16", "head_dim=24"]),
    st.sampled_from(["vocab=4096", "vocab=4097", "vocab=4200"]),
)


@pytest.fixture(scope="module")
def script(import_script):
    return import_script("checkpoints/inflate")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(make_checkpoint, tmp_path_factory, request):
    """A Llama of 16-bit weights, norms of any size, and logits of several units."""
    fields = {"tie_word_embeddings": request.param, "head_dim": 8, "initializer_range": 0.3}
    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "tiny", **fields)
    model = load(folder)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_same(source, out):
    ids = torch.randint(VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, seen = (load(folder)(ids).logits for folder in (source, out))
    assert expected.std() > 0.5
    torch.testing.assert_close(seen[..., :VOCAB], expected, atol=1e-4, rtol=0)
    assert (seen.amax(-1) == seen[..., :VOCAB].amax(-1)).all()  # no added token wins


@settings(max_examples=8, derandomize=True, phases=[Phase.generate])  # an example is not quick
@given(shape=SHAPES)
def test_every_shape_computes_what_the_source_does(script, source, tmp_path_factory, shape):
    out = tmp_path_factory.mktemp("inflated") / "out"
    assert script.main([str(source), str(out), "--like", ",".join(shape), "--no-check"]) == 0
    assert_same(source, out)


def test_the_same_arguments_give_the_same_bytes_and_few_zeros(script, source, tmp_path):
    def written(name, *options):
        assert script.main([str(source), str(tmp_path / name), "--like", WIDE, *options]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert written("first", "--no-check") == written("second") != written("third", "--seed", "1")
    weights = load_file(tmp_path / "first" / "model.safetensors").values()
    assert all((weight == 0).float().mean() < 0.7 for weight in weights)  # what would read the filled channels


@pytest.mark.parametrize("wrong", ["hidden=31", "vocab=4095", "layers=0", "heads=7", "head_dim=12", "width=64"])
def test_a_wrong_shape_is_named_in_a_line(script, source, tmp_path, capsys, wrong):
    assert script.main([str(source), str(tmp_path / "out"), "--like", wrong]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("inflate_checkpoint: ")
    assert wrong.partition("=")[0] in error
    assert not [*tmp_path.iterdir()]


def test_a_failed_check_leaves_nothing(script, source, tmp_path, monkeypatch):
    real = script.Inflation.tensor
    monkeypatch.setattr(script.Inflation, "tensor", lambda self, name: 1.1 * real(self, name))
    assert script.main([str(source), str(tmp_path / "out"), "--like", "hidden=64"]) == 1
    assert not [*tmp_path.iterdir()]
