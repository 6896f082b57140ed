"""Write what travels of a bundle of a known shape: all but its weights, which make_weights.py makes where it runs.

python scripts/gpu/make_shape.py OUT --like llama-3.1-8b|qwen2.5-coder-1.5b|smollm2-135m|CONFIG.json
    [--precision fp16|bf16|int8|int4] [--max-seq-len N] [--max-batch-size N] [--arch 90]

The graphs, the kernels and the manifest are a build's for `onnxruntime-cuda`; no weight is read or made, so an 8B takes
no more memory or disk than a toy. The tokenizer is the reference pair's: tokens past its vocabulary have no text.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, Qwen2Config

from specbuild.builder.build_context import BuildContext, Stages
from specbuild.builder.bundle_writer import make_manifest, save_kernels, save_tokenizer, write_manifest
from specbuild.builder.codegen.emit import Emitted, lowering, products_of
from specbuild.builder.codegen.nvrtc import Product, Shape
from specbuild.builder.codegen.parts import WEIGHTS, save_parts
from specbuild.builder.compiled_model import CompiledModel
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.checkpoint import Checkpoint
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.lazy_weights import skeleton
from specbuild.builder.frontend.quiet import quiet
from specbuild.builder.passes import run_portable
from specbuild.builder.prepare import Sources
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.numbers import RoundedWeight, fit
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.bundle.manifest import ModelRecord
from specbuild.runtime.errors import OptionError, SpecbuildError, one_line

TOKENIZER = Path(__file__).resolve().parents[2] / "engines" / "pycode" / "target"
LIKE = {
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    ),
    "qwen2.5-coder-1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}


def blocks_of(net: torch.nn.Module, build: BuildConfig) -> dict[str, RoundedWeight]:
    """Return the weights that a build of this precision has in blocks, by name; they have a form, and no numbers."""
    names, found = Names.of(net), dict[str, RoundedWeight]()
    schemes = assign(build.quantize, "target", build.precision_of("target"), build.backend, names)
    for name, asked in schemes.items():
        weight = net.get_submodule(name).weight
        scheme = fit(asked.to_nearest, weight.shape[1])
        if scheme.quantized:
            found[name] = RoundedWeight(name, weight, scheme)
    return found


@dataclass(frozen=True)
class Hole:
    """A weight without numbers, whose place in the file stays empty."""

    name: str

    def tofile(self, file: BinaryIO) -> None:
        """Write nothing."""


def config_of(like: str) -> Any:
    """Return the configuration that --like names; raise OptionError for one that cannot be used."""
    if like in LIKE:
        return LIKE[like]
    try:
        return AutoConfig.from_pretrained(like, local_files_only=True)
    except Exception as error:  # transformers raises many unrelated types
        raise OptionError(f"--like {like}: use {', '.join(LIKE)}, or a config.json ({one_line(error)})") from None


def source_of(name: str, config: Any, build: BuildConfig) -> Sources:
    """Return the build's source: a checkpoint without weight files."""
    length = build.max_seq_len or config.max_position_embeddings
    if length > config.max_position_embeddings:
        raise OptionError(f"--max-seq-len {length} is beyond the shape's {config.max_position_embeddings} positions")
    net, layout = skeleton(config, "eager"), probe(config, length)
    checkpoint = Checkpoint(
        source=f"the shape of {name}",
        folder=TOKENIZER,
        config=config,
        weights=[],
        parameters=net.num_parameters(),
        tensors=None,
        tokenizer=AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True),
        ends=(),
        stamps=[],
    )
    dtype = build.dtype_of("target").upper().replace("FP", "F")
    shapes = [Shape(layout.caches[0].key, dtype, dtype)]
    return Sources(checkpoint, None, None, None, length, {"target": layout}, {}, shapes, 0, 0)


def save_graphs(context: BuildContext) -> tuple[ModelRecord, frozenset[Product]]:
    """Write the target's graphs and its file of parts; return its record, and the kernels of its products."""
    build, source, layout = context.config, context.source.target, context.source.layouts["target"]
    net, positions, precision = skeleton(source.config, "eager"), context.source.max_seq_len, build.dtype_of("target")
    graph = export(net, layout, positions, context.capacity)
    run_portable(graph)
    if blocks := blocks_of(net, build):
        Quantize(blocks, Names.of(net))(graph)
    lowered = lowering(build).lower(graph, precision, context.capacity, None, 0)
    for value in lowered.graph.initializers.values():
        if (value.dtype.is_floating_point() or value.dtype == ir.DataType.UINT8) and value.shape:
            hole = ir.LazyTensor(lambda name=value.name: Hole(name), value.dtype, value.shape, name=value.name)
            value.const_value = hole
    (context.folder / "target").mkdir()
    file = save_parts(context.folder, "target", lowered)
    (context.folder / "target" / WEIGHTS).unlink()
    record = ModelRecord(
        source=source.source,
        source_sha256=source.sha256(),
        architecture=type(net).__name__,
        parameters=source.parameters,
        precision=f"{build.precision}/{precision}" if blocks else precision,
        **layout.record,
        vocab_size=source.vocab_size,
        capacity=context.capacity,
        max_positions=source.max_positions,
        graphs={str(build.max_batch_size): file},
        inputs=lowering(build).INPUTS,
        outputs=lowering(build).OUTPUTS,
    )
    return record, products_of(lowered, build, "target")


@quiet()
def write(name: str, build: BuildConfig) -> None:
    """Write the bundle without weights at `build.output`."""
    config = config_of(name)
    source = source_of(Path(name).parent.name if name not in LIKE else name, config, build)

    def check() -> None:
        check_output(build.output, build.force)

    check()
    with staging(build.output, 1 << 24, check) as folder:
        context = BuildContext(build, folder, source, Stages(lambda stage: None, lambda phase, share: None))
        record, products = save_graphs(context)
        kernels = save_kernels(context, sorted(products, key=str))
        model = CompiledModel("target", record, Emitted(record.graphs, {}), {}, {}, {})
        template = save_tokenizer(folder, source.target.tokenizer)
        write_manifest(folder, make_manifest(context, {"target": model}, kernels, build.descriptor.bound, template))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--like", required=True, metavar="SHAPE")
    parser.add_argument("--precision", choices=("fp16", "bf16", "int8", "int4"), default="fp16")
    parser.add_argument("--max-seq-len", type=int, help="by default all of the shape's positions")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--arch", default="90", help="the GPU's compute capability")
    given = parser.parse_args(arguments)
    try:
        build = BuildConfig(
            target=given.like,
            output=given.out,
            backend="onnxruntime-cuda",
            precision=given.precision,
            max_seq_len=given.max_seq_len,
            max_batch_size=given.max_batch_size,
            cuda_arch=(given.arch,),
        )
        write(given.like, build)
    except SpecbuildError as error:
        print(f"make_shape: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in given.out.rglob("*") if path.is_file())
    print(f"{given.out}: {size / 2**20:.1f} MiB without weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
