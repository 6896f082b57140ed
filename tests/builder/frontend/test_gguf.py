"""GGUF files as checkpoints: the weights that they hold, what is refused, and that nothing is left behind."""

import hashlib
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import random_model
from tiny_gguf import TEMPLATE, write_gguf

from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.gguf import Gguf
from specbuild.runtime.errors import CheckpointError

TEXT = "def f(x):\n    return 'Größe'  # 12\n"

pytestmark = pytest.mark.usefixtures("temporary")


def weights(source):
    return dict(load(find(str(source)), "sdpa").state_dict())


@pytest.mark.slow
@pytest.mark.nightly(but=("Q4_1",))
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_gguf_is_the_checkpoint_of_its_dequantized_weights(kind, tiny, tmp_path, temporary):
    """Its folder goes with the checkpoint."""
    path = write_gguf(tiny, tmp_path / "a.gguf", kind)
    found, original = find(str(path)), find(str(tiny))
    assert (found.source, found.architecture, found.max_positions) == (str(path), "LlamaForCausalLM", 128)
    assert found.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert isinstance(found.origin, Gguf)
    assert found.origin.quantization == kind
    assert sum(found.origin.tensors.values()) == len(load_file(tiny / "model.safetensors"))
    assert found.tokenizer(TEXT)["input_ids"] == original.tokenizer(TEXT)["input_ids"]
    assert found.tokenizer.chat_template == TEMPLATE
    got, quantized = dict(load(found, "sdpa").state_dict()), gguf.GGMLQuantizationType[kind]
    for name, weight in weights(tiny).items():
        if weight.ndim == 2:
            weight = torch.from_numpy(
                gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), quantized), quantized)
            )
        torch.testing.assert_close(got[name], weight, rtol=0, atol=0)
    assert list(temporary.iterdir()) == [found.folder]
    del found
    assert not list(temporary.iterdir())


@pytest.mark.slow(only=("qwen2",))
@pytest.mark.nightly(only=("qwen3",))
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family, tiny, tmp_path):
    """Biases, norms of queries and keys, and rotary positions that nothing permutes."""
    sizes = {"vocab_size": 4096, "num_hidden_layers": 1, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0}
    model, folder = random_model(family, **sizes), tmp_path / family
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    found = find(str(write_gguf(folder, tmp_path / "a.gguf", arch=family)))
    assert found.config.model_type == family
    tokens = torch.tensor([[5, 300, 17, 2000]])
    with torch.no_grad():
        expected, got = (each(tokens).logits for each in (model, load(found, "eager")))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_lies_beside_a_gguf_is_not_read(tiny, tmp_path, temporary, monkeypatch):
    """Nor does the file's name matter, nor whether it is given from where it lies."""
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text('{"auto_map": {}, "model_type": "t5", "chat_template": "x", "eos_token_id": 9}')
    write_gguf(tiny, tmp_path / "a model")
    monkeypatch.chdir(tmp_path)
    found = find("a model")
    assert (found.architecture, found.tokenizer.chat_template, found.ends) == ("LlamaForCausalLM", TEMPLATE, (0,))
    assert not [path for path in found.folder.iterdir() if path.is_dir()]


@pytest.mark.slow(only=("changes1-ends1",))
@pytest.mark.nightly(only=("changes0-ends0", "changes2-ends2"))
@pytest.mark.parametrize(
    ("changes", "ends"),
    [({}, [0]), ({"tokenizer__ggml__eot_token_id": 7}, [0, 7]), ({"tokenizer__ggml__eot_token_id": 0}, [0])],
)
def test_texts_end_by_eos_and_by_the_end_of_a_turn(changes, ends, tiny, tmp_path):
    assert find(str(write_gguf(tiny, tmp_path / "a.gguf", **changes))).eos_token_ids() == ends


@pytest.mark.nightly
def test_digits_are_cut_apart_where_the_file_says_so(tiny, tmp_path):
    """As SmolLM2's own tokenizer does: the spaces before a digit are one token, and "  4" is not " " and " 4"."""
    plain, digits = (
        find(str(write_gguf(tiny, tmp_path / f"{pre}.gguf", tokenizer__ggml__pre=pre))).tokenizer
        for pre in ("gpt-2", "smollm")
    )
    assert digits.tokenize("a  42") != plain.tokenize("a  42")
    assert digits.tokenize("a  42")[1:] == ["ĠĠ", "4", "2"]
    assert digits("def f(x):")["input_ids"] == plain("def f(x):")["input_ids"]


HUGE = 10**9
BAD = {
    "family": ({"arch": "rwkv7"}, "rwkv7"),
    "encoder": ({"arch": "t5encoder"}, "cannot be used|decoder-only"),
    "layers": ({"llama__block_count": HUGE}, f"num_hidden_layers {HUGE}"),
    "head size": ({"llama__attention__key_length": HUGE}, f"head_dim {HUGE}"),
    "a text for a size": ({"llama__block_count": "two"}, "num_hidden_layers 'two'"),
    "scaled positions": ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
    "no tokens": ({"tokenizer__ggml__tokens": None}, "no usable tokenizer"),
    "merges that are none": ({"tokenizer__ggml__merges": ["q"]}, "no usable tokenizer"),
    "end": ({"tokenizer__ggml__eos_token_id": HUGE}, "no usable tokenizer|is no token"),
}


@pytest.mark.nightly(but=("encoder", "layers", "no tokens", "merges that are none", "scaled positions"))
@pytest.mark.slow(only=("encoder", "no tokens", "merges that are none"))
@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case, tiny, tmp_path, temporary):
    changes, expected = BAD[case]
    path = write_gguf(tiny, tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=expected) as error:
        find(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(temporary.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.999, 0.5, 0.3])
def test_a_cut_file_is_refused(share, tiny, tmp_path, temporary):
    path = write_gguf(tiny, tmp_path / "a.gguf")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(CheckpointError, match="cut off within"):
        find(str(path))
    assert not list(temporary.iterdir())


@pytest.mark.nightly
def test_a_tensor_too_many_is_refused(tiny, tmp_path, temporary):
    other = Path(shutil.copytree(tiny, tmp_path / "more"))
    more = load_file(other / "model.safetensors") | {"model.layers.7.mlp.up_proj.weight": torch.ones(64, 32)}
    save_file(more, other / "model.safetensors")
    with pytest.raises(CheckpointError, match="2048 numbers that transformers does not read"):
        find(str(write_gguf(other, tmp_path / "a.gguf")))
    assert not list(temporary.iterdir())


@pytest.mark.nightly
def test_a_file_that_changes_is_refused(tiny, tmp_path):
    path = write_gguf(tiny, tmp_path / "a.gguf")
    found = find(str(path))
    os.utime(path, (1, 1))
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        found.sha256()


def test_nothing_is_copied(tiny, tmp_path, temporary):
    """A file's weights are read where they are."""
    found = find(str(write_gguf(tiny, tmp_path / "a.gguf")))
    load(found, "eager")
    assert not [path for path in temporary.rglob("*") if path.suffix in (".safetensors", ".gguf", ".bin")]


def test_what_is_no_gguf_and_what_is_no_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x08" + bytes(40))
    with pytest.raises(CheckpointError, match="is a file, and no GGUF"):
        find(str(tmp_path / "model.safetensors"))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        find(str(tmp_path / "pipe.gguf"))
