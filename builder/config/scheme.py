"""How a weight is stored and computed with, written `KIND[:OPTION,…][/DTYPE]`, as in `int4:64,asym`, `fp8:tensor/bf16`.

| kind | weights | options, the default first |
| --- | --- | --- |
| fp32, fp16, bf16 | as they are | |
| int8 | 8 bits | columns of a block; sym, asym; rtn, gptq; activations |
| int4 | 4 bits | columns of a block; asym or sym; gptq, rtn, awq; activations |
| fp8 | E4M3 | the rows that share a scale: channel, tensor |
| keep | a GGUF file's own blocks, which are not rounded again | activations: wide or dynamic |

Activations: `wide`, rounded to 16 bits by block and row when they are computed; `dynamic`, to 8 bits; `weight-only`,
not rounded; `static`, rounded by one calibrated scale, after SmoothQuant. DTYPE: the type of everything that is not
quantized. If a checkpoint's weights lie on a grid already, that grid is used in place of rtn, gptq and awq: see
`quantize.grids`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from specbuild.runtime.bundle.backend import BACKENDS, FLOATS, Backend
from specbuild.runtime.bundle.memory_plan import item_bytes
from specbuild.runtime.errors import OptionError, shown

BLOCKS = (128, 64, 32, 16)
LEAST_GPU_BLOCK = 32
STEP = 256  # columns that share a step, of which scales and offsets are multiples
METHODS = ("rtn", "gptq", "awq")
ACTIVATIONS = ("wide", "dynamic", "weight-only", "static")
KEEP = "keep"
KEPT_ACTIVATIONS = "wide", "dynamic"
BITS = {KEEP: 32, "fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "fp8": 8, "int6": 6, "int5": 5, "int4": 4}


@dataclass(frozen=True, slots=True)
class Scheme:
    """The scheme of one weight.

    Attributes:
        kind: The type of its numbers, a key of BITS.
        dtype: The type of everything that is not quantized.
        block: How many columns share a scale; 0: a whole row.
        symmetric: Whether zero is the middle of the range.
        method: How weights are rounded, one of METHODS.
        activations: How inputs are rounded, one of ACTIVATIONS.
        per_tensor: Whether all rows share one scale.
        scale_bits: Bits of a block's scale on a CPU; of 8 bits, scales are multiples of a step for 256 columns.
    """

    kind: str
    dtype: str
    block: int = 0
    symmetric: bool = True
    method: str = "rtn"
    activations: str = "weight-only"
    per_tensor: bool = False
    scale_bits: int = 32

    @property
    def bits(self) -> int:
        """Bits of one number of the weight."""
        return BITS[self.kind]

    @property
    def quantized(self) -> bool:
        """Return whether the build quantizes the weight."""
        return self.kind not in (*FLOATS, KEEP)

    @property
    def calibrated(self) -> bool:
        """Return whether the quantized weight depends on statistics of the layers' inputs."""
        return self.method != "rtn" or self.activations == "static"

    @property
    def to_nearest(self) -> Scheme:
        """The scheme without what needs texts: weights are rounded to nearest, inputs when they are computed."""
        activations = "dynamic" if self.activations == "static" else self.activations
        return replace(self, method="rtn", activations=activations, per_tensor=False)

    def row_bytes(self, columns: int, offsets: bool = False) -> int:
        """Return the bytes of a row of so many columns, with its scales, zero points or offsets, and steps."""
        if not self.quantized:
            return item_bytes(self.dtype) * columns
        blocks = ceil(columns / (self.block or columns))
        scale = min(self.scale_bits, 8 * item_bytes(self.dtype))
        zero_point = 8 if self.bits < 8 else 32
        minimum = 0
        if not self.symmetric:
            minimum = scale if offsets else zero_point
        steps = (1 + offsets) * ceil(columns / STEP) if scale == 8 else 0
        return (columns * self.bits + blocks * (scale + minimum)) // 8 + 4 * steps

    def __str__(self) -> str:
        if not self.quantized:
            return self.kind if self.activations != "dynamic" else f"{self.kind}:{self.activations}"
        spans = str(self.block) if self.block else "channel"
        how = ["tensor" if self.per_tensor else spans]
        if self.kind != "fp8":
            how += ["sym" if self.symmetric else "asym", self.method, self.activations]
        return f"{self.kind}:{','.join(how)}" + ("" if self.dtype == "fp32" else f"/{self.dtype}")


def parse(text: str, backend: str) -> Scheme:
    """Parse a scheme, with the backend's defaults for what it leaves out; raise OptionError for a wrong one."""
    on, kinds, dtypes = BACKENDS[backend], BACKENDS[backend].precisions, BACKENDS[backend].dtypes
    words, slash, dtype = text.partition("/")
    kind, colon, options = words.partition(":")
    if kind not in kinds:
        whole = ", or of a whole model auto, best:size, best:speed, best:kl" if kind.lower() in ("auto", "best") else ""
        raise OptionError(f"backend {backend} has no precision {shown(kind)}: use {', '.join(kinds)}{whole}")
    if kind in (*FLOATS, KEEP):
        rounds = kind == KEEP and not on.on_gpu
        if rounds and options in KEPT_ACTIVATIONS and not slash:
            return Scheme(kind, dtypes[0], activations=options)
        if options or slash or colon:
            takes = f"the options {' or '.join(KEPT_ACTIVATIONS)}" if rounds else "no options"
            raise OptionError(f"{shown(text)}: {kind} takes {takes}")
        return Scheme(kind, dtypes[0] if kind == KEEP else kind, activations="wide" if rounds else "weight-only")
    if slash and dtype not in dtypes:
        raise OptionError(f"{shown(text)}: {backend} computes in {', '.join(dtypes)}, not in {dtype!r}")
    if colon and not options:
        raise OptionError(f"{shown(text)}: no option follows the colon, {_HELP}")
    scheme = _DEFAULTS[kind, on.blocks]
    if on.on_gpu and scheme.activations == "wide":
        scheme = replace(scheme, activations="weight-only")
    chosen = list[str]()
    for option in options.split(",") if options else ():
        twice = next((kind for kind in _KINDS_OF_OPTIONS if option in kind and not kind.isdisjoint(chosen)), None)
        if twice or (option.isdigit() and any(each.isdigit() for each in chosen)):
            raise OptionError(f"{shown(text)}: {option} contradicts an option before it: give one of them")
        if option.isascii() and option.isdigit() and len(option) < 9:
            scheme = replace(scheme, block=int(option))
        elif option in ("channel", "tensor"):
            scheme = replace(scheme, block=0, per_tensor=option == "tensor")
        elif option in ("sym", "asym"):
            scheme = replace(scheme, symmetric=option == "sym")
        elif option in METHODS:
            scheme = replace(scheme, method=option)
        elif option in ACTIVATIONS:
            scheme = replace(scheme, activations=option)
        else:
            raise OptionError(f"{shown(text)}: unknown option {shown(option)}, {_HELP}")
        chosen.append(option)
    if scheme.activations == "static" and kind == "int8":
        given = [option for option in chosen if option not in ("static", "channel", "sym", "rtn")]
        if given:
            raise OptionError(
                f"{shown(text)}: static INT8 has a scale for each row, symmetric, rounded: drop {given[0]}"
            )
        scheme = replace(scheme, block=0)
    scheme = replace(scheme, dtype=dtype or dtypes[0])
    if reason := _unsupported(scheme, on):
        raise OptionError(f"{shown(text)}: {reason}")
    return scheme


def _unsupported(scheme: Scheme, backend: Backend) -> str | None:
    """Return why a backend cannot compute with a scheme, None if it can."""
    kind, block = scheme.kind, scheme.block
    if kind == "fp8":
        plain = scheme.symmetric and scheme.method == "rtn" and scheme.activations == "static" and not block
        return None if plain else "FP8 takes channel or tensor alone"
    if not block and scheme.method != "rtn":
        return f"{scheme.method} is for weights in blocks"
    if scheme.per_tensor:
        return "only FP8 has one scale for a tensor"
    if block not in (0, *BLOCKS):
        return f"a block has {', '.join(map(str, BLOCKS))} columns, not {block}"
    if kind == "int4" and (not block or scheme.activations == "static"):
        return "INT4 is in blocks, its activations weight-only, dynamic or wide"
    if backend.blocks and backend.on_gpu:
        if scheme.activations != "weight-only":
            return "a GPU's blocks are multiplied with inputs that are not rounded: use weight-only"
        return None if block >= LEAST_GPU_BLOCK else f"use blocks of {LEAST_GPU_BLOCK} columns or more"
    if backend.blocks:
        static = scheme.activations == "static"
        return "INT8 for this backend is in blocks: use static for channels" if not block and not static else None
    if scheme.activations in ("dynamic", "wide") or not scheme.symmetric:
        return "TensorRT takes symmetric weights, with activations weight-only or static"
    if kind == "int4" and block < LEAST_GPU_BLOCK:
        return f"TensorRT's INT4 has blocks of {LEAST_GPU_BLOCK} columns or more"
    return "TensorRT's INT8 has a scale for each row: use channel" if kind == "int8" and block else None


_KINDS_OF_OPTIONS = {"channel", "tensor"}, {"sym", "asym"}, set(METHODS), set(ACTIVATIONS)
_HELP = f"use a block of {', '.join(map(str, BLOCKS))}, channel, tensor, sym, asym, {', '.join(METHODS + ACTIVATIONS)}"
_DEFAULTS = {  # by kind, and whether specbuild's own products compute with it
    ("int8", True): Scheme("int8", "fp32", 32, activations="wide", scale_bits=16),
    ("int8", False): Scheme("int8", "fp16"),
    ("int4", True): Scheme("int4", "fp32", 32, symmetric=False, method="gptq", activations="wide", scale_bits=16),
    ("int4", False): Scheme("int4", "fp16", 128, method="gptq"),
    ("fp8", False): Scheme("fp8", "fp16", activations="static"),
}
