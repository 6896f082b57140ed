"""Tuning: measures a bundle on this machine with real texts and writes the timing table into the bundle."""

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
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.speculation.timing_table import FILE

from .measure import Progress, Tuning, measure, unseen, untunable

OF_A_BUILD = Tuning(seconds=6.0, new_tokens=48)  # shorter than `specbuild tune`


def tune(folder: Path, asked: Tuning, progress: Progress = unseen) -> dict[str, Any]:
    """Measure a bundle on this machine, write its timing table and report into it, and return the report.

    The arguments are those of `measure`. If it raises, or loading the bundle does, the bundle is unchanged.
    """
    bundle = Bundle.open(folder)
    build = decode(bundle.read(REPORT, JSON_BYTES))
    timings, report = measure(folder, asked, progress)
    progress("writing", 0, 0)
    _write(bundle, build | {"tuning": report}, timings)
    return report


def tune_build(folder: Path, progress: Progress = unseen) -> dict[str, Any] | None:
    """Tune a bundle that is being built: write its timing table beside its models and return the report.

    Return None if the bundle cannot be tuned.
    """
    if untunable(Bundle.open(folder).manifest):
        return None
    timings, report = measure(folder, OF_A_BUILD, progress)
    (folder / FILE).write_text(_json(timings), encoding="utf-8")
    return report


def _write(bundle: Bundle, report: dict[str, Any], timings: dict[str, Any]) -> None:
    """Replace the bundle by one with the timing table and the report in it; other files are linked, not copied."""
    texts = {FILE: _json(timings), REPORT: _json(report)}
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
    """Hard-link a file, or copy it if the file system does not support links."""
    try:
        os.link(file, to)
    except OSError:
        shutil.copy2(file, to)
