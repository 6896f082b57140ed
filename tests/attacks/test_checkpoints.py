"""Hostile checkpoints: every file of one mutated; each ends in one line, soon, before anything is made of it."""

import json
import os
import shutil
import signal
import struct
from pathlib import Path

import pytest
from campaign.attack import Bench
from campaign.checkpoints import CheckpointsAttack
from campaign.worker import try_case
from data_files import table

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.checkpoint import find
from specbuild.builder.prepare import prepare
from specbuild.runtime.errors import CheckpointError

LIMIT = 10  # seconds, after which it hangs
BROKEN = (
    *(b'{"a":' * 100_000, b"[" * 100_000, b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", b'{"a": "\xff\xfe"}'),
    *(b'{"a": NaN}', b'{"a": "\\ud800"}', b"[]", b"", b"{}{}"),
)
INDEX = "model.safetensors.index.json"
OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.fixture(autouse=True)
def _no_hang():
    """Whatever takes too long fails where it is."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def attack(bundle, tmp_path_factory):
    return CheckpointsAttack(Bench(bundle, tmp_path_factory.mktemp("attack")))


@pytest.fixture(scope="module")
def original(make_checkpoint, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def edit(path, **fields):
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def refusal(folder):
    """The line by which a build refuses a target."""
    with pytest.raises(CheckpointError) as caught:
        prepare(BuildConfig(str(folder), folder.parent / "out"))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


WRONG = table("wrong_checkpoints.json")
SIZES = WRONG["sizes"]


@pytest.mark.parametrize("field", SIZES)
def test_sizes_are_held_against_the_weights(folder, field):
    sound = (folder / "config.json").read_bytes()
    for value in SIZES[field]:
        (folder / "config.json").write_bytes(sound)
        edit(folder / "config.json", **{field: value})
        line = refusal(folder)
        assert "config.json" in line
        ((name, shown),) = value.items() if isinstance(value, dict) else [(field, value)]
        assert f"{name} {shown!r}" in line


@pytest.mark.parametrize("name", [*OBJECTS, INDEX])
def test_json_that_is_none(folder, name):
    for content in BROKEN:
        (folder / name).write_bytes(content)
        assert name in refusal(folder)


NAMES = ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\0b", "none.safetensors", "x" * 5000)


def test_an_index_that_names_what_it_should_not(folder):
    for weight_map in (*({"model.norm.weight": name} for name in (*NAMES, 5, None, ["x"])), None, 5, [], "x", {}):
        edit(folder / INDEX, weight_map=weight_map)
        refusal(folder)
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit(folder / INDEX, weight_map={"a": "model.safetensors", "b": "other.safetensors"})
    assert "as another of its files" in refusal(folder), "a tensor that two files have"


@pytest.mark.parametrize("name", [*OBJECTS, "tokenizer.json", "model.safetensors", INDEX, "chat_template.jinja"])
def test_only_regular_files_are_opened(folder, name):
    (folder / name).unlink(missing_ok=True)
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)):
        make(folder / name)
        assert name in refusal(folder)
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_ten_gigabytes_of_nothing(folder, name):
    with (folder / name).open("r+b") as file:
        file.truncate(10 << 30)
    refusal(folder)


def test_links_of_a_hubs_cache_are_followed(folder, original):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(original / "model.safetensors")
    assert find(str(folder)).weights == [folder / "model.safetensors"]


NORM = "model.norm.weight"
LIES = {  # of a tensor in a file's header
    "data_offsets": ([0, 10**15], [0, 128], [128, 0], [-4, 0]),
    **{"dtype": ("F99",), "shape": ([33], [2**40, 2**40], [-32], None)},
}


def test_headers_that_lie(folder):
    """Of a tensor, or of their own length."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    told, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    lies = [told | {NORM: told[NORM] | {field: value}} for field, values in LIES.items() for value in values]
    texts = [json.dumps(each).encode() for each in lies]
    damaged = [struct.pack("<Q", len(text)) + text + rest for text in texts]
    for content in damaged + [struct.pack("<Q", length) + data[8:] for length in (0, 1, 2**40, 2**64 - 1)]:
        path.write_bytes(content)
        assert "model.safetensors is damaged" in refusal(folder)


@pytest.mark.parametrize(("name", "fields", "told"), WRONG["values"])
def test_values_of_another_kind(folder, name, fields, told):
    (folder / "generation_config.json").unlink()
    edit(folder / name, **fields)
    assert told in refusal(folder)


@pytest.mark.parametrize("seed", range(40))
def test_wrong_types_anywhere(attack, tmp_path, seed):
    """What the campaign draws: it is taken, or refused in one line."""
    assert not try_case(attack, "checkpoints", 3, seed, tmp_path / "case").found
