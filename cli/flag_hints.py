"""Flags that a command does not have: those of vLLM, llama.cpp and trtllm-build by name, others by what is similar."""

from __future__ import annotations

import difflib

import click

from specbuild.runtime.errors import OptionError

_SIMILAR = 0.75  # least ratio of equal characters at which a flag is suggested for a mistyped one
_BUILT_FOR = "a bundle runs where it was built for, which is --backend of build"
_ONE_DEVICE = "not needed, a bundle runs on one device; --ray of serve starts several"
_COMPILED = "not needed, a bundle is compiled ahead of time"
_ALWAYS = "not needed, it is always so"
_LOGS = "use --log-requests of serve or --stats of generate; SPECBUILD_DEBUG=1 shows tracebacks"
_REQUEST = "it is a field of a request to serve, and a flag of generate"
_UNSUPPORTED = "specbuild has nothing like it"
_HERE = {
    "-m --model --model-path --model-dir": "give BUNDLE without a flag; a model is for --target of build",
    "-hf -hfr -hff --hf-repo --hf-file -mu --model-url --checkpoint-dir --load-format --download-dir": (
        "use --target of build, which takes a folder, a GGUF file or a hub id"
    ),
    "--tokenizer --tokenizer-mode --hf-config-path": "not needed, it is read from --target of build",
    "--revision --code-revision --tokenizer-revision --hf-token -hft": (
        "download the revision, and give its folder to --target of build"
    ),
    "-md --model-draft --draft-model --speculative-model -hfd -hfrd": "use --draft of build",
    "--draft --draft-n": "use --draft of build for a model, --max-draft-tokens of serve for how much it drafts",
    "--speculative-config --speculative-decoding-mode": "use --draft of build, then --tree or --drafter of generate",
    "--num-speculative-tokens --max-draft-len --spec-draft-n-max --max-draft-tokens --draft-max": (
        "use --max-draft-tokens of serve, or --tree of build"
    ),
    "--draft-min --draft-n-min --draft-p-min --draft-p-split": "not needed, each round drafts what pays, if anything",
    "--quantization --dtype --precision": "use --precision of build",
    "--kv-cache-dtype --kv-cache-type -ctk --cache-type-k -ctv --cache-type-v": "use --kv-cache-dtype of build",
    "-c --ctx-size --max-seq-len --max-model-len --max-input-len --max-seq-len-to-capture": (
        "use --max-seq-len of build, or --max-model-len of serve"
    ),
    "-np --parallel --max-num-seqs --max-batch-size -b --batch-size": (
        "use --max-batch-size of build, --max-num-seqs of serve or --batch-size of generate"
    ),
    "--max-concurrency --concurrency": "use --concurrency of bench",
    "-ub --ubatch-size --max-num-batched-tokens --max-num-tokens --opt-num-tokens": (
        "use --max-num-batched-tokens of serve, or --prompt-chunk of build"
    ),
    "--block-size --tokens-per-block --paged-kv-cache": "use --block-size of build",
    "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --num-gpu-blocks-override --swap-space": (
        "use --kv-cache-tokens of serve, after --block-size of build"
    ),
    "--cpu-offload-gb": "use --gpu-weights-percent of serve, after --weight-streaming of build",
    "--weight-streaming": "use --weight-streaming of build",
    "-ngl --gpu-layers --n-gpu-layers -ngld --gpu-layers-draft -dev --device -devd --device-draft": _BUILT_FOR,
    "-nkvo --no-kv-offload -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe --numa": _BUILT_FOR,
    "-tp --tensor-parallel-size --tp-size -pp --pipeline-parallel-size --pp-size --workers": _ONE_DEVICE,
    "-dp --data-parallel-size --dp-size --enable-expert-parallel --distributed-executor-backend": _ONE_DEVICE,
    "-sm --split-mode -ts --tensor-split -mg --main-gpu": _ONE_DEVICE,
    "-fa --flash-attn --enforce-eager -O --compilation-config --gpt-attention-plugin --gemm-plugin": _COMPILED,
    "--context-fmha --use-paged-context-fmha --remove-input-padding --multiple-profiles --strongly-typed": _COMPILED,
    "--use-fused-mlp --fast-build --profiling-verbosity --mlock --no-mmap --check-tensors --no-warmup": _COMPILED,
    "--input-timing-cache --output-timing-cache": "use --timing-cache of build",
    "--builder-opt --optimization-level": "use --builder-optimization-level of build",
    "--output-dir": "use --output of build",
    "--trust-remote-code": "not needed, no code of a checkpoint is run",
    "--jinja -cb --cont-batching --enable-chunked-prefill --async-scheduling --metrics --slots --props": _ALWAYS,
    "-t --threads -tb --threads-batch -td --threads-draft -C --cpu-mask": "use --threads of generate or serve",
    "-a --alias --served-model-name": "use --served-model-name of serve",
    "--chat-template --chat-template-file": "use --chat-template of serve",
    "--host --port --uds --api-key": "use specbuild serve, which has it",
    "--api-key-file": "use --api-key of serve, or set SPECBUILD_API_KEY",
    "-to --timeout": "use --request-timeout of serve",
    "--webui --no-webui": "use --ui of serve, or leave it out",
    "-v --verbose --verbose-prompt -lv --verbosity --log-verbosity --log-level --uvicorn-log-level": _LOGS,
    "--log-file --log-disable --debug --enable-debug-output": _LOGS,
    "--enable-log-requests --disable-log-requests --disable-log-stats --max-log-len": _LOGS,
    "--temp --temperature --top-k --top-p --min-p --repetition-penalty --repeat-penalty --ignore-eos": _REQUEST,
    "-s --seed --frequency-penalty --presence-penalty --stop --logprobs --json-schema --grammar": _REQUEST,
    "-n --n-predict --predict --max-new-tokens --max-tokens --output-len --random-output-len": (
        "use --max-new-tokens of generate, chat or bench, or max_tokens in a request"
    ),
    "--generation-config --override-generation-config": "use generation_config.json in the folder of --target of build",
    "-l --logit-bias": "use logit_bias in a request to serve",
    "-r --reverse-prompt": "use --stop of generate",
    "-p --prompt --prompts": "use --prompt of generate, or --prompts of generate or bench",
    "-f --file -bf --binary-file": "use --prompt of generate with the file's text, or --prompts of generate",
    "-sys --system-prompt -sysf --system-prompt-file --system": "use --system of chat",
    "-i --interactive -if --interactive-first -cnv --conversation -st --single-turn": "use specbuild chat",
    "-no-cnv --no-conversation -co --color --no-display-prompt --simple-io -e --escape --no-perf": (
        "not needed, generate prints the text alone"
    ),
    "-j -jf --json-schema-file": "use --json-schema of generate, which takes a file",
    "--grammar-file": "use --grammar of generate, which takes a file",
    "--prompt-cache --cache-reuse --enable-prefix-caching": "use --enable-prefix-caching of serve, the default",
    "--dataset-name --random-input-len --input-len": "use --prompts of bench",
    "--output-format --save-result --result-filename --result-dir": "use --json or --output of bench",
    "--base-url --endpoint --request-rate": "not needed, bench runs a bundle itself, at its --concurrency",
    "--lora --lora-scaled --enable-lora --lora-modules --lora-dir --lora-plugin": (
        "merge the adapter into the model that you give to --target of build"
    ),
    "--mmproj --limit-mm-per-prompt --embedding --embeddings --reranking --pooling --control-vector": _UNSUPPORTED,
    "--mirostat --dynatemp-range --typical --xtc-probability --dry-multiplier --samplers": _UNSUPPORTED,
    "--max-beam-width --rope-scaling --rope-theta --keep --context-shift --no-context-shift": _UNSUPPORTED,
}


def hints(command: click.Command) -> list[click.Option]:
    """Return hidden options that refuse the flags of other engines; click parses `-np 4` as `-n p 4` without them."""
    own = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    return [_hint(flag, text) for flags, text in _HERE.items() for flag in flags.split() if flag not in own]


def _hint(flag: str, text: str) -> click.Option:
    def refuse(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise OptionError(f"there is no {flag} here: {text}")

    return click.Option(
        [flag, "hint_" + flag.strip("-").replace("-", "_")],
        is_flag=False,
        flag_value="",  # the flag's own value is optional
        type=click.UNPROCESSED,
        is_eager=True,
        hidden=True,
        expose_value=False,
        callback=refuse,
    )


def unknown(error: click.NoSuchOption) -> str:
    """Return the line for an unknown flag: one that is similar, or the help that lists all."""
    assert error.ctx  # click names the command whose flag it is
    visible = [each for each in error.ctx.command.params if isinstance(each, click.Option) and not each.hidden]
    flags = [flag for each in visible for flag in (*each.opts, *each.secondary_opts)]
    for similar in difflib.get_close_matches(error.option_name, flags, 1, _SIMILAR):
        return f"there is no {error.option_name} here: did you mean {similar}?"
    return f"there is no {error.option_name} here: {error.ctx.command_path} --help lists what there is"
