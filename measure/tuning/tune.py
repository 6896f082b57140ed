"""Tuning: measure on this machine and on real texts, and write the cost table into the bundle."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.runtime import Bundle
from specbuild.runtime.bundle.atomic_output import staging
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST, REPORT
from specbuild.runtime.speculation.timings import FILE

from .measure import Progress, Tuning, measure, untunable

SECONDS = 20.0  # for the prompts of a build's own tuning


def tune(folder: Path, asked: Tuning, progress: Progress = lambda stage: None) -> dict[str, Any]:
    """Measure a bundle that runs on this CPU, write its cost table into it, and return what was found.

    Raises OptionError for a bundle that cannot be tuned, and whatever loading it raises; the bundle is then as it was.
    """
    costs, report = measure(folder, asked, progress)
    progress("writing")
    _write(Bundle.open(folder), costs, report)
    return report


def tune_build(folder: Path) -> dict[str, Any] | None:
    """Tune a bundle that is being built: its cost table is put beside its models, and what was found returned.

    None for a bundle that cannot be tuned.
    """
    if untunable(Bundle.open(folder).manifest):
        return None
    costs, report = measure(folder, Tuning(seconds=SECONDS))
    (folder / FILE).write_text(_json(costs), encoding="utf-8")
    return report


def _write(bundle: Bundle, costs: dict[str, Any], report: dict[str, Any]) -> None:
    """The bundle with the cost table and the report in it, in place of what it was; other files are not copied."""
    build = json.loads(bundle.path(REPORT).read_text(encoding="utf-8"))
    contents = {FILE: costs, REPORT: build | {"tuning": report}}
    texts = {name: _json(content) for name, content in contents.items()}
    folder = bundle.folder.resolve()
    with staging(folder, sum(map(len, texts.values()))) as new:
        for name in bundle.manifest.files.keys() - texts.keys():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            _link(bundle.path(name), new / name)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        records = {name: file_record(new / name) for name in texts}
        manifest = replace(bundle.manifest, files=dict(sorted((bundle.manifest.files | records).items())))
        (new / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _link(file: Path, to: Path) -> None:
    """The same file under another name, or a copy where the file system has no such names."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copy2(file, to)
