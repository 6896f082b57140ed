"""`specbuild build`: what it prints, and every input it refuses in one line, leaving nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from specbuild.runtime import Bundle, TreeSpec

Command = Callable[..., Any]
ENTRY = [sys.executable, "-c", "from specbuild.cli import main; main()"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The output's parent."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, hidden or not."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A damage done to the tensors."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **fields)


def written(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return damage


def removed(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * share))

    return damage


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def pickled(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def set_nan(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"][1, 2] = float("nan")


def other_model(kind: str, **fields: Any) -> Callable[[Path], None]:
    """Another architecture in the folder."""

    def damage(folder: Path) -> None:
        import transformers

        configuration = getattr(transformers, f"{kind}Config")(**fields, bos_token_id=0, eos_token_id=0)
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            (folder / name).unlink()
        factory = transformers.AutoModelForSeq2SeqLM if kind == "T5" else transformers.AutoModelForCausalLM
        factory.from_config(configuration).save_pretrained(folder)

    return damage


INDEX = "model.safetensors.index.json"
T5 = {"vocab_size": 4096, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
BLOOM = {"vocab_size": 4096, "hidden_size": 16, "n_layer": 1, "n_head": 2}
SMALL = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA4 = SMALL | HEADS | {"intermediate_size_mlp": 16, "num_local_experts": 1, "attention_chunk_size": 8}
GPT_OSS = SMALL | HEADS | {"num_local_experts": 2, "num_experts_per_tok": 1}
MAMBA = {"vocab_size": 4096, "hidden_size": 16, "num_hidden_layers": 1}
BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "missing folder": (shutil.rmtree, ["does not exist", "give"]),
    "empty folder": (emptied, ["is empty", "give"]),
    "no config.json": (removed("config.json"), ["config.json"]),
    "broken config.json": (written("config.json", '{"a":'), ["config.json", "download"]),
    "config.json is a list": (written("config.json", "[]"), ["config.json", "download"]),
    "config.json is empty": (written("config.json", "{}"), ["config.json", "model_type"]),
    "field of the wrong type": (config(hidden_size="wide"), ["config.json", "hidden_size"]),
    "field that is null": (config(max_position_embeddings=None), ["config.json", "max_position_embeddings"]),
    "no heads": (config(num_attention_heads=0), ["config.json"]),
    "no positions": (config(max_position_embeddings=0), ["config.json", "max_position_embeddings"]),
    "unknown activation": (config(hidden_act="wobble"), ["wobble"]),
    "unknown rope type": (config(rope_parameters={"rope_type": "coil", "rope_theta": 1e4}), ["coil"]),
    "unknown architecture": (config(model_type="nonesuch"), ["nonesuch"]),
    "code of its own": (config(model_type="nonesuch", auto_map={"AutoConfig": "x.Y"}), ["code of its own"]),
    "broken generation_config.json": (written("generation_config.json", "{"), ["generation_config.json", "download"]),
    "eos of the wrong type": (written("generation_config.json", '{"eos_token_id": "x"}'), ["eos_token_id"]),
    "truncated weights": (cut("model.safetensors", 0.5), ["model.safetensors", "download"]),
    "barely truncated weights": (cut("model.safetensors", 0.9999), ["model.safetensors", "download"]),
    "empty weights": (cut("model.safetensors", 0), ["model.safetensors", "download"]),
    "NaN": (weights(set_nan), ["NaN", "model.layers.0.self_attn.q_proj.weight"]),
    "missing weight": (weights(lambda tensors: tensors.pop("model.norm.weight")), ["missing", "model.norm.weight"]),
    "more layers than weights": (config(num_hidden_layers=2), ["config.json", "model.layers.1."]),
    "fewer layers than weights": (config(num_hidden_layers=0), ["config.json"]),
    "weights of another width": (config(intermediate_size=64), ["config.json", "mlp."]),
    "weights of another vocabulary": (config(vocab_size=4097), ["config.json", "vocab_size", "4096"]),
    "no weights": (removed("model.safetensors"), ["model.safetensors"]),
    "pickled weights only": (pickled, ["safetensors"]),
    "index without its files": (written(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), ["b.safetensors"]),
    "broken index": (written(INDEX, "{"), [INDEX, "download"]),
    "index with a list": (written(INDEX, '{"weight_map": ["a"]}'), [INDEX]),
    "index with numbers": (written(INDEX, '{"weight_map": {"a": 1}}'), [INDEX]),
    "index that leaves": (written(INDEX, '{"weight_map": {"a": "../b.safetensors"}}'), [INDEX]),
    "no tokenizer": (removed("tokenizer.json", "tokenizer_config.json"), ["tokenizer.json"]),
    "no tokenizer.json": (removed("tokenizer.json"), ["tokenizer.json"]),
    "broken tokenizer": (cut("tokenizer.json", 0.3), ["tokenizer"]),
    "encoder-decoder": (other_model("T5", **T5), ["t5", "decoder-only"]),
    "ALiBi": (other_model("Bloom", **BLOOM), ["BloomForCausalLM", "attention interface"]),
    "no attention": (other_model("Mamba", **MAMBA), ["MambaForCausalLM", "attention interface"]),
    "images too": (config(model_type="gemma3"), ["'gemma3'", "language model alone"]),
    "chunks": (other_model("Llama4Text", **LLAMA4), ["'llama4_text'", "chunked_attention"]),
    "sinks": (other_model("GptOss", **GPT_OSS), ["GptOssForCausalLM", "s_aux"]),
    "looks ahead": (config(is_causal=False), ["looks ahead"]),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(specbuild: Command, checkpoint: Path, place: Path, name: str) -> None:
    damage, words = BAD_CHECKPOINTS[name]
    damage(checkpoint)
    line = specbuild("build", "--target", checkpoint, "-o", place / "b").refusal()
    assert [word for word in words if word not in line] == [], line
    assert snapshot(place) == {}


def test_a_missing_folder_that_could_be_a_hub_id(
    specbuild: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    line = specbuild("build", "--target", "engines/nonesuch", "-o", place / "b").refusal()
    assert "engines/nonesuch" in line
    assert snapshot(place) == {}


def test_a_file_for_a_folder(specbuild: Command, tiny: Path, place: Path) -> None:
    line = specbuild("build", "--target", tiny / "config.json", "-o", place / "b").refusal()
    assert "is a file" in line


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_a_bad_draft_is_refused(specbuild: Command, tiny: Path, checkpoint: Path, place: Path) -> None:
    weights(set_nan)(checkpoint)
    line = specbuild("build", "--target", tiny, "--draft", checkpoint, "-o", place / "b").refusal()
    assert str(checkpoint) in line
    assert snapshot(place) == {}


def test_a_tokenizer_with_more_tokens_than_the_model(
    specbuild: Command, make_checkpoint: Command, tmp_path: Path, place: Path
) -> None:
    small = make_checkpoint(tmp_path / "small", num_hidden_layers=1, vocab_size=1000)
    line = specbuild("build", "--target", small, "-o", place / "b").refusal()
    assert "1000" in line
    assert "4096" in line
    assert snapshot(place) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bogus"], ["--bogus"]),
        (["--tree", "bush:3"], ["bush:3", "chain:K"]),
        (["--tree", "chain:64"], ["chain:64", "63"]),
        (["--precision", "fp7"], ["fp7", "fp32"]),
        (["--draft-precision", "fp7"], ["fp7", "int8"]),
        (["--draft-precision", "int8"], ["--draft-precision", "--draft"]),
        (["--backend", "abacus"], ["abacus", "onnxruntime"]),
        (["--kv-cache-dtype", "fp16"], ["fp16", "'auto', 'fp8'"]),
        *(
            ([*backend, "--kv-cache-dtype", "fp8", *dry], ["FP8", "use --backend tensorrt", "or drop --kv-cache-dtype"])
            for dry in ([], ["--dry-run"])
            for backend in ([], ["--backend", "onnxruntime-cuda"], ["--backend", "tensorrt", "--attention", "native"])
        ),
        (
            ["--backend", "tensorrt", "--kv-cache-dtype", "fp8", "--precision", "fp32", "--dry-run"],
            ["computes in 16 bits: use fp16 or bf16"],
        ),
        (["--tune", "--backend", "onnxruntime-cuda"], ["are tuned where they run", "drop --tune"]),
        (["--block-size", "many"], ["many", "--block-size"]),
        (["--backend", "tensorrt", "--block-size", "24"], ["block-size must be 16, 32, 64, 128, 256 rows", "24"]),
        *(
            ([*backend, "--block-size", "16", "--dry-run"], ["paged caches", "--backend tensorrt", "drop --block-size"])
            for backend in ([], ["--backend", "tensorrt-rtx"], ["--backend", "tensorrt", "--attention", "native"])
        ),
        (["--max-seq-len", "129"], ["129", "128"]),
        (["--max-seq-len", "1"], ["max-seq-len", "2"]),
        (["--max-seq-len", "many"], ["many", "max-seq-len"]),
        (["--max-batch-size", "0"], ["max-batch-size", "1…64"]),
        (["--max-batch-size", "-3"], ["max-batch-size", "-3"]),
        (["--max-batch-size", "65"], ["max-batch-size", "65"]),
        (["extra"], ["extra"]),
    ],
)
def test_a_bad_option_is_refused(
    specbuild: Command, tiny: Path, place: Path, arguments: list[str], words: list[str]
) -> None:
    line = specbuild("build", "--target", tiny, "-o", place / "b", *arguments).refusal()
    assert [word for word in words if word not in line] == [], line
    assert snapshot(place) == {}


@pytest.mark.parametrize(("arguments", "missing"), [(["-o", "b"], "--target"), (["--target", "t"], "--output")])
def test_an_option_that_lacks(specbuild: Command, arguments: list[str], missing: str) -> None:
    assert missing in specbuild("build", *arguments).refusal()


def test_an_output_that_exists(specbuild: Command, tiny: Path, tiny_bundle: Path, place: Path) -> None:
    shutil.copytree(tiny_bundle, place / "b")
    before = snapshot(place)
    line = specbuild("build", "--target", tiny, "-o", place / "b").refusal()
    assert "exists" in line
    assert "--force" in line
    assert snapshot(place) == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_an_output_that_is_a_file(specbuild: Command, tiny: Path, place: Path, force: list[str]) -> None:
    (place / "b").write_text("mine")
    line = specbuild("build", "--target", tiny, "-o", place / "b", *force).refusal()
    assert "not a folder" in line
    assert snapshot(place) == {"b": b"mine"}


def test_force_spares_what_is_no_bundle(specbuild: Command, tiny: Path, place: Path) -> None:
    (place / "b").mkdir()
    (place / "b" / "thesis.tex").write_text("mine")
    line = specbuild("build", "--target", tiny, "-o", place / "b", "--force").refusal()
    assert "not a bundle" in line
    assert snapshot(place) == {"b": None, "b/thesis.tex": b"mine"}


@pytest.mark.parametrize("output", ["/proc/nope", "/sys/nope", "/proc/nope/deeper", "."])
def test_an_output_that_cannot_be_made(specbuild: Command, tiny: Path, output: str) -> None:
    line = specbuild("build", "--target", tiny, "-o", output).refusal()
    assert output in line
    assert "give" in line


@pytest.mark.parametrize("length", [250, 300])
def test_an_output_whose_name_is_too_long(specbuild: Command, tiny: Path, place: Path, length: int) -> None:
    line = specbuild("build", "--target", tiny, "-o", place / ("x" * length)).refusal()
    assert "too long" in line
    assert snapshot(place) == {}


def test_an_output_under_a_file(specbuild: Command, tiny: Path, place: Path) -> None:
    (place / "file").write_text("mine")
    line = specbuild("build", "--target", tiny, "-o", place / "file" / "b").refusal()
    assert str(place / "file" / "b") in line
    assert snapshot(place) == {"file": b"mine"}


def test_a_failed_rebuild_keeps_the_older_bundle(
    specbuild: Command, tiny_bundle: Path, checkpoint: Path, place: Path
) -> None:
    shutil.copytree(tiny_bundle, place / "b")
    before = snapshot(place)
    weights(set_nan)(checkpoint)
    assert "NaN" in specbuild("build", "--target", checkpoint, "-o", place / "b", "--force").refusal()
    assert snapshot(place) == before


def test_too_little_space_is_known_before(
    specbuild: Command, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    line = specbuild("build", "--target", tiny, "-o", place / "new" / "b").refusal()
    assert "free" in line
    assert snapshot(place) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_a_disk_that_fills_up(specbuild: Command, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, *arguments: Any, **options: Any) -> int:
        if self.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", full)
    line = specbuild("build", "--target", tiny, "-o", place / "b", "--max-batch-size", 1).refusal()
    assert "full" in line
    assert str(place / "b") in line
    assert snapshot(place) == {}


@pytest.fixture
def small_disk(place: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("128k")`: a disk of this size, where this machine lets us mount one."""

    def mount(size: str) -> Path:
        options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        try:
            done = subprocess.run(options, capture_output=True, check=False)
        except OSError:
            pytest.skip("no mount here")
        if done.returncode:
            pytest.skip("this machine lets us mount no tmpfs")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("size", ["128k", "1200k"])  # full at the weights, full at the tokenizer
def test_a_full_disk(
    specbuild: Command,
    tiny: Path,
    small_disk: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    usage, disk = namedtuple("usage", "total used free"), small_disk(size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 40))
    line = specbuild("build", "--target", tiny, "-o", disk / "b", "--max-batch-size", 1).refusal()
    assert "full" in line
    assert str(disk / "b") in line
    assert snapshot(disk) == {}


@pytest.mark.soak(only=("15", "1"))
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(pair: Path, tiny_bundle: Path, place: Path, number: int) -> None:
    shutil.copytree(tiny_bundle, place / "b")
    before = snapshot(place)
    command = [*ENTRY, "build", "--target", str(pair / "target"), "-o", str(place / "b"), "--force", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(place.iterdir())) < 2 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)  # somewhere in the export
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (1, "")
    assert [line for line in err.splitlines() if line] == ["specbuild: interrupted: nothing half-done was left behind"]
    assert snapshot(place) == before


def test_an_early_interrupt(pair: Path, place: Path) -> None:
    command = [*ENTRY, "build", "--target", str(pair / "target"), "-o", str(place / "b")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert "specbuild: interrupted" in err
    assert snapshot(place) == {}


@pytest.mark.slow
def test_a_refusal_in_a_process_of_its_own(checkpoint: Path, place: Path) -> None:
    weights(set_nan)(checkpoint)
    command = [*ENTRY, "build", "--target", str(checkpoint), "-o", str(place / "b"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "NaN" in done.stderr
    assert snapshot(place) == {}


def test_without_the_build_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; from specbuild.cli import main; main()"
    command = [sys.executable, "-c", code, "build", "--target", "t", "-o", "b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "torch" in done.stderr
    assert "specbuild-trt[build]" in done.stderr


def test_a_bug_is_one_line_with_status_1(
    specbuild: Command, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbuild.builder import compiled_model

    def broken(*_: Any) -> None:
        raise AssertionError("surprise\nin two lines")

    monkeypatch.setattr(compiled_model, "export", broken)
    outcome = specbuild("build", "--target", tiny, "-o", place / "b")
    assert (outcome.status, outcome.out) == (1, "")
    (line,) = outcome.err.splitlines()
    assert "AssertionError: surprise in two lines" in line
    assert snapshot(place) == {}


@pytest.mark.slow
def test_the_report(specbuild: Command, tiny: Path, place: Path) -> None:
    arguments = ["--target", tiny, "--max-seq-len", 2, "--max-batch-size", 1, "--tree", "chain:2"]
    outcome = specbuild("build", *arguments, "-o", place / "new" / "b", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert report.pop("bundle") == str(place / "new" / "b")
    assert report == json.loads((place / "new" / "b" / "report.json").read_text(encoding="utf-8"))
    manifest = json.loads((place / "new" / "b" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["max_seq_len"], manifest["max_batch_size"], manifest["default_tree"]) == (2, 1, "chain:2")
    assert [path.name for path in (place / "new").iterdir()] == ["b"]
    assert specbuild("generate", place / "new" / "b", "-p", "x").status == 0


@pytest.mark.usefixtures("quick_export")
def test_the_summary(specbuild: Command, tiny: Path, tiny_bundle: Path, place: Path) -> None:
    shutil.copytree(tiny_bundle, place / "b")
    outcome = specbuild("build", "--target", tiny, "-o", place / "b", "--max-batch-size", 1, "--no-tune", "--force")
    assert (outcome.status, outcome.err) == (0, "")
    assert str(place / "b") in outcome.out
    assert "tokens equal" in outcome.out
    assert "plain decoding, measured" not in outcome.out
    assert [path.name for path in place.iterdir()] == ["b"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_a_build_is_tuned(specbuild: Command, tiny: Path, place: Path) -> None:
    """Of a pair whose draft is its target: what is shown of it, and what `auto` is from then on."""
    pair = "--target", tiny, "--draft", tiny, "--max-seq-len", 64, "--max-batch-size", 2, "--buckets", "1,2,32"
    outcome = specbuild("build", *pair, "-o", place / "b")
    assert (outcome.status, outcome.err) == (0, "")
    report = json.loads((place / "b" / "report.json").read_text(encoding="utf-8"))["tuning"]
    assert [tree["tree"] for tree in report["trees"]] == [f"best:{nodes}" for nodes in (1, 2, 4, 8, 16, 31)]
    accepted = [tree["accepted"] for tree in report["trees"]]
    assert 0.95 < accepted[0] <= 1 < accepted[-1]
    shown = f"auto {report['auto']:.2f}× plain decoding, measured; {report['tree']} of the draft model"
    assert shown in outcome.out
    assert shown in specbuild("inspect", place / "b").out
    timings = json.loads((place / "b" / "timings.json").read_text(encoding="utf-8"))
    assert list(timings["times"]) == ["1", "2"]
    assert TreeSpec.parse(timings["widest"]).nodes in (8, 16, 31)
    answer = json.loads(specbuild("generate", place / "b", "-p", "a b", "-n", 8, "--json").out)
    assert answer["metrics"]["speculation"] == "auto"
    assert [path.name for path in place.iterdir()] == ["b"]


@pytest.mark.usefixtures("quick_export")
def test_a_build_whose_tuning_is_interrupted_leaves_nothing(
    specbuild: Command, tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbuild.measure.tuning import tune

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "measure", interrupted)
    assert "interrupted" in specbuild("build", "--target", tiny, "-o", place / "b").refusal(1)
    assert snapshot(place) == {}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that TensorRT would have compiled on a machine with a GPU."""
    from specbuild.builder import pipeline
    from specbuild.builder.codegen import emit
    from specbuild.builder.codegen.tensorrt import Engine

    graphs: list[Any] = []

    def compile_engine(file: Path, *_: Any) -> Engine:
        graphs.append(onnx.load(file))
        return Engine(b"plan", "10.15", [])

    monkeypatch.setattr(pipeline, "check_machine", lambda *_: None)
    monkeypatch.setattr(pipeline, "unrunnable", lambda *_: "no GPU here")
    monkeypatch.setattr(emit, "built_on", lambda backend: ("89",))
    monkeypatch.setattr(emit, "compile_engine", compile_engine)
    return graphs


@pytest.fixture
def for_tensorrt(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[Any]]:
    """`for_tensorrt(line)`: the options of a build from a recipe with this line, of a pair for `--backend tensorrt`."""
    monkeypatch.setenv("COLUMNS", "300")
    for name, layers in (("target", 2), ("draft", 1)):
        make_checkpoint(tmp_path / name, num_hidden_layers=layers, head_dim=64, initializer_range=0.3)

    def options(line: str) -> list[Any]:
        recipe = tmp_path / "r.toml"
        recipe.write_text(f'target = "target"\ndraft = "draft"\nbackend = "tensorrt"\n{line}\n')
        return ["--recipe", recipe, "--max-seq-len", 64, "--cuda-arch", "none"]

    return options


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_fp8_caches(specbuild: Command, tmp_path: Path, compiled: list[Any], for_tensorrt: Command) -> None:
    """From a recipe: in the graphs, the manifest, the report, the memory, the bound, and what is shown of them."""
    options = for_tensorrt('kv-cache-dtype = "fp8"')
    plan = json.loads(specbuild("build", *options, "-o", tmp_path / "x", "--dry-run", "--json").out)
    assert plan["kv_cache_dtype"] == "fp8"
    told = specbuild("build", *options, "-o", tmp_path / "fp8")
    assert (told.status, told.err) == (0, "")
    assert re.search(r"  FP8 caches alone, in float32: \S+ nats a token to Hugging Face, \S+ at most\n", told.out)
    own = specbuild("build", *options, "-o", tmp_path / "own", "--kv-cache-dtype", "auto")
    assert "FP8" not in own.out
    for graph in compiled[:2]:
        types = {value.name: value.type.tensor_type.elem_type for value in graph.graph.input}
        assert types["past_key.0"] == types["past_value.0"] == onnx.TensorProto.FLOAT8E4M3FN
    manifests = [Bundle.open(tmp_path / name).manifest for name in ("fp8", "own")]
    assert [{e.kv_cache_dtype for e in manifest.engines.values()} for manifest in manifests] == [{"fp8"}, {"auto"}]
    assert manifests[0].exactness_bound > 1.5 * manifests[1].exactness_bound
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("fp8", "own")]
    assert reports[1]["fp8_caches"] is None
    halves = [report["memory"]["caches_per_sequence"] for report in reports]
    assert 2 * halves[0] == halves[1]
    found = reports[0]["fp8_caches"]
    assert 0 < found["kl_nats_per_token"] < found["largest_kl_nats"]
    for graph, (name, layers) in zip(compiled, (("target", 2), ("draft", 1)), strict=False):
        constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}
        for kind in ("key", "value"):
            scales = [constants[f"{kind}_scale.{layer}"].tolist() for layer in range(layers)]
            assert scales == found["scales"][name][kind]
    assert "TensorRT 10.15, sm_89, plugin attention over fp8 caches" in specbuild("inspect", tmp_path / "fp8").out
    assert "over" not in specbuild("inspect", tmp_path / "own").out


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_paged_caches(specbuild: Command, tmp_path: Path, compiled: list[Any], for_tensorrt: Command) -> None:
    """From a recipe: in the graphs, the profiles, the manifest, the memory, and what is shown of them."""
    options = [*for_tensorrt("block-size = 16"), "--max-batch-size", 2]
    plan = json.loads(specbuild("build", *options, "-o", tmp_path / "x", "--dry-run", "--json").out)
    assert plan["block_size"] == 16
    assert {tuple(sizes["pages"]) for sizes in plan["profiles"].values()} == {(1, 17, 17)}
    for name, more in (("paged", []), ("linear", ["--block-size", 0])):
        told = specbuild("build", *options, *more, "-o", tmp_path / name)
        assert (told.status, told.err) == (0, "")
    shapes = [
        {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.graph.input}
        for graph in compiled
    ]
    assert [each.get("page_table") for each in shapes] == [["batch", 8], ["batch", 8], None, None]
    assert [each["past_key.0"][0] for each in shapes] == ["pages", "pages", "batch", "batch"]
    assert [each["past_value.0"][2] for each in shapes] == [16, 16, 128, 128]
    paged, linear = (Bundle.open(tmp_path / name).manifest for name in ("paged", "linear"))
    assert [{e.block_size for e in manifest.engines.values()} for manifest in (paged, linear)] == [{16}, {0}]
    assert all(p["pages"] == [1, 17, 17] for e in paged.engines.values() for p in e.profiles.values())
    assert not any("pages" in p for e in linear.engines.values() for p in e.profiles.values())
    assert [model.inputs.get("page_table") for model in paged.models.values()] == ["page_table"] * 2
    assert "page_table" not in linear.models["target"].inputs
    assert "plugin attention, in pages of 16 rows" in specbuild("inspect", tmp_path / "paged").out
    assert "pages" not in specbuild("inspect", tmp_path / "linear").out
