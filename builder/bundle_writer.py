"""What a bundle holds beside its models: manifest.json, the tokenizer's files, kernels, and the memory plan."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION, KernelRecord, Manifest

from .build_state import BuildState
from .codegen import nvrtc
from .config.build_config import BuildConfig

TOKENIZER, CHAT_TEMPLATE, KERNELS = "tokenizer.json", "chat_template.jinja", "kernels"
LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")


def save_tokenizer(work: BuildState) -> str | None:
    """tokenizer.json as `transformers` uses it, and the chat template where there is one."""
    tokenizer = work.source.target.tokenizer
    (work.folder / TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    (work.folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return CHAT_TEMPLATE


def write_manifest(work: BuildState, template: str | None) -> Manifest:
    """The manifest of what lies in the folder; files are hashed the first time they are seen."""
    config, tokenizer = work.config, work.source.target.tokenizer
    names = [p.relative_to(work.folder).as_posix() for p in sorted(work.folder.rglob("*")) if p.is_file()]
    work.files |= {n: file_record(work.folder / n) for n in names if n != MANIFEST and n not in work.files}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specbuild_version=version("specbuild-trt"),
        libraries={name: version(name) for name in LIBRARIES},
        backend=config.backend,
        precision=work.models["target"].precision,
        exactness_bound=work.bound,
        max_seq_len=work.source.max_seq_len,
        max_batch_size=config.max_batch_size,
        buckets=list(config.buckets),
        default_tree=config.tree,
        eos_token_ids=work.source.target.eos_token_ids(),
        special_tokens=special,
        tokenizer=TOKENIZER,
        chat_template=template,
        models=work.models,
        files=work.files,
        kernels=work.kernels,
        engines=work.engines,
    )
    (work.folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def memory_plans(manifest: Manifest, config: BuildConfig) -> dict[str, Any]:
    """Bytes by what takes them when the bundle runs: for one text of the full length, and by batch and length."""
    one, longest = memory_plan.plan(manifest, 1), manifest.max_seq_len
    lengths = sorted({length for length in (longest // 4, longest // 2, longest) if length})
    plans = [memory_plan.plan(manifest, batch, length).to_dict() for batch in config.batch_sizes for length in lengths]
    return {"weights": one.weights, "caches_per_sequence": one.caches, "plans": plans}


def save_kernels(work: BuildState) -> None:
    """A cubin per source, shape and architecture."""
    sources = None if work.source.shapes else nvrtc.sources(nvrtc.GLUE)
    cubins = nvrtc.compile_kernels(work.config.architectures, work.source.shapes, sources)
    for cubin in cubins:
        file = f"{KERNELS}/{cubin.name}.cubin"
        (work.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (work.folder / file).write_bytes(cubin.image)
        work.kernels[file] = KernelRecord(cubin.architecture, sorted(cubin.kernels))
    work.kernel_report = nvrtc.report(cubins)
