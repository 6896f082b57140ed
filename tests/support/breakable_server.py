"""`specbuild` whose worker dies when the file that BREAK names is there: a bug of ours, planted."""

import os
from pathlib import Path

from specbuild.cli import main
from specbuild.runtime.engine.driver import Driver

_sound = Driver._next


def _next(self):
    if self.active and Path(os.environ["BREAK"]).exists():
        raise RuntimeError("planted")
    return _sound(self)


if __name__ == "__main__":
    Driver._next = _next
    main()
