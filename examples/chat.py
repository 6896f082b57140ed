"""Chat in a terminal: answers are streamed, Ctrl-C stops one, Ctrl-D leaves.

python examples/chat.py coder.bundle 'You answer in one sentence.'
"""

from __future__ import annotations

import sys
from contextlib import suppress

from specbuild.runtime import Engine, Result, SamplingParams, SpecbuildError


def answer(engine: Engine, messages: list[dict[str, str]], max_new_tokens: int) -> Result:
    """Print an answer as it comes, until its end or Ctrl-C."""
    handle = engine.submit(messages, SamplingParams(max_new_tokens=max_new_tokens))
    try:
        for chunk in handle:
            print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        handle.cancel()
    print()
    return handle.result()


def main(bundle: str, system: str = "", max_new_tokens: int = 512) -> None:
    """Answer each line of standard input, with all that was said before it."""
    messages = [{"role": "system", "content": system}] if system else []
    with Engine.load(bundle) as engine, suppress(EOFError):
        while True:
            messages.append({"role": "user", "content": input("> ")})
            result = answer(engine, messages, max_new_tokens)
            print(f"[{result.error or result.finish_reason}: {len(result.token_ids)} tokens]", file=sys.stderr)
            messages.append({"role": "assistant", "content": result.text})


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {sys.argv[0]} BUNDLE [SYSTEM]")
    try:
        main(*sys.argv[1:])
    except SpecbuildError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
