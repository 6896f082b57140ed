"""A bundle on a CPU: its models, whoever drafts, and the policy, around one loop."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ON_GPU, spec_of
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.decoding.host_loop import Loop
from specbuild.runtime.drafting.factory import drafter_of
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import DrafterName
from specbuild.runtime.errors import BundleError, OptionError
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.timings import TimingTable, find, machine

BACKEND = "onnxruntime"
PROMPT_CHUNK = 256  # nodes of a prompt in a step where nobody else waits for its end
_log = logging.getLogger("specbuild")


def load_loop(
    bundle: Bundle,
    drafter: DrafterName | None,
    batch_size: int,
    threads: int,
    draft_threads: int,
    limits: Limits,
    overlap: bool | None,
) -> tuple[Loop, Policy | None]:
    """The loop that drives a bundle's models, and its policy where it was tuned; see `Engine.load`."""
    chunk = bundle.manifest.buckets[-1]
    target = load_model(bundle, "target", batch_size, threads)
    model = None
    drafts = drafter != "ngram" and "draft" in bundle.manifest.models
    policy = _policy(bundle, drafts, threads, limits)
    if overlap is None:
        overlap = policy is not None and policy.timings.overlap
    if drafts:
        draft = load_model(bundle, "draft", batch_size, draft_threads)
        model = drafter_of(bundle, draft, target, PROMPT_CHUNK, overlap)
    drafting = LookupDrafter(model, looks_up=drafter != "model")
    loop = Loop(target, drafting, chunk, frozenset(bundle.manifest.eos_token_ids))
    loop.limits, loop.lone_chunk = limits, max(chunk, PROMPT_CHUNK)
    return loop, policy


def load_model(bundle: Bundle, name: str, batch_size: int, threads: int) -> OrtExecutor:
    """The smallest compiled graph that holds `batch_size` sequences; raises BundleError."""
    backend, known = bundle.manifest.backend, ", ".join((BACKEND, *ON_GPU))
    if backend != BACKEND:
        raise BundleError(f"the bundle needs backend {backend!r}, this specbuild has {known}: update specbuild")
    graphs = bundle.manifest.models[name].graphs
    compiled = min(int(size) for size in graphs if int(size) >= batch_size)
    spec = spec_of(bundle.manifest, name)
    spec = replace(spec, max_nodes=max(spec.max_nodes, PROMPT_CHUNK))
    return OrtExecutor(bundle.path(graphs[str(compiled)]), spec, compiled, threads)


def _policy(bundle: Bundle, drafts: bool, threads: int, limits: Limits) -> Policy | None:
    """By the bundle's timing table; None where it was never tuned. Warns of a table that is of another machine."""
    name = find(bundle.manifest.files)
    if name is None:
        if limits.min_expected_speedup > 1:
            raise OptionError(f"min_expected_speedup needs a tuned bundle: run specbuild tune {bundle.folder}")
        return None
    try:
        record = json.loads(bundle.path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{bundle.path(name)} cannot be read as JSON ({error}): run specbuild tune") from None
    timings, here = TimingTable.of(record, bundle.manifest.buckets[-1]), machine(threads)
    if dict(timings.machine) != here:
        tuned, now = (", ".join(map(str, each.values())) for each in (timings.machine, here))
        _log.warning("%s was tuned on another machine (%s; here %s): run specbuild tune", bundle.folder, tuned, now)
    return Policy(timings, drafts, limits)
