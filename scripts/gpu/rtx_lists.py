"""Check whether TensorRT-RTX lists this machine's GPU: python scripts/gpu/rtx_lists.py OUT.json

The exit status is 0 if it does, 3 if it does not, and 1 if that cannot be determined.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from flavours import Driver


def main() -> int:
    """Query the driver and TensorRT-RTX, and write the answers; return the exit status."""
    said: dict[str, object] = {}
    try:
        said["gpu"] = Driver().capability
        trt = importlib.import_module("tensorrt_rtx")
        said["version"] = str(trt.__version__)
        members = trt.ComputeCapability.__members__
        said["lists"] = sorted(name[2:] for name in members if name.startswith("SM"))
        said["listed"] = said["gpu"] in said["lists"]
    except (ImportError, OSError, RuntimeError) as error:
        said["reason"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[1]).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(said))
    if "reason" in said:
        return 1
    return 0 if said["listed"] else 3


if __name__ == "__main__":
    sys.exit(main())
