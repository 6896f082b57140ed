"""`specbuild distill`: a draft from a shell, and every bad input as one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.distill import pipeline
from specbuild.cli import distill as command

from .conftest import Outcome

FEW = ("--sequence-length", 24, "--depth", 2, "--generate", 96, "--batch-size", 2, "--steps", 2, "--seed", 3)


def test_a_draft_is_made_and_described(specbuild: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    outcome = specbuild("distill", tiny, "--out", draft, "--dtype", "fp32", *FEW)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{draft}: 0.2M parameters, 2048 tokens in its head")
    assert "acceptance length" in lines[1]
    assert lines[3] == f"  next: specbuild build --target {tiny} --draft {draft} -o {draft}.bundle"
    outcome = specbuild("distill", tiny, "--out", draft, "--force", "--json", *FEW)
    assert json.loads(outcome.out)["options"]["seed"] == 3
    assert not (tmp_path / "draft.training").exists()


def test_every_option_reaches_the_training(
    specbuild: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has another value than its default, and is found in what is asked for."""
    given = list[Any]()
    monkeypatch.setattr(pipeline, "distill", lambda config, progress: given.append(config) or {})
    other = {"kind": "parallel", "divergence": "tv", "init": "random", "device": "cpu", "dtype": "fp32"}
    other |= {"text": (tiny,), "on_policy": 0.25, "learning_rate": 0.5, "sequence_length": 99}
    arguments, expected = list[Any](), dict[str, Any]()
    for name, default in command._DEFAULTS.items():
        if name in ("target", "output"):
            continue
        value = other.get(
            name, True if default is False else (default or 5) + 1 if not isinstance(default, str) else ""
        )
        expected[name] = value
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [flag, value[0] if isinstance(value, tuple) else value]
    specbuild("distill", tiny, "--out", tmp_path / "draft", "--json", *arguments)
    assert {name: getattr(given[0], name) for name in expected} == expected


def test_each_kind_has_its_own_defaults(
    specbuild: Callable[..., Outcome], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[Any]()
    monkeypatch.setattr(pipeline, "distill", lambda config, progress: given.append(config) or {})
    for more in ((), ("--kind", "parallel"), ("--kind", "eagle3"), ("--kind", "eagle3", "--steps", 7)):
        specbuild("distill", tiny, "--out", tmp_path / "draft", "--json", *more)
    found = [(each.steps, each.batch_size, each.sequence_length) for each in given]
    assert found == [(3600, 8, 384), (1500, 8, 384), (2000, 4, 256), (7, 4, 256)]


BAD = {
    "no target": (["nowhere"], "does not exist"),
    "depth": (["--depth", 0], "--depth must be at least 1, not 0"),
    "too short": (["--sequence-length", 10], "at least 16"),
    "too long": (["--sequence-length", 4000], "beyond the target's 128 positions"),
    "too many layers": (["--layers", 9], "--init random"),
    "too wide": (["--hidden-size", 999], "--init random"),
    "heads": (["--num-heads", 3, "--num-kv-heads", 2], "no multiple"),
    "vocabulary": (["--draft-vocab-size", 9999], "more than the target's 4096"),
    "on policy": (["--on-policy", 2], "0…1"),
    "eagle on policy": (["--kind", "eagle3", "--on-policy", 0.5], "drop --on-policy"),
    "rate": (["--learning-rate", 0], "--learning-rate"),
    "divergence": (["--divergence", "js"], "js"),
    "gpu": (["--device", "cuda"], "drop --device cuda"),
    "no text": (["--text", "empty.txt"], "no text in it"),
    "text nowhere": (["--text", "none.txt"], "does not exist"),
    "text of bytes": (["--text", "bytes.txt"], "not UTF-8"),
    "text of bad lines": (["--text", "bad.jsonl"], "bad.jsonl:1"),
    "little text": (["--text", "short.txt"], "too few"),
    "nothing to resume": (["--resume"], "drop --resume"),
    "foreign draft": (["--init", "foreign"], "another tokenizer"),
    "no draft": (["--init", "folder"], "is empty"),
    "damaged draft": (["--init", "damaged"], "does not fit its config.json"),
    "in the way": (["--out", "short.txt"], "not a folder"),
    "not ours": (["--out", "damaged", "--force"], "not a draft that specbuild made"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(
    name: str,
    specbuild: Callable[..., Outcome],
    make_checkpoint: Callable[..., Path],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[name]
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "folder").mkdir()
    if name == "foreign draft":
        folder = make_checkpoint(tmp_path / "foreign")
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        swapped = list(vocabulary)[10:12]
        vocabulary[swapped[0]], vocabulary[swapped[1]] = vocabulary[swapped[1]], vocabulary[swapped[0]]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if "damaged" in arguments:
        folder = make_checkpoint(tmp_path / "damaged")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    before = sorted(path.name for path in tmp_path.iterdir())
    target = [] if name == "no target" else [tiny]
    defaults = [each for each in ("--out", "draft") if "--out" not in arguments]
    small = FEW if name != "too long" else ()
    small = FEW[:4] if "--text" in arguments else small
    outcome = specbuild("distill", *target, *small, *defaults, *arguments)
    assert message in outcome.refusal()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
