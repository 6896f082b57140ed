"""Checkpoints: what is found in a folder, what is refused, and which two make a pair."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.builder.frontend.checkpoint import encode, find, load
from specbuild.runtime.errors import CheckpointError


@pytest.fixture(scope="module")
def original(make_checkpoint, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)


@pytest.fixture
def folder(original, tmp_path):
    """A checkpoint to damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def edit(path, **fields):
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def test_shards_are_found_and_load_as_one(make_checkpoint, tmp_path):
    whole = make_checkpoint(tmp_path / "whole", num_hidden_layers=1)
    sharded = make_checkpoint(tmp_path / "sharded", num_hidden_layers=1, max_shard_size="100KB")
    found = find(str(sharded))
    assert len(found.weights) > 1
    assert not (sharded / "model.safetensors").exists()
    expected = dict(load(find(str(whole)), "sdpa").named_parameters())
    for name, weight in load(found, "sdpa").named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=0)
    found.weights[0].unlink()
    with pytest.raises(CheckpointError, match=found.weights[0].name):
        find(str(sharded))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, 5, [3, 4]),
        ({"eos_token_id": 7}, 5, [7]),
        ({}, 5, [5]),
        (None, [5, 6], [5, 6]),
        (None, None, [0]),
        ({"eos_token_id": [3, 4096]}, 5, None),
        ({"eos_token_id": "3"}, 5, None),
    ],
)
def test_eos(folder, generation, config, expected):
    """Of the tokenizer where nothing else says it, and none where that has none."""
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    edit(folder / "config.json", eos_token_id=config)
    if expected is None:
        with pytest.raises(CheckpointError, match="eos_token_id that is no token"):
            find(str(folder))
        return
    assert find(str(folder)).eos_token_ids() == expected
    if expected == [0]:
        edit(folder / "tokenizer_config.json", eos_token=None)
        assert find(str(folder)).eos_token_ids() == []


@pytest.mark.parametrize(
    ("given", "expected", "warning"),
    [
        ({"temperature": 1e-6}, {"temperature": 0.0}, "has temperature 1e-06: it is read as 0, greedy"),
        ({"top_k": 50.0}, {"top_k": 50}, "has top_k 50.0: it is read as 50"),
        ({"top_k": -1}, {"top_k": 0}, "has top_k -1: it is read as off"),
        ({"temperature": 0.01, "top_k": 7, "top_p": None, "max_length": 20}, {"temperature": 0.01, "top_k": 7}, None),
    ],
)
def test_sampling_parameters_as_hubs_have_them(folder, logged, given, expected, warning):
    (folder / "generation_config.json").write_text(json.dumps(given))
    found = find(str(folder)).sampling
    assert repr(found) == repr(expected)
    messages = [record.getMessage() for record in logged()]
    assert messages == ([f"{folder}/generation_config.json {warning}"] if warning else [])


WRONG = [{"temperature": -1}, {"top_k": 1.5}, {"top_k": "50"}, {"top_k": True}, {"top_k": -2}, {"top_p": 7}]


@pytest.mark.parametrize("told", WRONG, ids=str)
def test_sampling_parameters_that_mean_nothing(folder, told):
    (folder / "generation_config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=rf"generation_config.json cannot be used .*{next(iter(told))}"):
        find(str(folder))


def test_a_weight_that_the_model_lacks_is_named(folder):
    tensors = load_file(folder / "model.safetensors") | {"extra": torch.ones(2)}
    found = find(str(folder))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="unexpected keys, the first is extra"):
        load(found, "sdpa")


def test_16_bit_weights_load_in_float32(folder):
    path = folder / "model.safetensors"
    half = {name: weight.to(torch.bfloat16) for name, weight in load_file(path).items()}
    save_file(half, path, metadata={"format": "pt"})
    model = load(find(str(folder)), "sdpa")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_no_number_is_named(folder, value):
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    weights = load_file(path)
    weights[name][3, 4] = value
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        load(find(str(folder)), "sdpa")


def test_no_code_of_a_checkpoint_is_run(folder, tmp_path):
    edit(folder / "config.json", model_type="other", auto_map={"AutoConfig": "code.Config"})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="code of its own"):
        find(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_hub_id_is_downloaded(original, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repo, revision, allow_patterns, **_):
        asked.append((repo, revision, allow_patterns))
        if len(asked) > 2:
            raise OSError("no network")
        return str(original)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for source in ("some/model", "some/model@refs/pr/1"):
        assert find(source).folder == original
    assert [(repo, revision) for repo, revision, _ in asked] == [("some/model", None), ("some/model", "refs/pr/1")]
    assert not {"*", "*.bin", "*.py", "*.pt"} & {pattern for *_, patterns in asked for pattern in patterns}
    with pytest.raises(CheckpointError, match=r"some/model.*no network"):
        find("some/model")


def test_a_tokenizer_that_panics_is_the_checkpoints_error():
    class PanicException(BaseException):  # pyo3's is no Exception
        pass

    def tokenizer(texts):
        if "b" in texts:
            raise PanicException("retry-limit-in-match over")
        return {"input_ids": [[1]] * len(texts)}

    assert encode(tokenizer, []) == []
    assert encode(tokenizer, ["a", "c"]) == [[1], [1]]
    with pytest.raises(CheckpointError, match="cannot read a text"):
        encode(tokenizer, ["a", "b"])
