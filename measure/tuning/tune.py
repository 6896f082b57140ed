"""Tuning: measure on this machine and on real texts, and write the timing table into the bundle."""

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
from specbuild.runtime.bundle.manifest import MANIFEST, REPORT, SCHEMA_VERSION
from specbuild.runtime.speculation.timings import FILE

from .measure import Progress, Tuning, measure, unseen, untunable

OF_A_BUILD = Tuning(seconds=6.0, new_tokens=48)  # it is short: `specbuild tune` takes its time


def tune(folder: Path, asked: Tuning, progress: Progress = unseen) -> dict[str, Any]:
    """Measure a bundle on this machine, write its timing table into it, and return what was found.

    Raises OptionError for a bundle that cannot be tuned, and whatever loading it raises; the bundle is then as it was.
    """
    timings, report = measure(folder, asked, progress)
    progress("writing", 0, 0)
    _write(Bundle.open(folder), timings, report)
    return report


def tune_build(folder: Path, progress: Progress = unseen) -> dict[str, Any] | None:
    """Tune a bundle that is being built: its timing table is put beside its models, and what was found returned.

    None for a bundle that cannot be tuned.
    """
    if untunable(Bundle.open(folder).manifest):
        return None
    timings, report = measure(folder, OF_A_BUILD, progress)
    (folder / FILE).write_text(_json(timings), encoding="utf-8")
    return report


def _write(bundle: Bundle, timings: dict[str, Any], report: dict[str, Any]) -> None:
    """The bundle with the timing table and the report in it, in place of what it was; other files are not copied."""
    build = json.loads(bundle.path(REPORT).read_text(encoding="utf-8"))
    contents = {FILE: timings, REPORT: build | {"tuning": report}}
    texts = {name: _json(content) for name, content in contents.items()}
    folder = bundle.folder.resolve()
    with staging(folder, sum(map(len, texts.values()))) as new:
        kept = bundle.manifest.files.keys() - texts.keys()
        for name in kept:
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            _link(bundle.path(name), new / name)
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        files = {name: bundle.manifest.files[name] for name in kept} | {name: file_record(new / name) for name in texts}
        manifest = replace(bundle.manifest, schema_version=SCHEMA_VERSION, files=dict(sorted(files.items())))
        (new / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _link(file: Path, to: Path) -> None:
    """The same file under another name, or a copy where the file system has no such names."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copy2(file, to)
