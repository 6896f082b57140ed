"""Make the weights of a bundle that make_shape.py wrote, from a seed, on the machine that is to run it.

python scripts/gpu/make_weights.py BUNDLE [--seed 0]

Products have normal numbers of 0.7 / √inputs, as Qwen2.5-Coder 1.5B has them (0.46 to 1.33), in blocks even ones of the
same spread, biases of 0.02, norms are 1, and rotary tables turn by powers of 10,000. Embeddings have 1: then the layers
add about as much as a token's own row brings, and the likeliest token after t is t where the head is the embedding,
else t + 1, whose row of the head is t's of the embedding. So a step's result is known. The file's hash is taken of the
bytes as they are written, and goes into the manifest, which says what the weights are; a bundle that has weights is
refused.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specbuild.builder.lower.panels import pack_codes, pack_factors
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import PARTS, PartsFile, ProductRecord, Weight
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST, FileRecord, Manifest
from specbuild.runtime.errors import BundleError, SpecbuildError

SPREAD, EMBEDDED, BIAS = 0.7, 1.0, 0.02
BASE = 10_000  # of the rotary angles
BLOCK = 1 << 22  # numbers that a thread draws at a time
EMBEDDINGS, HEAD = ("model.embed_tokens.weight", "lm_head.weight"), "lm_head.weight"


@dataclass(frozen=True)
class Drawing:
    """Draws a bundle's weights; `tables` are its rotary tables by name."""

    seed: int
    file: PartsFile
    heads: dict[str, NDArray] = field(default_factory=dict)  # codes and factors of a head, which are made together

    def blocks(self, name: str, weight: Weight, pool: ThreadPoolExecutor) -> Iterator[bytes]:
        """Yield the bytes of a weight in order."""
        products = [step for step in self.file.steps if isinstance(step, ProductRecord)]
        product = next((each for each in products if name in (each.codes, each.factors)), None)
        if product and product.codes.startswith(EMBEDDINGS):
            if name not in self.heads:
                self.heads.update(self._head(product, pool))
            yield self.heads.pop(name).tobytes()
            return
        if product:
            yield from self._in_blocks(product, name, weight)
            return
        cosines, sines = ({getattr(each, part) for each in self.file.attentions} for part in ("cos", "sin"))
        if name in cosines | sines:
            positions, half = weight.shape
            angles = np.outer(np.arange(positions), BASE ** -(np.arange(half) / half))
            yield (np.cos(angles) if name in cosines else np.sin(angles)).astype(np.float32).tobytes()
        elif "norm" in name:
            yield _rounded(np.ones(weight.shape, np.float32), weight.dtype).tobytes()
        elif (own := name.removesuffix(".T")) == HEAD and self._embedding != HEAD:
            rows, width = weight.shape if own == name else reversed(weight.shape)
            table = np.concatenate(list(self._drawn(self._embedding, rows * width, EMBEDDED, weight.dtype, pool)))
            turned = np.roll(table.reshape(rows, width), 1, axis=0)
            yield (turned if own == name else turned.T).tobytes()
        else:
            count, spread = math.prod(weight.shape), _spread(name, weight.shape)
            yield from map(np.ndarray.tobytes, self._drawn(name, count, spread, weight.dtype, pool))

    @property
    def _embedding(self) -> str:
        return next(name for name in EMBEDDINGS if name in self.file.weights)

    def _in_blocks(self, product: ProductRecord, name: str, weight: Weight) -> Iterator[bytes]:
        """Yield the bytes of a product's codes, any code as often as any other, or of its factors."""
        generator = np.random.default_rng([self.seed, *name.encode()])
        if name == product.codes:
            yield from (generator.bytes(weight.shape[1]) for _ in range(weight.shape[0]))
            return
        blocks, levels = product.inner // product.block, 1 << product.bits
        scale = SPREAD / math.sqrt(product.inner) / (levels / math.sqrt(12))
        shape = product.columns, blocks
        yield _factors(product, np.full(shape, scale, np.float32), np.full(shape, levels // 2)).tobytes()

    def _head(self, product: ProductRecord, pool: ThreadPoolExecutor) -> dict[str, NDArray]:
        """Return codes and factors of a head whose row after a token's is the token's of the embedding."""
        shape = product.columns, product.inner // product.block, product.block
        dtype = self.file.weights[self._embedding].dtype
        table = np.concatenate(list(self._drawn(self._embedding, math.prod(shape), EMBEDDED, dtype, pool)))
        tied = self._embedding == HEAD
        rows = np.roll(_floats(table, dtype).reshape(shape), 0 if tied else 1, axis=0)
        middle = 1 << product.bits - 1
        scales = (np.abs(rows).max(-1) / (middle - 1)).astype(np.float16).astype(np.float32)
        codes = np.clip(np.round(rows / scales[..., None]) + middle, 0, 2 * middle - 1).astype(np.uint8)
        packed = pack_codes(codes.reshape(product.columns, -1), product.bits)
        return {product.codes: packed, product.factors: _factors(product, scales, np.full(scales.shape, middle))}

    def _drawn(self, name: str, count: int, spread: float, dtype: str, pool: ThreadPoolExecutor) -> Iterator[NDArray]:
        """Yield `count` normal numbers in blocks, each of a generator of its own; a few are drawn ahead."""
        seeds = [self.seed, *name.encode()]

        def draw(index: int) -> NDArray:
            size, generator = min(BLOCK, count - index * BLOCK), np.random.default_rng([*seeds, index])
            return _rounded(generator.standard_normal(size, np.float32) * np.float32(spread), dtype)

        ahead, blocks = 2 * (os.cpu_count() or 1), -(-count // BLOCK)
        for first in range(0, blocks, ahead):
            yield from pool.map(draw, range(first, min(first + ahead, blocks)))


def _factors(product: ProductRecord, scales: NDArray, zeros: NDArray) -> NDArray:
    """Return scales and zero points, packed as a product's form has them."""
    types = {8: np.int8, 16: np.float16, 32: np.float32}
    factors = [scales.astype(types[product.scale_bits])]
    if product.minimum_bits:
        minima = zeros if product.minimum_bits == 8 else scales * zeros
        factors.append(minima.astype(types[product.minimum_bits]))
    return pack_factors(product.block, *factors)


def _floats(numbers: NDArray, dtype: str) -> NDArray[np.float32]:
    """Return numbers of a parts file's type in float32."""
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _spread(name: str, shape: Sequence[int]) -> float:
    """Return the standard deviation of a weight's numbers."""
    if name in EMBEDDINGS:
        return EMBEDDED
    if len(shape) < 2:
        return BIAS
    return SPREAD / math.sqrt(shape[0] if name.endswith(".T") else shape[-1])


def _rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray:
    """Return numbers in a parts file's type; bfloat16 as the upper halves, rounded."""
    if dtype == "bfloat16":
        return ((numbers.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    return numbers.astype(dtype)


def write(place: Path, drawing: Drawing, name: str) -> FileRecord:
    """Write a file of weights, and return its record."""
    weights = sorted((w.offset, each, w) for each, w in drawing.file.weights.items() if w.file == name)
    digest, written = hashlib.sha256(), 0
    partial = place / f"{name}.part"  # so that an interrupted run leaves no weights
    with partial.open("wb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        for offset, each, weight in weights:
            if offset != written:
                raise BundleError(f"{place / PARTS} leaves room before {each!r}: make the shape again")
            for block in drawing.blocks(each, weight, pool):
                digest.update(block)
                written += file.write(block)
    partial.rename(place / name)
    return FileRecord(written, digest.hexdigest())


def make(folder: Path, seed: int) -> Manifest:
    """Write the weights of a bundle's models, and their hashes into its manifest, which is returned.

    Raises:
        BundleError: The bundle has weights, or its models are not in parts.
    """
    bundle = Bundle.open(folder)
    manifest, models = bundle.manifest, dict(bundle.manifest.models)
    for model, record in models.items():
        graph = next(iter(record.graphs.values()))
        if not graph.endswith(PARTS):
            raise BundleError(f"{folder} has no models in parts: make it with make_shape.py")
        file = PartsFile.read(GraphFile.of(bundle, graph))
        place = folder / Path(graph).parent
        for name in {each.file for each in file.weights.values()}:
            path = f"{Path(graph).parent}/{Path(name).name}"
            if path in manifest.files or (folder / path).exists():
                raise BundleError(f"{folder / path} is there: only a bundle without weights gets made-up ones")
            written = write(place, Drawing(seed, file), Path(name).name)
            manifest = replace(manifest, files=manifest.files | {path: written})
        models[model] = replace(record, source=f"{record.source}, weights drawn by seed {seed}")
    manifest = replace(manifest, models=models)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        manifest = make(given.bundle, given.seed)
    except SpecbuildError as error:
        print(f"make_weights: {error}", file=sys.stderr)
        return 2
    size = sum(each.bytes for each in manifest.files.values())
    print(f"{given.bundle}: {size / 2**30:.2f} GiB, {manifest.models['target'].source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
