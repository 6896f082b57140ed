"""`specbuild` whose worker dies when the file that BREAK names is there: a bug of ours, planted."""

import os
from pathlib import Path

from specbuild.cli import main
from specbuild.runtime.engine.handle import Handle

sound = Handle.publish


def publish(self):
    if Path(os.environ["BREAK"]).exists():
        raise RuntimeError("planted")
    sound(self)


if __name__ == "__main__":
    Handle.publish = publish
    main()
