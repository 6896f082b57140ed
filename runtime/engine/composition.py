"""Composition of an engine's parts: the only module that combines models, drafter, controller, loop and tokenizer."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.checked_json import JSON_BYTES, decode
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import Loop, LoopOptions
from specbuild.runtime.drafting.factory import drafter_of
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.errors import BundleError, OptionError, PromptError
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import FILE, TimingTable
from specbuild.runtime.speculation.tree import TreeSpec

from .load_options import LoadOptions

if TYPE_CHECKING:
    from specbuild.runtime.decoding.device.loop import DeviceLoop

TOKENIZER_BYTES, TEMPLATE_BYTES = 256 << 20, 1 << 20
_log = logging.getLogger("specbuild")


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine; `controller` is None if the bundle was never tuned."""

    tokenizer: Tokenizer
    loop: Loop
    controller: Controller | None


def compose(bundle: Bundle, options: LoadOptions) -> Parts:
    """Load a bundle's models and put them together.

    Every file's hash is checked before any library is given one of the files.

    Args:
        bundle: The bundle to load.
        options: How to load it; checked against the bundle first.

    Raises:
        BundleError: A file is damaged, or a tree in the bundle does not fit it.
        OptionError: An option does not suit the bundle, or memory does not suffice.
        ExecutionError: A model cannot be loaded here, for example without a GPU.
    """
    options.check(bundle)
    manifest = bundle.manifest
    _check_tree(bundle, manifest.default_tree, MANIFEST)
    with bundle.verified(), ExitStack() as undo:
        loop, controller = (gpu_loop if manifest.descriptor.on_gpu else cpu_loop)(bundle, options)
        undo.callback(loop.close)
        tokenizer = tokenizer_of(bundle, options.chat_template)
        undo.pop_all()
    return Parts(tokenizer, loop, controller)


def cpu_loop(bundle: Bundle, options: LoadOptions) -> tuple[HostLoop, Controller | None]:
    """Return a loop over a bundle's models on this CPU, and its controller if the bundle was tuned."""
    from specbuild.runtime.backends.cpu.load import PROMPT_CHUNK, exactness_class, load_model

    manifest, threads, model = bundle.manifest, options.threads or cores(), None
    with ExitStack() as undo:
        target = load_model(bundle, "target", options.batch_size, threads)
        undo.callback(target.close)
        controller = _controller(bundle, options, target)
        if _drafts(bundle, options):
            draft = load_model(bundle, "draft", options.batch_size, threads)
            undo.callback(draft.close)
            model = drafter_of(bundle, draft, target, PROMPT_CHUNK, controller.cost if controller else None)
        undo.pop_all()
    proposer = Proposer(model, options.drafter != "model")
    chunk, lone_chunk, limits = manifest.buckets[-1], max(manifest.buckets[-1], PROMPT_CHUNK), options.limits
    step = options.max_num_batched_tokens
    if step is not None:
        chunk, lone_chunk = (min(size, step) for size in (chunk, lone_chunk))
        most, asked = step // options.batch_size - 1, limits.max_draft_tokens
        limits = replace(limits, max_draft_tokens=most if asked is None else min(most, asked))
    cost = controller.cost if controller else None
    how = LoopOptions(limits, options.prefix_caching, lone_chunk, exactness_class(), step, cost)
    return HostLoop(target, proposer, chunk, frozenset(manifest.eos_token_ids), how), controller


def gpu_loop(bundle: Bundle, options: LoadOptions) -> tuple[DeviceLoop, Controller | None]:
    """Return a loop over a bundle's models on the first GPU, and its controller; an error frees all GPU memory."""
    from specbuild.runtime.backends.gpu.exactness import find
    from specbuild.runtime.backends.kernels.cubins import find_kernels
    from specbuild.runtime.backends.placement import Placement, loaded
    from specbuild.runtime.decoding.device.loop import DeviceLoop
    from specbuild.runtime.decoding.device.resident_run import AHEAD, follows

    names = ["target", *(["draft"] if _drafts(bundle, options) else [])]
    placement = Placement(names, options.batch_size, options.gpu_weights_percent, options.kv_cache_tokens)
    with loaded(bundle, placement, find_kernels) as models:
        drafter, draft, max_nodes = None, models.draft, options.limits.max_draft_tokens
        exactness = find(models.target, bundle.manifest.buckets[-1] if max_nodes is None else 1 + max_nodes)
        if draft and bundle.manifest.models["draft"].kind != "model":
            drafter = drafter_of(bundle, draft, models.target, draft.model.buckets[-1])
        controller = _controller(bundle, options, models.target, padded=True)
        cost = controller.cost if controller else None
        loop = DeviceLoop(
            models.target,
            None if drafter else draft,
            models.kernels,
            frozenset(bundle.manifest.eos_token_ids),
            options.drafter != "model",
            drafter=drafter,
            options=LoopOptions(options.limits, options.prefix_caching, exactness=exactness, cost=cost),
            ahead=AHEAD if options.resident or (options.resident is None and follows(drafter)) else 0,
        )
        return loop, controller


def _drafts(bundle: Bundle, options: LoadOptions) -> bool:
    """Return whether a draft model is loaded."""
    return options.drafter != "ngram" and "draft" in bundle.manifest.models


def tokenizer_of(bundle: Bundle, chat_template: str | None) -> Tokenizer:
    """Return the bundle's tokenizer, with `chat_template` if given; raise OptionError if that is no valid template."""
    manifest = bundle.manifest
    template = bundle.read(manifest.chat_template, TEMPLATE_BYTES) if manifest.chat_template else None
    try:
        given = template if chat_template is None else chat_template.encode()
    except UnicodeEncodeError as error:
        told = f"{error.reason} at character {error.start}"
        raise OptionError(f"the given chat template is not valid Unicode: {told}") from None
    tokenizer = Tokenizer(bundle.read(manifest.tokenizer, TOKENIZER_BYTES), given, manifest.special_tokens)
    if chat_template is not None:
        try:
            tokenizer.template_reads("messages")  # raises if it is invalid
        except PromptError as error:
            raise OptionError(str(error).replace("the bundle's", "the given", 1).partition(": give")[0]) from None
    return tokenizer


def _check_tree(bundle: Bundle, tree: str, name: str) -> None:
    """Raise BundleError if `tree`, read from the file `name`, does not parse or the bundle cannot verify it."""
    try:
        TreeSpec.parse(tree).check(bundle.manifest.buckets[-1])
    except OptionError as error:
        raise BundleError(f"{bundle.path(name)}: {str(error)[:300]}; build the bundle again") from None


def _controller(bundle: Bundle, options: LoadOptions, target: Executor, padded: bool = False) -> Controller | None:
    """Return the controller for the bundle's timing table, or None if the bundle was never tuned.

    Warn if the table was measured on another machine or with another thread count. `padded`: see `CostModel`.
    """
    if FILE not in bundle.manifest.files:
        if options.limits.min_expected_speedup > 1:
            raise OptionError(f"min_expected_speedup needs a tuned bundle: run specbuild tune {bundle.folder}")
        return None
    try:
        record = decode(bundle.read(FILE, JSON_BYTES))
    except ValueError as error:
        raise BundleError(f"{bundle.path(FILE)} cannot be read as JSON ({error}): run specbuild tune") from None
    timings, here = TimingTable.of(record, bundle.manifest.buckets[-1]), target.identity
    _check_tree(bundle, timings.widest, FILE)
    if dict(timings.machine) != here:
        other = {**timings.machine, "threads": here.get("threads")} != here
        tuned, now = (", ".join(map(str, each.values())) for each in (timings.machine, here))
        what = "on another machine" if other else "with another thread count"
        _log.warning("%s was tuned %s (%s; here %s): run specbuild tune", bundle.folder, what, tuned, now)
    cost = CostModel(timings, target.batch_size, padded, options.live_timings)
    return Controller(cost, _drafts(bundle, options))
