"""The runtime and `specbuild generate` stay lean: nothing heavy is imported, nothing but the base is needed."""

import shutil
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "specbuild.builder.pipeline")
BENCH = ["bench", "{}", "--num-prompts", "1", "-n", "4"]
REPORT = f"""
import sys
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
BLOCK = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY[:-1]!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_importing_the_runtime_brings_in_nothing_heavy():
    done = run("import specbuild.runtime" + REPORT)
    assert done.returncode == 0, done.stderr


def command(arguments):
    return f"""{BLOCK}
sys.argv = ["specbuild", *{arguments!r}]
from specbuild.cli import main
try:
    main()
except SystemExit as stop:
    status = stop.code
{REPORT}
sys.exit(status)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "{}", "-p", "x", "-n", "4"],
        ["inspect", "{}"],
        ["--help"],
        ["doctor"],
        pytest.param(["tune", "{}", "-n", "8"], marks=pytest.mark.nightly),
        BENCH,
    ],
)
def test_commands_work_with_the_base_dependencies_alone(bundle, tmp_path, arguments):
    copied = shutil.copytree(bundle, tmp_path / "b")
    done = run(command([a.replace("{}", str(copied)) for a in arguments]))
    assert done.returncode == 0, done.stderr


def test_build_without_its_dependencies_says_what_to_install():
    done = run(command(["build", "--target", "x", "-o", "y"]))
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
