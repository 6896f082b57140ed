"""Every command of the README and the docs runs, and every link in them leads somewhere."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbuild.cli.application import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def blocks(language):
    """Each page's, those of the docs slow: fast are the README's."""
    return [
        pytest.param(code, marks=[] if page == "README.md" else [pytest.mark.slow])
        for page in PAGES
        for kind, code in BLOCK.findall((ROOT / page).read_text())
        if kind == language
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, bundle):
    """A folder that looks like a clone after `make demo`."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("engines", "examples", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(bundle, folder / "pycode.bundle")  # which is tuned here, in place
    return folder


def shell_blocks():
    """Those that build, train, tune or measure are nightly; what the docs build, beside the README's, is the soak's."""
    builds = re.compile(r"^specbuild (build|distill|pair) ", re.MULTILINE)
    long = re.compile(r"^(specbuild (build|distill|pair|tune|bench|profile|verify) |time )", re.MULTILINE)
    readme = BLOCK.findall((ROOT / "README.md").read_text())

    def tier(script):
        if builds.search(script) and ("bash", script) not in readme:
            return [pytest.mark.soak]
        return [pytest.mark.nightly] if long.search(script) else []

    return [pytest.param(*each.values, marks=[*each.marks, *tier(each.values[0])]) for each in blocks("bash")]


@pytest.mark.parametrize("script", shell_blocks())
def test_shell_block_runs(script, workplace):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=workplace,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", blocks("python"))
def test_python_block_runs(script, workplace):
    done = subprocess.run([sys.executable, "-c", script], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in LINK.findall((ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def indented():
    """`specbuild …` commands of indented blocks, which no test runs: servers, other machines, hours."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", BLOCK.sub("", (ROOT / page).read_text()))
        for line in re.findall(r"^ {4,}(?:\w+=\S+ )*(specbuild [^\n]*)", text, re.MULTILINE):
            found.append((page, re.split(r" [|&>#]| {2,}", line)[0]))
    return found


@pytest.mark.parametrize(("page", "line"), indented())
def test_commands_that_are_not_run_are_parsed(page, line):
    _, name, *arguments = shlex.split(line)
    context = cli.make_context("specbuild", [], resilient_parsing=True)
    command = cli.get_command(context, name)
    assert command, f"{page}: {line}"
    own = command.context_class(command, info_name=name, parent=context, resilient_parsing=True)
    command.make_parser(own).parse_args(arguments)
