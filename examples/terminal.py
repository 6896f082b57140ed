"""Stream one prompt's output to the terminal; Ctrl-C ends the generation, and the rest of the program goes on.

python examples/terminal.py pycode.bundle 'def main(argv):' 200
"""

from __future__ import annotations

import sys

from specbuild.runtime import Engine, SamplingParams, SpecbuildError


def main(bundle: str, prompt: str, max_new_tokens: int) -> int:
    """Print the text on stdout and its outcome on stderr; return the exit status."""
    with Engine.load(bundle) as engine:
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        try:
            for chunk in handle:
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.cancel()
        result = handle.result()
    metrics, count = result.metrics, len(result.token_ids)
    rate = f", {1 / metrics.tpot:.0f} tokens/s after the first" if metrics and metrics.tpot else ""
    print(f"\n[{result.error or result.finish_reason}: {count} tokens{rate}]", file=sys.stderr)
    return 1 if result.error else 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: {sys.argv[0]} BUNDLE PROMPT [MAX_NEW_TOKENS]")
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) == 4 else 128))
    except (SpecbuildError, ValueError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
