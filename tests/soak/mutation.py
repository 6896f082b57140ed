"""Mutate drawn lines of the decode core, one at a time, and count the mutants that the tests kill.

PYTHONPATH=. python tests/soak/mutation.py --out benchmarks/results/mutation.json [--lines 200] [--seed 0] [--tier fast]

Lines are drawn among those that a test of `--tests` runs; a mutant is killed if one of the tests that run its line
fails or hangs. Cosmic Ray (`pip install '.[mutation]'`) changes the file in place and puts it back.
"""

import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from coverage import Coverage

from benchmarks.common import ROOT, machine, parser, save

FOLDERS = ("runtime/speculation", "runtime/sampling", "runtime/decoding")
SECONDS = 300  # a mutant whose tests take longer hangs
MOST_TESTS = 40  # for a mutant: the functions that run the fewest lines, which test its line most closely


def main():
    """Draw, mutate and write what survived."""
    asked = parser(__doc__, None)
    asked.add_argument("--lines", type=int, default=200)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--tests", default="tests/runtime", help="a folder or file")
    asked.add_argument("--tier", action="append", help="of the tests; may be repeated (default: fast and slow)")
    options = asked.parse_args()
    os.chdir(ROOT)
    if subprocess.run(["git", "diff", "--quiet", "--", *FOLDERS]).returncode:
        raise SystemExit("commit or stash the changes in the folders to mutate: their files are changed in place")
    pytest = [sys.executable, "-m", "pytest", *(f"--tier={tier}" for tier in options.tier or ("fast", "slow"))]
    tests = tests_of_lines([*pytest, options.tests])
    drawn = draw(tests, options.lines, random.Random(options.seed))
    outcomes = Counter()
    by_folder = {folder: Counter() for folder in FOLDERS}
    survivors = []
    for mutant in drawn:
        path, line = str(mutant.module_path), mutant.start_pos[0]
        command = [*pytest, "-x", "-p", "no:cacheprovider", *tests[path, line]]
        outcome = mutate_and_test([mutant], shlex.join(command), SECONDS).test_outcome
        name = outcome.value if outcome else "none"
        outcomes[name] += 1
        by_folder[next(folder for folder in FOLDERS if path.startswith(folder))][name] += 1
        if name == "survived":
            survivors.append(f"{path}:{line} {mutant.operator_name} {mutant.occurrence}")
        print(sum(outcomes.values()), name, f"{path}:{line}", mutant.operator_name, flush=True)
    result = {
        "command": shlex.join(["python", "tests/soak/mutation.py", *sys.argv[1:]]),
        "machine": machine(),
        "outcomes": outcomes,
        "by_folder": by_folder,
        "survivors": survivors,
    }
    save(options.out, result)
    return 0


def tests_of_lines(pytest):
    """Run the tests once under coverage; return, for each line that a test runs, the tests to run for its mutants."""
    with tempfile.TemporaryDirectory() as folder:
        data, settings = Path(folder) / "data", Path(folder) / "rc"
        settings.write_text(f"[run]\ndynamic_context = test_function\ndata_file = {data}\n")
        measured = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
        measured.append("--include=" + ",".join(f"{ROOT / each}/*" for each in FOLDERS))
        if subprocess.run([*measured, *pytest[1:]]).returncode:
            raise SystemExit("a test fails without a mutant: mend it first, for it would kill every mutant")
        coverage = Coverage(data_file=data)
        coverage.load()
        return closest(coverage.get_data())


def closest(data):
    """Return the tests of each line, those first that run the fewest lines in all."""
    names = {context: test for context in data.measured_contexts() if (test := test_of(context))}
    found = {}
    sizes = Counter()
    for file in data.measured_files():
        path = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            if tests := sorted({names[each] for each in contexts if each in names}):
                found[path, line] = tests
                sizes.update(tests)
    return {line: sorted(tests, key=lambda test: (sizes[test], test))[:MOST_TESTS] for line, tests in found.items()}


def test_of(context):
    """Return pytest's name for a context of coverage such as `tests.runtime.test_a.test_b`."""
    module, _, function = context.rpartition(".")
    path = Path(*module.split(".")).with_suffix(".py") if module else None
    return f"{path}::{function}" if path and path.exists() else None


def draw(tests, count, chance):
    """Yield a mutant of each of so many drawn lines, of those that tests run and an operator can change."""
    by_line = {}
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/mutants.sqlite") as mutants:
        init([Path(path) for path in sorted({path for path, _ in tests})], mutants, {})
        for item in mutants.work_items:
            [mutant] = item.mutations
            if (line := (str(mutant.module_path), mutant.start_pos[0])) in tests:
                by_line.setdefault(line, []).append(mutant)
    for line in chance.sample(sorted(by_line), min(count, len(by_line))):
        yield chance.choice(by_line[line])


if __name__ == "__main__":
    sys.exit(main())
