"""An unfinished training's folder keeps what was made, for one process and one set of options at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specbuild.builder.distill.pipeline import distill
from specbuild.builder.distill.work import Work
from specbuild.runtime.errors import InputError, OptionError, OutputError


def begin(folder, identity):
    return Work.open(folder / "w", identity, resume=False, force=False)


def go_on(folder, identity):
    return Work.open(folder / "w", identity, resume=True, force=False)


def begin_again(folder, identity):
    return Work.open(folder / "w", identity, resume=False, force=True)


@pytest.mark.nightly
def test_another_training_is_not_gone_on_with(asked, tmp_path):
    config, text = asked(), tmp_path / "text.txt"
    text.write_text("import os\n" * 99)

    def interrupted(what, done, *_):
        if (what, done) == ("training", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(config, interrupted)
    for fields, why in (({"batch_size": 3}, "--batch-size 2, not 3"), ({"text": (text,)}, "another text")):
        with pytest.raises(InputError, match=why):
            distill(replace(config, resume=True, **fields))
    (config.work / "state.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="damaged"):
        distill(replace(config, resume=True))
    distill(replace(config, force=True))
    with pytest.raises(InputError, match="--force"):
        distill(config)
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "text.txt"}


def test_what_was_kept_is_not_made_again(tmp_path):
    work, made = begin(tmp_path, {}), list[int]()

    def make():
        made.append(1)
        return {"rows": np.arange(6, dtype=np.int32).reshape(2, 3), "ends": np.array([0.5], np.float16)}

    for _ in range(2):
        found = work.kept("texts", make)
        assert (found["rows"].tolist(), found["rows"].dtype) == ([[0, 1, 2], [3, 4, 5]], np.int32)
        assert (found["ends"].tolist(), found["ends"].dtype) == ([0.5], np.float16)
    assert made == [1]
    (work.folder / "texts.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(OutputError, match=r"texts\.safetensors is damaged \(.*\): begin again with --force$"):
        work.kept("texts", make)


def test_a_state_is_read_as_it_was_written(tmp_path):
    work = begin(tmp_path, {})
    assert work.load("state") is None
    weight, about = torch.randn(3, 4, dtype=torch.bfloat16).T, {"curve": [{"loss": 0.5}]}
    for step in (7, 8):
        work.save("state", {"weight/a.b": weight, "step": torch.tensor(step)}, about)
    tensors, found = work.load("state") or ({}, {})
    assert found == about
    assert torch.equal(tensors["weight/a.b"], weight)
    assert tensors["step"].item() == 8
    work.remove()
    assert not work.folder.exists()


def test_one_at_a_time(tmp_path):
    first = begin(tmp_path, {"seed": 1})
    for each in (go_on, begin_again):
        with pytest.raises(OutputError, match=r"another process trains in .*/w: wait for it, or stop it$"):
            each(tmp_path, {"seed": 1})
    first.lock.close()
    with pytest.raises(OutputError, match="holds an unfinished training: go on with --resume, or replace it with"):
        begin(tmp_path, {"seed": 1})
    (tmp_path / "w" / "kept").touch()
    again = go_on(tmp_path, {"seed": 1})
    assert (again.threads, (tmp_path / "w" / "kept").exists()) == (first.threads, True)
    again.lock.close()
    begin_again(tmp_path, {"seed": 2}).lock.close()
    assert not (tmp_path / "w" / "kept").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 3}, "--batch-size 2, not 3"),
        ({"target_sha256": "b"}, "another target"),
        ({"new": True}, "--new None"),
    ],
)
def test_what_it_was_made_with_is_said(tmp_path, changed, message):
    identity = {"batch_size": 2, "target_sha256": "a", "shape": (1, 2)}
    begin(tmp_path, identity).lock.close()
    with pytest.raises(OptionError, match=f"^{tmp_path}/w was made with {message}.*: give the same, or begin again"):
        go_on(tmp_path, identity | changed)
    go_on(tmp_path, identity).lock.close()


def test_what_is_no_training_is_left_alone(tmp_path):
    (tmp_path / "w").mkdir()
    letter, file = tmp_path / "w" / "letter.txt", tmp_path / "file"
    for path in (letter, file / "w"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("dear")
    for folder, each, why in (
        (tmp_path, begin_again, "is no training, so --force will not replace it"),
        (letter, begin, "cannot be written"),
        (file, go_on, "is in the way"),
        (file, begin_again, "is in the way"),
    ):
        with pytest.raises(OutputError, match=why):
            each(folder, {})
    with pytest.raises(OptionError, match=r"there is no .*/none/w to go on with: drop --resume"):
        go_on(tmp_path / "none", {})
    assert letter.read_text() == (file / "w").read_text() == "dear"


def test_a_training_that_was_killed_as_it_began_is_in_nobodys_way(tmp_path):
    """Nothing but its lock, and half of what it was asked for, is there: nothing is lost, and no --force is needed."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "lock").touch()
    (tmp_path / "w" / ".identity.json.123").write_text("{")
    begin(tmp_path, {"a": 1}).lock.close()
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["identity.json", "lock"]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{}", b"[]", b"\xff", b'{"threads": 1, "identity": 5}'])
def test_what_it_was_asked_for_is_read_strictly(tmp_path, content):
    begin(tmp_path, {"a": 1}).lock.close()
    (tmp_path / "w" / "identity.json").write_bytes(content)
    with pytest.raises(OutputError, match="is damaged"):
        go_on(tmp_path, {"a": 1})
