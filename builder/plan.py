"""The plan of a build: what its models take at each precision, and what this machine has and lacks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.atomic_output import check_output
from specbuild.runtime.bundle.manifest import SCHEMA_VERSION, EngineRecord, FileRecord, Manifest, ModelRecord
from specbuild.runtime.errors import OptionError, OutputError, SpecbuildError

from .build_time import PROCESS, building_seconds, slowness
from .codegen.tensorrt import capacity_of, profiles_of
from .config.build_config import BuildConfig
from .frontend.gguf import Gguf
from .frontend.quiet import quiet
from .machine import lacks_to_build, lacks_to_run
from .prepare import Sources, disk_bytes, memory_limit, needs_of, prepare, with_own_draft
from .units import in_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes that a model takes at a precision.

    Attributes:
        bundle: Its weights in the bundle.
        build_memory: Memory to build it.
        build_memory_by_use: What that memory is used for at the peak.
        build_memory_required: How much there has to be: a mapped bundle may be read from disk again.
        build_scratch: Room in TMPDIR to build it.
        build_seconds: Time to build it; None if that is not known.
        run_memory: Memory to run it with the largest batch of the longest texts; on a GPU, without activations.
    """

    bundle: int
    build_memory: int
    build_memory_by_use: dict[str, int]
    build_memory_required: int
    build_scratch: int
    build_seconds: float | None
    run_memory: int


@dataclass(frozen=True, slots=True)
class Whole:
    """The bytes that a whole build takes: memory, how much of it there has to be, and room in TMPDIR and on disk."""

    memory: int
    required: int
    scratch: int
    disk: int

    @classmethod
    def of(cls, config: BuildConfig, sources: Sources) -> Whole:
        """Add up what the models take, which are built one after the other."""
        needs = needs_of(config, sources)
        memory, required, scratch = (
            max(getattr(each, name) for each in needs.values()) for name in ("memory", "required", "scratch")
        )
        return cls(memory, required, scratch, disk_bytes(config, needs))


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that this machine has: memory, and free room in TMPDIR and where the bundle goes."""

    memory: int
    scratch: int
    disk: int

    @classmethod
    def here(cls, output: Path) -> Room:
        """Look at this machine."""
        parent = next(each for each in output.absolute().parents if each.is_dir())
        return cls(memory_limit(), shutil.disk_usage(tempfile.gettempdir()).free, shutil.disk_usage(parent).free)

    def holds(self, needs: Whole) -> bool:
        """Return whether a build fits that takes so much."""
        return needs.required <= self.memory and needs.scratch <= self.scratch and needs.disk <= self.disk


@dataclass(frozen=True)
class Plan:
    """The plan of one build.

    Attributes:
        config: The build's options.
        sources: Its checkpoints.
        room: What this machine has.
    """

    config: BuildConfig
    sources: Sources
    room: Room

    @classmethod
    @quiet()
    def of(cls, config: BuildConfig) -> Plan:
        """Inspect the checkpoints of a build; raise the errors of `prepare`."""
        config = with_own_draft(config)
        return cls(config, prepare(config), Room.here(config.output))

    def costs(self) -> dict[str, dict[str, Cost]]:
        """Return what each model takes, by its name and precision."""
        found = {name: dict[str, Cost]() for name in self.sources.models}
        for name, costs in found.items():
            for precision, config in self._alternatives(name):
                needs = needs_of(config, self.sources)[name]
                seconds = self._seconds(config, name)
                run = _run_memory(config, self.sources, name, needs.weights)
                costs[precision] = Cost(
                    needs.weights, needs.memory, needs.uses, needs.required, needs.scratch, seconds, run
                )
        return found

    def check(self) -> None:
        """Raise the error that a build would raise before it begins: for its output, for memory, or for disk space."""
        check_output(self.config.output, self.config.force)
        check_room(self.config, self.sources, self.room)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON; "refusal" says why it cannot be built, and is None if it can."""
        config, sources, whole = self.config, self.sources, Whole.of(self.config, self.sources)
        profiles = profiles_of(config, sources.max_seq_len) if config.descriptor.compiles else []
        shown = ["batch", "nodes", "logit_nodes", *(["tree"] if config.plugin else [])]
        shown += ["pages"] if config.engine.block_size else []
        return {
            "backend": config.backend,
            "models": {
                name: {
                    **sources.origins[name],
                    "architecture": model.architecture,
                    "parameters": model.parameters,
                    "precision": config.precision_of(name),
                    "layers": len(sources.layouts[name].attentions),
                }
                for name, model in sources.models.items()
            },
            "costs": {name: {p: asdict(c) for p, c in each.items()} for name, each in self.costs().items()},
            "kv_cache_dtype": config.engine.kv_cache_dtype,
            "block_size": config.engine.block_size,
            "max_seq_len": sources.max_seq_len,
            "max_batch_size": config.max_batch_size,
            "buckets": list(config.buckets),
            "engine_architectures": list(config.engine.targets),
            "kernel_architectures": list(config.architectures),
            "profiles": {p.name: {d: list(sizes) for d, sizes in p.sizes.items() if d in shown} for p in profiles},
            "bundle_bytes_at_most": sources.bundle_bytes,
            "build_memory_bytes": sources.memory_bytes,
            "build_memory_required_bytes": whole.required,
            "build_scratch_bytes": sources.scratch_bytes,
            "build_disk_bytes": whole.disk,
            "build_seconds": self._whole_seconds(),
            "machine": asdict(self.room),
            "lacks_to_build": lacks_to_build(config.descriptor, config.architectures),
            "lacks_to_run": lacks_to_run(config.descriptor, config.plugin),
            "refusal": self._refusal(),
        }

    def _seconds(self, config: BuildConfig, name: str) -> float | None:
        sources, weights = self.sources, self.sources.weights.get(name)
        layers, names = len(sources.layouts[name].attentions), weights.names if weights else None
        return building_seconds(config, name, sources.models[name], layers, names)

    def _whole_seconds(self) -> float | None:
        each = [self._seconds(self.config, name) for name in self.sources.models]
        known = [seconds for seconds in each if seconds is not None]
        return slowness() * PROCESS + sum(known) if len(known) == len(each) else None

    def _refusal(self) -> str | None:
        try:
            self.check()
        except SpecbuildError as error:
            return str(error)
        return None

    def _alternatives(self, name: str) -> Iterator[tuple[str, BuildConfig]]:
        """Yield the precision that was asked for, then each other that the model may have, with its options."""
        asked = self.config.precision_of(name)
        yield asked, self.config
        if name == "draft" and (self.config.own_draft or self.sources.head):
            return
        for precision in self.config.descriptor.precisions:
            if precision != asked and (config := _with(self.config, self.sources, name, precision)):
                yield precision, config


def check_room(config: BuildConfig, sources: Sources, room: Room | None = None) -> Whole:
    """Return what a build takes; raise OptionError or OutputError if it, TMPDIR or the disk is too small."""
    room, needs = room or Room.here(config.output), Whole.of(config, sources)
    if needs.required > room.memory:
        raise OptionError(
            f"the build takes about {in_bytes(needs.required)} of memory, this machine has {in_bytes(room.memory)}: "
            f"{_instead(config, sources, room)}build on a larger one"
        )
    if needs.scratch > room.scratch:
        raise OptionError(
            f"the build writes {in_bytes(needs.scratch)} to {tempfile.gettempdir()}, which has "
            f"{in_bytes(room.scratch)} free: {_instead(config, sources, room)}set TMPDIR to another disk"
        )
    if needs.disk > room.disk:
        raise OutputError(
            f"there are {in_bytes(room.disk)} free for {config.output}, which may take {in_bytes(needs.disk)}: "
            f"{_instead(config, sources, room)}free some, or give another --output"
        )
    return needs


def _instead(config: BuildConfig, sources: Sources, room: Room) -> str:
    """Return the advice to take the widest precision with which the build fits; "" if there is none."""
    for precision in (*config.descriptor.dtypes, *config.descriptor.precisions):
        other = _with(config, sources, "target", precision)
        if other and room.holds(needs := Whole.of(other, sources)):
            return (
                f"--precision {precision} takes {in_bytes(needs.required)} of memory and {in_bytes(needs.disk)} of "
                "disk, or "
            )
    return ""


def _with(config: BuildConfig, sources: Sources, name: str, precision: str) -> BuildConfig | None:
    """Return the options with another precision of a model, the target's as the option's; None if it cannot be."""
    try:
        draft = precision if name == "draft" else config.draft_precision
        other = replace(config, precision=config.precision if name == "draft" else precision, draft_precision=draft)
    except OptionError:
        return None
    keeping = [model for name, model in sources.models.items() if other.keeps(name)]
    return other if all(isinstance(getattr(model, "origin", None), Gguf) for model in keeping) else None


def _run_memory(config: BuildConfig, sources: Sources, name: str, weights: int) -> int:
    """Return the memory in which the runtime would hold a model, by its own plan."""
    layout, model, file = sources.layouts[name], sources.models[name], f"{name}/weights"
    record = ModelRecord(
        source=model.source,
        source_sha256="",
        architecture=model.architecture,
        parameters=model.parameters,
        precision=config.dtype_of(name),
        **layout.record,
        vocab_size=len(sources.target.token_ids),
        capacity=capacity_of(config, sources.max_seq_len),
        max_positions=model.max_positions,
        graphs={str(config.max_batch_size): file},
        inputs={},
        outputs={},
    )
    engine = EngineRecord(
        version="",
        architectures=[],
        attention="",
        plugin=None,
        version_compatible=False,
        hardware_compatible=None,
        activations=0,
        profiles={p.name: {d: list(s) for d, s in p.sizes.items()} for p in profiles_of(config, sources.max_seq_len)},
        kv_cache_dtype=config.engine.kv_cache_dtype,
        block_size=config.engine.block_size,
    )
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specbuild_version="",
        libraries={},
        backend=config.backend,
        precision=config.dtype_of(name),
        exactness_bound=0.0,
        max_seq_len=sources.max_seq_len,
        max_batch_size=config.max_batch_size,
        buckets=list(config.buckets),
        default_tree=config.tree,
        eos_token_ids=[],
        special_tokens={},
        tokenizer="",
        chat_template=None,
        models={"target": record},
        files={file: FileRecord(weights, "")},
        engines={file: engine} if config.descriptor.compiles else {},
    )
    return memory_plan.plan(manifest, config.max_batch_size).total
