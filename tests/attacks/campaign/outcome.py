"""What came of a case: it passed, it was refused as promised, or it is a finding."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from specbuild.runtime.errors import SpecbuildError

PASSED, REFUSED = "passed", "refused"
FINDINGS = ("crash", "hang", "memory", "raw", "wrong")
MAX_MESSAGE = 4000  # characters of an error's line
_PACKAGE = {"runtime", "measure", "serve", "builder", "cli", "face"}


class Fault(BaseException):
    """What a case found, of one of the kinds in `FINDINGS`."""

    def __init__(self, kind, detail):
        super().__init__(detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: PASSED, REFUSED or one of `FINDINGS`; `detail`: what to read first; `trace`: all that is known."""

    kind: str
    detail: str = ""
    trace: str = ""

    @property
    def found(self):
        """Whether it is a finding."""
        return self.kind in FINDINGS

    @property
    def signature(self):
        """Equal for findings that look like one fault: numbers and quoted parts left out, and where it was raised."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"|/\S+|0x[0-9a-f]+|\d+", "#", self.detail)
        return f"{self.kind}: {text[:80]} {self.where}"

    @property
    def where(self):
        """The innermost line of specbuild in the trace."""
        trace = self.trace[self.trace.rfind("Current thread") :] if "Current thread" in self.trace else self.trace
        lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
        ours = [(path, line) for path, line in lines if _is_ours(Path(path))]
        crash = self.kind in ("crash", "hang", "memory")  # of these the innermost call is the first
        path, line = (ours[0] if crash else ours[-1]) if ours else ("", "")
        return f"{'/'.join(Path(path).parts[-3:])}:{line}" if path else ""


def _is_ours(path):
    return bool(_PACKAGE & set(path.parts)) and "site-packages" not in path.parts and "tests" not in path.parts


def judge(error):
    """What an exception that left a case means."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, Fault):
        return Outcome(error.kind, error.detail, trace)
    if not isinstance(error, SpecbuildError):
        return Outcome("raw", f"{type(error).__name__}: {_start(error)}", trace)
    text = str(error)
    if not text.strip() or "\n" in text or len(text) > MAX_MESSAGE:
        said = f"{len(text.splitlines())} lines, {len(text)} characters"
        return Outcome("raw", f"{type(error).__name__} has {said}: {_start(error)}", trace)
    return Outcome(REFUSED, f"{type(error).__name__}: {text[:200]}")


def check_error(error):
    """Raise what a result carries as its error; nothing where it carries none."""
    if isinstance(error, BaseException):
        raise error
    if error is not None:
        raise Fault("raw", f"a result's error is {error!r:.80}")


def _start(error):
    return " ".join(str(error)[:400].split())[:200]
