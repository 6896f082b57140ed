"""Edit a file: its old text is the prediction of the new one, and is drafted from wherever it fits.

python examples/edit.py coder.bundle FILE 'Rename the function f to g.'
"""

from __future__ import annotations

import sys
from pathlib import Path

from specbuild.runtime import Engine, SamplingParams, SpecbuildError


def main(bundle: str, file: str, instruction: str, max_new_tokens: int = 512) -> int:
    """Print the new text on stdout, and on stderr how much of the prediction was accepted."""
    old = Path(file).read_text(encoding="utf-8")
    prompt = f"# {instruction}\n# Before:\n{old}\n# After:\n"
    with Engine.load(bundle) as engine:
        params = SamplingParams(max_new_tokens=max_new_tokens, prediction=old)
        (result,) = engine.generate(prompt, params)
    print(result.text)
    if result.metrics:
        stats = result.metrics.speculative_decoding
        accepted, predicted = stats.num_accepted_prediction_tokens, stats.num_prediction_tokens
        print(f"[{accepted} of {predicted} predicted tokens accepted]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} BUNDLE FILE INSTRUCTION")
    try:
        sys.exit(main(*sys.argv[1:]))
    except (SpecbuildError, OSError) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
