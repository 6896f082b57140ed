"""Inflated checkpoints: the source's function in another shape, dense, and the same bytes each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZES = {"hidden": 32, "layers": 2, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 4096}
ALL = {"hidden": 96, "layers": 5, "intermediate": 80, "heads": 12, "kv_heads": 3, "head_dim": 16, "vocab": 4100}

GATE = "model.layers.0.mlp.gate_proj.weight"  # of an added layer


@pytest.fixture(scope="module")
def script(import_script: Callable[[str], Any]) -> Any:
    return import_script("inflate_checkpoint")


@pytest.fixture(scope="module")
def make_source(make_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """A Llama of 16-bit weights, norms of any size, and logits of several units."""

    def make(folder: Path, **fields: object) -> Path:
        make_checkpoint(folder, **{"head_dim": 8, "initializer_range": 0.3, "tie_word_embeddings": True} | fields)
        model = load(folder)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data.uniform_(0.5, 2)
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def source(make_source: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "tiny")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def like(**sizes: int) -> list[str]:
    return ["--like", ",".join(f"{key}={size}" for key, size in sizes.items())]


def logits(folder: Path) -> torch.Tensor:
    ids = torch.randint(SIZES["vocab"], (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return torch.as_tensor(load(folder)(ids).logits)


def assert_same(source: Path, out: Path) -> torch.Tensor:
    """The logits of `out`, after comparing them."""
    expected, seen = logits(source), logits(out)
    known = expected.shape[-1]
    assert expected.std() > 0.5
    torch.testing.assert_close(seen[..., :known], expected, atol=1e-4, rtol=0)
    if seen.shape[-1] > known:
        assert (seen[..., known:].amax(-1) < expected.amax(-1)).all()
    return seen


SHAPES = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([32, 33, 48, 64, 128, 256]),
        "layers": st.sampled_from([2, 3, 7]),
        "intermediate": st.sampled_from([48, 49, 96]),
        "head_dim": st.sampled_from([8, 16, 24]),
        "vocab": st.sampled_from([4096, 4097, 4200]),
    }
)
GROUPS = st.sampled_from([(4, 2), (4, 4), (6, 2), (8, 2), (6, 6), (12, 3), (12, 4), (5, 5)])  # (heads, kv_heads)


@settings(max_examples=12, derandomize=True, deadline=None, phases=[Phase.generate])  # an example is not quick
@given(sizes=SHAPES, groups=GROUPS)
def test_every_shape_computes_what_the_source_does(
    script: Any,
    source: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sizes: dict[str, int],
    groups: tuple[int, int],
) -> None:
    out, (heads, kv_heads) = tmp_path_factory.mktemp("inflated") / "out", groups
    shape = sizes | {"heads": heads, "kv_heads": kv_heads, "hidden": -(-sizes["hidden"] // heads) * heads}
    assert script.main([str(source), str(out), *like(**shape), "--no-check"]) == 0
    assert_same(source, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert {key: config["specbuild_inflated_from"][key] for key in SIZES} == SIZES
    shutil.rmtree(out)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "factor": 3.0}]
)
@pytest.mark.parametrize("tied", [(True, False), (False, False), (False, True)])
def test_heads_tied_or_not(
    script: Any,
    make_source: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: tuple[bool, bool],
    rope: dict[str, Any],
) -> None:
    """A source's own head stays its own."""
    source = make_source(tmp_path / "tiny", tie_word_embeddings=tied[0], rope_parameters={"rope_theta": 1e4} | rope)
    monkeypatch.setitem(script.LIKE, "some", script.Shape(*ALL.values(), tied=tied[1]))
    assert script.main([str(source), str(tmp_path / "out"), "--like", "some"]) == 0
    assert_same(source, tmp_path / "out")
    assert load(tmp_path / "out").config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [({"hidden": 128}, "bfloat16"), ({"hidden": 256}, "bfloat16"), ({"hidden": 128, "head_dim": 32}, "float16")],
)
def test_16_bits_are_exact_at_scales_that_are_powers_of_two(
    script: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, int], dtype: str
) -> None:
    shape = like(**ALL | {"heads": 8, "kv_heads": 4, "head_dim": 8} | sizes)
    assert script.main([str(source), str(tmp_path / "out"), *shape, "--dtype", dtype, "--json"]) == 0
    assert_same(source, tmp_path / "out")
    result = json.loads(capsys.readouterr().out)
    assert result["largest_difference"] < 1e-4
    assert result["same_greedy"] == 1
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {getattr(torch, dtype)}
    assert sum(weight.numel() for weight in weights.values()) == result["parameters"]
    assert sum(weight.nbytes for weight in weights.values()) == result["bytes"]


def test_added_tokens_are_not_sampled_where_there_is_a_free_channel(script: Any, source: Path, tmp_path: Path) -> None:
    for hidden in (36, 32):
        out = tmp_path / str(hidden)
        assert script.main([str(source), str(out), *like(hidden=hidden, vocab=5000)]) == 0
        seen = assert_same(source, out)
        if hidden == 36:
            assert seen.softmax(-1)[..., 4096:].sum(-1).max() < 1e-30
        else:
            mean = seen[..., :4096].mean(-1, keepdim=True)
            torch.testing.assert_close(seen[..., 4096:], mean.expand_as(seen[..., 4096:]), atol=1e-4, rtol=0)
    assert script.main([str(source), str(tmp_path / "none"), *like(hidden=64)]) == 0
    eps = [load(folder).config.rms_norm_eps for folder in (source, tmp_path / "none")]
    assert eps[1] == pytest.approx(eps[0] / 2)


def test_what_can_be_dense_is(script: Any, source: Path, tmp_path: Path) -> None:
    """Exactly the zeros that the module's docstring names; hidden 96 holds 32 filled channels and 2 constant ones."""
    assert script.main([str(source), str(tmp_path / "out"), *like(**ALL)]) == 0
    weights, own = load_file(tmp_path / "out" / "model.safetensors"), {"model.layers.1.": 0, "model.layers.3.": 1}
    pairs = torch.tensor([0, 2, 4, 6, 8, 10, 12, 14])  # of 8 rotary pairs: those of the source's 4, in both halves
    for name, weight in weights.items():
        zero = torch.zeros_like(weight, dtype=torch.bool)
        is_source = name.startswith(tuple(own))
        if "embed" in name:
            zero[:4096, 34:] = True
        elif "layernorm" in name:
            zero[32:34] = True
        elif "v_proj" in name or "up_proj" in name:
            zero[:, :32] = True
            if is_source and "up" in name:
                zero[:48, :32] = False
            elif is_source:
                zero.view(3, 16, 96)[:2, pairs, :32] = False
        elif "k_proj" in name and is_source:
            odd = torch.tensor([1, 3, 5, 7, 9, 11, 13, 15])
            zero.view(3, 16, 96)[:2, odd, :32] = True
        elif "o_proj" in name and is_source:
            heads = zero.view(96, 3, 4, 16)
            heads[:, :2, :, pairs] = True
            heads[:32, :2, :2, pairs] = False
        elif "down_proj" in name and is_source:
            zero[32:, :48] = True
        assert torch.equal(weight == 0, zero), name


def test_the_same_arguments_give_the_same_bytes(
    script: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(name: str, *options: str) -> dict[str, bytes]:
        assert script.main([str(source), str(tmp_path / name), *like(**ALL), *options]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = written("first", "--no-check")
    torch.manual_seed(5)
    assert written("second") == first
    written("third", "--seed", "1")
    gates = [load_file(tmp_path / name / "model.safetensors")[GATE] for name in ("first", "third")]
    assert (gates[0] != gates[1]).all()
    monkeypatch.setattr(script, "SHARD", 1 << 16)
    sharded = written("sharded")
    files = set(json.loads(sharded["model.safetensors.index.json"])["weight_map"].values())
    assert files == {name for name in sharded if name.endswith(".safetensors")}
    assert len(files) > 3
    torch.testing.assert_close(logits(tmp_path / "sharded"), logits(tmp_path / "first"), atol=0, rtol=0)


@pytest.mark.slow
def test_the_reference_target_at_100m(
    script: Any, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = like(hidden=1024, layers=8, intermediate=2816, heads=16, kv_heads=4, vocab=8192)
    assert script.main([str(pair / "target"), str(tmp_path / "out"), *shape, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == pytest.approx(100e6, rel=0.05)
    assert result["largest_difference"] < 1e-4
    assert result["added_tokens_below"] > 100
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("class Parser:\n    def ", return_tensors="pt")["input_ids"]
    texts = [
        load(folder).generate(ids, max_new_tokens=20, do_sample=False).tolist()
        for folder in (pair / "target", tmp_path / "out")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == ids.shape[1] + 20


@pytest.mark.parametrize(
    ("name", "parameters", "tied"),
    [("llama-3-8b", 8_030_261_248, False), ("llama-3.2-1b", 1_235_814_400, True), ("qwen3-0.6b", 596_042_752, True)],
)
def test_named_shapes(script: Any, name: str, parameters: int, tied: bool) -> None:
    """The models' own parameter counts; of Qwen3, without its q/k norms."""
    shape = script.target_shape(name, script.Shape(*SIZES.values(), tied=True))
    assert (shape.parameters(), shape.tied) == (parameters, tied)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("hidden=31", "hidden 31 is below the source's 32"),
        ("vocab=4095", "vocab 4095 is below the source's 4096"),
        ("layers=0", "layers 0 is below the source's 2"),
        ("heads=7", "heads 7 is no multiple of kv_heads 2"),
        ("head_dim=12", "head_dim 12 is no multiple of the source's 8"),
        ("heads=12", "hidden 32 is no multiple of heads 12"),
        ("heads=4,kv_heads=3", "heads 4 is no multiple of kv_heads 3"),
        ("heads=3,kv_heads=3", "heads 3 is below the source's 4"),
        ("width=64", "--like 'width=64': use llama-3-8b, llama-3.2-1b, qwen3-0.6b, or KEY=N of hidden, layers,"),
        ("hidden=big", "--like 'hidden=big': use"),
        ("tied=1", "--like 'tied=1': use"),
    ],
)
def test_what_is_refused(
    script: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, message: str
) -> None:
    assert script.main([str(source), str(tmp_path / "out"), "--like", shape]) == 2
    assert_refused(capsys, tmp_path, message)


def assert_refused(capsys: pytest.CaptureFixture[str], folder: Path, message: str) -> None:
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("inflate_checkpoint: ")
    assert message in error
    assert not (folder / "out").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "has biases"),
        (
            {"num_attention_heads": 8},
            "kv_heads 3 cannot hold the source's 2 groups of 4 heads in groups of 3: it takes 4",
        ),
        ({"model_type": "mistral"}, "is a 'mistral' model"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "under 'dynamic' RoPE"),
        ({"vocab_size": "many"}, "config.json cannot be used"),
    ],
)
def test_what_source_is_refused(
    script: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | fields), encoding="utf-8")
    sizes = like(head_dim=16, hidden=36, heads=9, kv_heads=3)
    assert script.main([str(folder), str(tmp_path / "out"), *sizes]) == 2
    assert_refused(capsys, tmp_path, message)


def test_no_source_no_room_and_no_overwriting(
    script: Any, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.main([str(tmp_path / "none"), str(tmp_path / "out"), *like(hidden=64)]) == 2
    assert_refused(capsys, tmp_path, "none has no config.json")
    (tmp_path / "there").mkdir()
    assert script.main([str(source), str(tmp_path / "there"), *like(hidden=64)]) == 2
    assert_refused(capsys, tmp_path, "there exists")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**6))
    assert script.main([str(source), str(tmp_path / "out"), *like(hidden=64)]) == 2
    assert_refused(capsys, tmp_path, "out takes 1.2 MB and some room, and 1.0 MB are free")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_a_failed_check_leaves_nothing(
    script: Any,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A wrong unit, or an added token that always wins."""
    real = script.Inflation.tensor

    def tensor(self: Any, asked: str) -> torch.Tensor:
        found: torch.Tensor = real(self, asked)
        if asked == name:
            found[4096:] *= -1
            found[:8, :8] += 0 if "embed" in name else 0.5
        return found

    monkeypatch.setattr(script.Inflation, "tensor", tensor)
    assert script.main([str(source), str(tmp_path / "out"), *like(hidden=64, vocab=4100)]) == 1
    assert_refused(capsys, tmp_path, "an added token wins" if "embed" in name else "the logits differ by")
