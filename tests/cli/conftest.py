"""Fixtures of the command line's tests: the command in this process, and a small bundle with a chat template."""

from __future__ import annotations

import io
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit status, and what it wrote."""

    status: int
    out: str
    err: str

    def refusal(self, status: int = 2) -> str:
        """The one line on stderr of a command that was refused."""
        assert (self.status, self.out) == (status, ""), self
        lines = [line for line in self.err.splitlines() if line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("specbuild: "), lines
        assert "a bug in specbuild" not in lines[0], lines
        return lines[0]


@pytest.fixture
def specbuild(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`specbuild("generate", …, stdin=b"")` runs the command in this process."""
    from specbuild.cli import main, progress

    monkeypatch.setattr(progress, "INTERVAL", 3600.0)  # what is said of a slow machine is not the command's

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["specbuild", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        hook = sys.unraisablehook
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as stop:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook
        code = stop.value.code
        assert isinstance(code, int)
        return Outcome(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that builds fast, with a chat template; read it, do not change it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)
    logging.getLogger("torch.__trace").propagate = False  # thousands of records that pytest would keep
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory, build_shared: Callable[..., object]) -> Path:
    """A small bundle without a draft; read it, do not change it."""
    path = tmp_path_factory.mktemp("bundles") / "tiny.bundle"
    build_shared(target=str(tiny), output=path, max_seq_len=64, max_batch_size=1)
    return path
