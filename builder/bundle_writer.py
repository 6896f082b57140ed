"""Writes the files of a bundle other than its models: manifest, tokenizer, sampling parameters and kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import GENERATION_CONFIG, MANIFEST, SCHEMA_VERSION, KernelRecord, Manifest

from .build_context import BuildContext
from .codegen import nvrtc
from .compiled_model import CompiledModel
from .config.build_config import BuildConfig

TOKENIZER, CHAT_TEMPLATE, KERNELS = "tokenizer.json", "chat_template.jinja", "kernels"
LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class Kernels:
    """A bundle's cubins, by file, and the report's entry on them; empty by default."""

    records: dict[str, KernelRecord] = field(default_factory=dict)
    report: dict[str, Any] | None = None


def save_kernels(context: BuildContext, products: Iterable[nvrtc.Product]) -> Kernels:
    """Compile the kernels for each architecture, with the models' attention and products, and write the cubins."""
    records = dict[str, KernelRecord]()
    cubins = nvrtc.compile_kernels(context.config.architectures, [*context.source.shapes, *products])
    for cubin in cubins:
        file = f"{KERNELS}/{cubin.name}.cubin"
        (context.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (context.folder / file).write_bytes(cubin.image)
        records[file] = KernelRecord(cubin.architecture, sorted(cubin.kernels))
    return Kernels(records, nvrtc.report(cubins))


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Write tokenizer.json as `transformers` uses it, and the chat template; return the template's file, if any."""
    (folder / TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return CHAT_TEMPLATE


def save_sampling(folder: Path, sampling: Mapping[str, float]) -> None:
    """Write the checkpoint's own sampling parameters, if it has any, to generation_config.json."""
    if sampling:
        (folder / GENERATION_CONFIG).write_text(json.dumps(dict(sampling)) + "\n", encoding="utf-8")


def make_manifest(
    context: BuildContext, models: Mapping[str, CompiledModel], kernels: Kernels, bound: float, template: str | None
) -> Manifest:
    """Return the bundle's manifest, without its list of files.

    Args:
        context: The build.
        models: The compiled target and draft, by name.
        kernels: The cubins.
        bound: The exactness bound, in logits.
        template: The chat template's file, None without one.
    """
    config, target = context.config, context.source.target
    special = {key: str(value) for key, value in target.tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        specbuild_version=version("specbuild-trt"),
        libraries={name: version(name) for name in LIBRARIES},
        backend=config.backend,
        precision=models["target"].record.precision,
        exactness_bound=bound,
        max_seq_len=context.source.max_seq_len,
        max_batch_size=config.max_batch_size,
        buckets=list(config.buckets),
        default_tree=config.tree,
        eos_token_ids=target.eos_token_ids(),
        special_tokens=special,
        tokenizer=TOKENIZER,
        chat_template=template,
        models={name: model.record for name, model in models.items()},
        files={},
        kernels=kernels.records,
        engines={file: record for model in models.values() for file, record in model.emitted.engines.items()},
    )


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with a record of every file in the folder, and return it.

    Files that it already lists are not hashed again, because no file is written twice.
    """
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
    new = {n: file_record(folder / n) for n in names if n != MANIFEST and n not in manifest.files}
    manifest = replace(manifest, files=manifest.files | new)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def memory_plans(manifest: Manifest, config: BuildConfig) -> dict[str, Any]:
    """Return the bytes that the bundle takes when it runs.

    "weights" and "caches_per_sequence" are for one sequence of the full length; "plans" has a plan for each batch size
    and a quarter, half and all of that length.
    """
    one, longest = memory_plan.plan(manifest, 1), manifest.max_seq_len
    lengths = sorted({length for length in (longest // 4, longest // 2, longest) if length})
    plans = [memory_plan.plan(manifest, batch, length).to_dict() for batch in config.batch_sizes for length in lengths]
    return {"weights": one.weights, "caches_per_sequence": one.caches, "plans": plans}
