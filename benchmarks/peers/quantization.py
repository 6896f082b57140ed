"""Compare specbuild's quantization with NVIDIA ModelOpt's: same weights, same calibration texts, divergence of each.

python -m benchmarks.peers.quantization [--target CHECKPOINT] [--only SCHEME …] [--out FILE]

It needs `pip install nvidia-modelopt` beside specbuild. The target is the reference pair's by default. Everything is
simulated in float32 in PyTorch; head and embedding are not quantized. The divergence is KL(float32 ‖ quantized) per
token of held-out text.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import modelopt
import modelopt.torch.quantization as mtq
import torch

from benchmarks.common import OUT, PAIR, machine, parser, save
from specbuild.builder.config.scheme import parse as scheme_of
from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize import texts
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names, no_grad, simulated
from specbuild.builder.quantize.quality import Before, moved

BACKEND = "tensorrt-rtx"  # its weights are symmetric, like ModelOpt's


def _int4(block: int, algorithm: Any) -> dict[str, Any]:
    config = copy.deepcopy(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG)
    for entry in config["quant_cfg"]:
        if "block_sizes" in (entry.get("cfg") or {}):
            entry["cfg"]["block_sizes"] = {-1: block, "type": "static"}
    return config | {"algorithm": algorithm}


PAIRS = {  # specbuild's schemes, and the ModelOpt configurations that mean the same
    "int4:128,gptq": lambda: _int4(128, {"method": "gptq"}),
    "int4:128,awq": lambda: _int4(128, "awq_lite"),
    "int4:128,rtn": lambda: _int4(128, "max"),
    "int4:32,gptq": lambda: _int4(32, {"method": "gptq"}),
    "int4:32,awq": lambda: _int4(32, "awq_lite"),
    "int4:32,rtn": lambda: _int4(32, "max"),
    "int8:static": lambda: copy.deepcopy(mtq.INT8_SMOOTHQUANT_CFG),
    "fp8:tensor": lambda: copy.deepcopy(mtq.FP8_DEFAULT_CFG),
}


def main() -> None:
    """Measure and save."""
    options = parser(__doc__, OUT / "modelopt.json")
    options.add_argument("--target", default=str(PAIR / "target"))
    options.add_argument("--only", nargs="+", choices=PAIRS, default=list(PAIRS))
    given = options.parse_args()
    found = checkpoint.find(given.target)
    model = checkpoint.load(found, "eager")
    drawn = texts.read(None, found.tokenizer, found.max_positions, 64, 0)
    before, names = Before.of(model, drawn.held_out, [], found.max_positions), Names.of(model)
    inner = [name for name in names.weights if name not in (names.head, names.embedding)]

    def cost(other: Any) -> dict[str, float]:
        with no_grad(other):
            after = moved(before, lambda text: text_logits(other, text))
        return {"kl_nats_per_token": after["kl_nats_per_token"], "top1_agreement": after["top1_agreement"]}

    def ours(scheme: str) -> dict[str, float]:
        started = time.perf_counter()
        numbers = calibrate(model, dict.fromkeys(inner, scheme_of(scheme, BACKEND)), drawn.calibration)
        seconds = time.perf_counter() - started
        with simulated(model, numbers):
            return cost(model) | {"seconds": seconds}

    def theirs(config: Callable[[], dict[str, Any]]) -> dict[str, float]:
        other, started = copy.deepcopy(model), time.perf_counter()

        def run(each: Any) -> None:
            with no_grad(each):
                for text in drawn.calibration:
                    each(input_ids=torch.tensor([text]), use_cache=False)

        with redirect_stdout(io.StringIO()):
            mtq.quantize(other, config(), run)
        seconds = time.perf_counter() - started
        return cost(other) | {"seconds": seconds}

    rows = {scheme: {"specbuild": ours(scheme), "modelopt": theirs(PAIRS[scheme])} for scheme in given.only}
    about = {"machine": machine(), "modelopt": modelopt.__version__, "texts": drawn.to_dict()}
    print(save(given.out, about | {"precisions": rows}))


if __name__ == "__main__":
    main()
