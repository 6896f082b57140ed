"""An unfinished training's folder keeps what was made, for one process and one set of options at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbuild.builder.distill.pipeline import distill
from specbuild.builder.distill.work import LOCK, Work
from specbuild.runtime.errors import InputError, OptionError, OutputError


def at_the_third_step(what: str, done: int, *_: object) -> None:
    if (what, done) == ("training", 3):
        raise KeyboardInterrupt


@pytest.mark.nightly
def test_another_training_is_not_gone_on_with(asked: Callable[..., Any], tmp_path: Path) -> None:
    config = asked()
    with pytest.raises(InputError, match="drop --resume"):
        distill(replace(config, resume=True))
    with pytest.raises(KeyboardInterrupt):
        distill(config, at_the_third_step)
    with pytest.raises(InputError, match="--resume"):
        distill(config)
    with pytest.raises(InputError, match="--batch-size 2, not 3"):
        distill(replace(config, resume=True, batch_size=3))
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 99)
    with pytest.raises(InputError, match="another text"):
        distill(replace(config, resume=True, text=(text,)))
    (config.work / "state.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="damaged"):
        distill(replace(config, resume=True))
    with (config.work / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for fields in ({"resume": True}, {"force": True}):
            with pytest.raises(InputError, match="another process trains in"):
                distill(replace(config, **fields))
    distill(replace(config, force=True))
    with pytest.raises(InputError, match="--force"):
        distill(config)
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "text.txt"}


def test_what_was_kept_is_not_made_again(tmp_path: Path) -> None:
    work, made = Work.open(tmp_path / "w", {}, False, False), list[int]()

    def make() -> dict[str, np.ndarray]:
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


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    work = Work.open(tmp_path / "w", {}, False, False)
    assert work.load("state") is None
    weight, about = torch.randn(3, 4, dtype=torch.bfloat16).T, {"step": 7, "curve": [{"loss": 0.5}]}
    for step in (7, 8):
        work.save("state", {"weight/a.b": weight, "step": torch.tensor(step)}, about | {"step": step})
    found = work.load("state")
    assert found is not None
    assert found[1] == about | {"step": 8}
    assert torch.equal(found[0]["weight/a.b"], weight)
    assert found[0]["step"].item() == 8
    assert {path.name for path in work.folder.iterdir()} == {"identity.json", "lock", "state.safetensors"}
    work.remove()
    assert not work.folder.exists()


def test_one_at_a_time(tmp_path: Path) -> None:
    first = Work.open(tmp_path / "w", {"seed": 1}, False, False)
    for resume, force in ((True, False), (False, True)):
        with pytest.raises(OutputError, match=r"another process trains in .*/w: wait for it, or stop it$"):
            Work.open(tmp_path / "w", {"seed": 1}, resume, force)
    first.lock.close()
    with pytest.raises(OutputError, match="holds an unfinished training: go on with --resume, or replace it with"):
        Work.open(tmp_path / "w", {"seed": 1}, False, False)
    (tmp_path / "w" / "kept").touch()
    again = Work.open(tmp_path / "w", {"seed": 1}, True, False)
    assert (again.threads, (tmp_path / "w" / "kept").exists()) == (first.threads, True)
    again.lock.close()
    Work.open(tmp_path / "w", {"seed": 2}, False, True).lock.close()
    assert not (tmp_path / "w" / "kept").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 3}, "--batch-size 2, not 3"),
        ({"target_sha256": "b"}, "another target"),
        ({"new": True}, "--new None"),
    ],
)
def test_what_it_was_made_with_is_said(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    identity = {"batch_size": 2, "target_sha256": "a", "shape": (1, 2)}
    Work.open(tmp_path / "w", identity, False, False).lock.close()
    with pytest.raises(OptionError, match=f"^{tmp_path}/w was made with {message}.*: give the same, or begin again"):
        Work.open(tmp_path / "w", identity | changed, True, False)
    Work.open(tmp_path / "w", identity, True, False).lock.close()


def test_what_is_no_training_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    letter = tmp_path / "w" / "letter.txt"
    letter.write_text("dear")
    for folder, resume, force, why in (
        (tmp_path / "w", False, True, "is no training, so --force will not replace it"),
        (letter / "w", False, False, "cannot be written"),
        (letter, True, False, "is in the way"),
        (letter, False, True, "is in the way"),
    ):
        with pytest.raises(OutputError, match=why):
            Work.open(folder, {}, resume, force)
    with pytest.raises(OptionError, match=r"there is no .*/none to go on with: drop --resume"):
        Work.open(tmp_path / "none", {}, True, False)
    assert letter.read_text() == "dear"


def test_a_training_that_was_killed_as_it_began_is_in_nobodys_way(tmp_path: Path) -> None:
    """Nothing but its lock, and half of what it was asked for, is there: nothing is lost, and no --force is needed."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "lock").touch()
    (tmp_path / "work" / ".identity.json.123").write_text("{")
    work = Work.open(tmp_path / "work", {"a": 1}, resume=False, force=False)
    work.lock.close()
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["identity.json", "lock"]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{}", b"[]", b"\xff", b'{"threads": 1, "identity": 5}'])
def test_what_it_was_asked_for_is_read_strictly(tmp_path: Path, content: bytes) -> None:
    Work.open(tmp_path / "work", {"a": 1}, resume=False, force=False).lock.close()
    (tmp_path / "work" / "identity.json").write_bytes(content)
    with pytest.raises(OutputError, match="is damaged"):
        Work.open(tmp_path / "work", {"a": 1}, resume=True, force=False)
