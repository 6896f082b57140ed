"""Keeps calibration results after a build is refused, so that the next try for the same output begins with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from specbuild.builder.config.build_config import BuildConfig
from specbuild.runtime.errors import ExecutionError

from .calibrate import CalibrationCache


@contextmanager
def calibration_folder(config: BuildConfig) -> Iterator[BuildConfig]:
    """Yield the configuration, with a folder beside the output for calibration results if none was given.

    A refused build (ExecutionError) keeps the folder, and the error names it; any other end of the build removes it.
    """
    if not config.quantizes or config.quantize.calibration_cache:
        yield config
        return
    folder = config.output.with_name(f".{config.output.name}.calibration")
    try:
        yield replace(config, quantize=replace(config.quantize, calibration_cache=folder))
    except ExecutionError as error:
        if not folder.is_dir():
            raise
        raise ExecutionError(f"{error} (what was calibrated is kept in {folder} for the next try)") from error
    except BaseException:
        _remove(folder)
        raise
    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove all calibration results in the folder, and the folder itself if nothing else is in it."""
    for numbers in CalibrationCache.all_in(folder):
        shutil.rmtree(numbers, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()
