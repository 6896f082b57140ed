"""`python -m campaign`: run by `make attack`, with tests/attacks on the path."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from . import report
from .attack import Bench
from .campaign import Campaign
from .classes import CLASSES
from .watch import UnpreparedError

ROOT = Path(__file__).resolve().parents[3]


def cases(text):
    """CLASS:NUMBER,CLASS:NUMBER."""
    parts = [part.rpartition(":") for part in text.split(",")]
    return [(name, int(number)) for name, _, number in parts]


def main(argv=None):
    """Run a campaign, or some of its cases again; exits with 1 for findings, with 2 where no case could be tried."""
    parser = argparse.ArgumentParser(prog="make attack", description=main.__doc__)
    parser.add_argument("--bundle", type=Path, default=ROOT / "pycode.bundle", help="A sound, tuned bundle.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="A fresh one by default.")
    parser.add_argument("--classes", default=",".join(CLASSES), help="Some of them, with commas.")
    parser.add_argument("--only", type=cases, metavar="CLASS:NUMBER,…", help="Cases to try again.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--findings", type=Path, default=ROOT / "build" / "attack", help="Where findings are kept.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write what was counted.")
    given = parser.parse_args(argv)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    given.findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="running-", dir=given.findings) as home:
        kept = given.findings / str(seed)
        progress = report.Progress(60 * given.minutes)
        bench = Bench(given.bundle.resolve(), Path(home))
        campaign = Campaign(bench, seed, kept, report.write, progress, given.workers)
        try:
            if given.only:
                campaign.replay(given.only)
            else:
                campaign.run(given.classes.split(","), 60 * given.minutes)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        except UnpreparedError as error:
            print(error, file=sys.stderr)
            return 2
        report.show(campaign, given.json)
    return int(bool(campaign.findings))


if __name__ == "__main__":
    sys.exit(main())
