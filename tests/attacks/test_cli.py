"""The command line under attack: output that nobody takes, streams that are closed, arguments that mean no good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from specbuild.cli import main; main()"]


def run(bundle, arguments, *shell, **streams):
    """The command in a process of its own; `{}` stands for the bundle."""
    command = [*shell, *COMMAND, *arguments.replace("{}", str(bundle)).split()]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT, **streams)


LIMIT = 60


@pytest.mark.slow(but=("False-inspect",))
@pytest.mark.parametrize(
    "arguments", ["inspect {} --json", "inspect {}", "generate {} -p import -n 64", "doctor", "--help"]
)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_goes_is_no_error(bundle, arguments, buffered):
    """As behind `| head`: the pipe breaks, at the latest when the interpreter flushes at its exit."""
    ours, theirs = os.pipe()
    os.close(ours)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    done = run(bundle, arguments, stdout=theirs, env=environment)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow(but=("--help",))
@pytest.mark.parametrize("arguments", ["inspect {}", "generate {} -p x -n 4", "--help"])
def test_a_full_disk_behind_standard_output_is_said(bundle, arguments):
    with Path("/dev/full").open("w") as full:
        done = run(bundle, arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "specbuild: standard output cannot be written (No space left on device)\n"


@pytest.mark.slow(but=("2>/dev/full-generate {}-2",))
@pytest.mark.parametrize(
    ("redirected", "arguments", "status"),
    [
        (">&-", "inspect {}", 0),
        (">&- 2>&- <&-", "generate {} -p x -n 4", 0),
        ("2>&-", "generate {}", 2),
        ("2>/dev/full", "generate {}", 2),
        ("<&-", "generate {} --prompts -", 2),
        ("2>/dev/full", "generate {} -p x -n 4 -t 3", 0),  # a warning that nobody can read stops nothing
    ],
)
def test_closed_and_full_streams(bundle, redirected, arguments, status):
    done = run(bundle, arguments, "sh", "-c", f'exec "$@" {redirected}', "sh", stdout=subprocess.PIPE)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """What is printed by a library would land in it."""
    code = f"""
from specbuild.cli.standard_streams import prepare
prepare()
print(open({str(tmp_path / "new")!r}, "w").fileno() > 2, file=open({str(tmp_path / "out")!r}, "w"))
"""
    subprocess.run(["sh", "-c", '"$0" -c "$1" >&- 2>&- <&-', sys.executable, code], timeout=LIMIT)
    assert (tmp_path / "out").read_text() == "True\n"


@pytest.fixture
def places(tmp_path):
    """Paths that are no bundles."""
    (tmp_path / "file").write_text("{}")
    os.mkfifo(tmp_path / "fifo")
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "manifest.json").write_text("{}")
    closed.chmod(0)
    names = ("file", "fifo", "missing", "a\nb", "a\udcffb", "closed")
    yield [*(str(tmp_path / name) for name in names), "", "/dev/zero", "x" * 5000]
    closed.chmod(0o755)


READERS = {name: [] for name in ("chat", "inspect", "verify", "tune", "profile", "bench")} | {"generate": ["-p", "x"]}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_bundle_is_refused_in_one_line(specbuild, places, name):
    for place in places:
        specbuild(name, place, *READERS[name]).refusal(2)


WRONG = {  # by command: flags with values
    "generate": """-n 0|-n -5|-n x|-n 1e3|-b 0|-b -1|-b HUGE|-t 0|-t -1|-t HUGE|--seed -1|--seed 18446744073709551616
|--seed nan|--temperature nan|--temperature inf|--temperature -1|--temperature 1e400|--top-p nan|--top-p 2|--top-p -0.1
|--top-p 0|--deadline nan|--deadline -1|--deadline 0|--tree best:0|--tree chain:99999999999999999999|--tree topk:-1,2
|--n 0|--n -1|--stop |--num-speculative-tokens-per-batch-size [|--num-speculative-tokens-per-batch-size {"a":1}""",
    "chat": "-n 0|--temperature nan|-t 0|--tree best:0",
    "verify": "-n 0|-b 0|-b HUGE|-t 0|--prompts ",
    "tune": "-n 0|-b 0|-b HUGE|-b LONG|-t 0|--num-prompts -1",
    "profile": "-n 0|-b 0|-b HUGE|-t 0|--context -1|--repeat 0",
    "bench": """-n 0|-n -5|--concurrency 0|--concurrency |--concurrency ,|--concurrency -1|--concurrency HUGE|-t 0
|-t HUGE|--concurrency LONG|--temperature nan|--temperature -1|--trees |--trees ,|--trees best:0|--trees chain:LONG
|-o /|-o /dev/full|-o /missing/x|-o |--html /|--html /dev/full|--prompts |--prompts /|--prompts /dev/null
|--prompts /missing""",
}


ROWS = [(name, each) for name, listed in WRONG.items() for each in listed.replace("\n", "").split("|")]


@pytest.mark.parametrize(("name", "arguments"), ROWS)
def test_what_is_out_of_range_is_refused_in_one_line(specbuild, bundle, name, arguments):
    flag, _, value = arguments.partition(" ")
    value = value.replace("HUGE", str(10**9)).replace("LONG", "1" * 5000)
    specbuild(name, bundle, *READERS[name], flag, value).refusal(2)


RECIPES = [
    *("a = " + "[" * 5000 + "]" * 5000, ".".join(["a"] * 5000) + " = 1", "max-seq-len = " + "9" * 5000, b"\xff\xfe"),
    *('target = "a\\u0000b"\noutput = "x"', "buckets = [[1], [2]]", "buckets = {a = 1}", "buckets = 1979-05-27"),
    *('target = "' + "x" * 100_000 + '"', "target = 7", "nonsense = 1", "max-kl = nan", ""),
    f"buckets = {list(range(100_000))}",
]


@pytest.mark.slow(only=("13",))
@pytest.mark.parametrize("place", range(len(RECIPES)))
def test_a_hostile_recipe_is_refused_in_one_line(specbuild, tmp_path, pair, place):
    path, content = tmp_path / "recipe.toml", RECIPES[place]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    named = "target" in str(content) or content in ("", "max-kl = nan")
    target = [] if named else ["--target", pair / "target"]
    specbuild("build", "--recipe", path, *target, "-o", tmp_path / "b", "--dry-run").refusal(2)
    assert [*tmp_path.iterdir()] == [path]
