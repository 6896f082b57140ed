"""Bundles that nobody built: manifests of small numbers, and folders with files that stand for their models."""

from dataclasses import replace

import pytest

from specbuild.runtime.bundle.bundle import Bundle, file_record
from specbuild.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION, Manifest, ModelRecord


def model_record(name, **fields):
    """A model of 2 layers and 50 tokens, with graphs of 1 and 2 sequences."""
    return ModelRecord(
        **{
            "source": name,
            "source_sha256": "0" * 64,
            "architecture": "LlamaForCausalLM",
            "parameters": 1000,
            "precision": "fp32",
            "layers": 2,
            "kv_heads": 3,
            "head_dim": 4,
            "windows": [0],
            "vocab_size": 50,
            "capacity": 72,
            "max_positions": 128,
            "graphs": {str(size): f"{name}/batch{size}.onnx" for size in (1, 2)},
            "inputs": {"tokens": "input_ids"},
            "outputs": {"logits": "logits"},
        }
        | fields
    )


@pytest.fixture(scope="session")
def manifest_of():
    """`manifest_of(target, draft, **fields)`: a manifest; of the models' records some fields, and no draft for None."""

    def make(target=None, draft=None, **fields):
        models = {"target": model_record("target", **target or {})}
        models |= {} if draft is None else {"draft": model_record("draft", **draft)}
        made = Manifest(
            schema_version=SCHEMA_VERSION,
            specbuild_version="0.1.0",
            libraries={"onnxruntime": "1.24.0"},
            backend="onnxruntime",
            precision="fp32",
            exactness_bound=1e-4,
            max_seq_len=64,
            max_batch_size=2,
            buckets=[1, 4, 8],
            default_tree="best:5",
            eos_token_ids=[0],
            special_tokens={},
            tokenizer="tokenizer.json",
            chat_template=None,
            models=models,
            files={},
        )
        return replace(made, **fields)

    return make


@pytest.fixture(scope="session")
def write_bundle():
    """`write_bundle(folder, manifest, contents)`: every file that is used, with `contents` or else its own name in it.

    `contents`: bytes by file, further files among them. The manifest has the right hash of each.
    """

    def write(folder, manifest, contents=None):
        records, given = manifest.models.values(), contents or {}
        names = {graph for record in records for graph in record.graphs.values()}
        names |= {record.tokens for record in records if record.tokens} | {manifest.tokenizer, *given}
        names |= {*manifest.engines, *manifest.kernels, *filter(None, [manifest.chat_template])}
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(given.get(name, name.encode()))
        listed = {name: file_record(folder / name) for name in sorted(names)}
        (folder / MANIFEST).write_text(replace(manifest, files=listed).to_json(), encoding="utf-8")
        return Bundle.open(folder)

    return write
