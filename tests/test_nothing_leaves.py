"""Nothing leaves the machine: no process connects to anybody, writes into the home folder or says that it could not."""

import ast
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "from specbuild.cli import main; main()"
FIRST_UPLOAD = 20.0  # seconds; ONNX Runtime's telemetry makes its first about ten after the start
LIBRARY = """
import sys
from {module} import Engine
with Engine.load(sys.argv[1]) as engine:
    assert engine.generate("def main(")[0].text
"""


@pytest.fixture
def proxy():
    """A proxy's address, and what was asked of it: whatever speaks HTTP connects to the proxy of its environment."""
    calls = []

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            with connection:
                calls.append(connection.recv(1024))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", calls
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def start(tmp_path, proxy):
    """`start(code, *arguments, **environment)`: Python in an empty home, where no variable tells it to be silent."""
    home = tmp_path / "home"
    home.mkdir()
    quiet = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "NO_PROXY", "no_proxy")
    inherited = {name: value for name, value in os.environ.items() if name not in quiet}
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY", "ALL_PROXY"), proxy[0])

    def run(code, *arguments, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=inherited | proxies | {"HOME": str(home)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield run
    assert (list(home.iterdir()), proxy[1]) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["specbuild", "specbuild.runtime.engine.engine"])
def test_a_program_of_the_library(start, bundle, module):
    program = start(LIBRARY.format(module=module), bundle)
    assert program.communicate() == ("", "")
    assert program.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("home", [{}, {"HOME": "/dev/null/none"}], ids=["an empty home", "no home"])
def test_generate(start, bundle, home):
    program = start(COMMAND, "generate", bundle, "-p", "def main(", "-n", "8", **home)
    text, complaints = program.communicate()
    assert (program.returncode, complaints) == (0, "")
    assert text


@pytest.mark.nightly
def test_build(start, make_checkpoint, tmp_path):
    target = make_checkpoint(tmp_path / "target", initializer_range=0.5)
    program = start(COMMAND, "build", "--target", target, "--max-seq-len", "64", "-o", tmp_path / "b")
    _, complaints = program.communicate()
    assert program.returncode == 0, complaints


@pytest.mark.nightly
def test_serve(start, bundle):
    """A server is watched until after the first upload: it lives long enough for many."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(COMMAND, "serve", bundle, "--port", port)
    try:
        began = time.monotonic()
        assert server.stderr
        assert any("serving at" in line for line in server.stderr)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=b'{"prompt": "def main(", "max_tokens": 4}',
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            assert response.status == 200
        time.sleep(FIRST_UPLOAD - (time.monotonic() - began))
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


@pytest.mark.parametrize(("choice", "value"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")], ids=["no", "yes"])
def test_who_wants_telemetry_has_it(start, choice, value):
    code = "import os, specbuild, subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"
    shown = "import os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert start(code.format(shown), **choice).communicate() == (f"{value}\n", "")


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "examples"])
def test_no_script_loads_onnx_runtime_before_specbuild(folder):
    """One that needs it imports it in a function: at the top of a file it would stand before specbuild."""
    for path in (ROOT / folder).rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        imports = {each.name for node in body if isinstance(node, ast.Import) for each in node.names}
        imports |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
        assert not {name for name in imports if name.partition(".")[0] == "onnxruntime"}, path
