"""The page of commands is what the commands say of themselves."""

from pathlib import Path

from specbuild.cli.application import cli

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date(import_script):
    written = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    page = import_script("release/command_page").page()
    assert written.split() == page.split(), "run python scripts/release/command_page.py"
    for name in cli.list_commands(cli.make_context("specbuild", [], resilient_parsing=True)):
        assert f"\n## {name}\n" in written
