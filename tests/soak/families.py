"""Try every text decoder of transformers with tiny random weights, and write which build and why the others do not.

PYTHONPATH=.:tests/support python tests/soak/families.py --out benchmarks/results/families.json [FAMILY …]

A family builds if what a CPU runs gives transformers' logits for prompts in parts, a tree and what follows an accepted
path, and the bits of plain decoding. Results are saved after each family, and those of this transformers' version are
kept. docs/guides/models.md gets the list.
"""

import json
import sys
import textwrap
import warnings
from pathlib import Path

import transformers
from family_check import check_family
from huggingface_hub.errors import StrictDataclassError
from tiny_families import families

from benchmarks.common import ROOT, parser, save
from specbuild.runtime.errors import SpecbuildError

PAGE, BEGIN, END = ROOT / "docs/guides/models.md", "<!-- families -->\n", "<!-- /families -->\n"
WRONG = "its results differ"


def main():
    """Try the families, and write the results and the list."""
    asked = parser(__doc__, None)
    asked.add_argument("families", nargs="*")
    options = asked.parse_args()
    warnings.simplefilter("ignore")
    results = {"transformers": transformers.__version__, "families": earlier(Path(options.out))}
    for name in options.families or [each for each in families() if each not in results["families"]]:
        results["families"][name] = reason = outcome(name)
        results["families"] = dict(sorted(results["families"].items()))
        print(name, reason or "builds", flush=True)
        save(options.out, results)
    write_list(results["families"])
    return 0


def earlier(path):
    """The results of this version of transformers that a file has."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    return known["families"] if known.get("transformers") == transformers.__version__ else {}


def outcome(model_type):
    """Why a family does not build; empty if it does."""
    try:
        check_family(model_type)
    except SpecbuildError as error:
        return str(error).rpartition("plain.onnx ")[2]  # without the temporary folder
    except AssertionError:
        return WRONG
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        return f"no tiny configuration could be made: {str(error).splitlines()[0][:80]}"
    except RuntimeError as error:
        return f"{WRONG}, or cannot be computed: {str(error).splitlines()[0][:80]}"
    return ""


def write_list(results):
    """Write the families into the page, between its marks."""
    built = [name for name, reason in results.items() if not reason]
    lines = textwrap.wrap(
        f"{len(built)} build: " + ", ".join(f"`{name}`" for name in built) + ".", 100, break_on_hyphens=False
    )
    lines += ["", "| refused | why |", "| --- | --- |"]
    by_reason = {}
    for name, reason in results.items():
        if reason:
            by_reason.setdefault(told(reason), []).append(f"`{name}`")
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in sorted(by_reason.items())]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1], encoding="utf-8")


def told(reason):
    """A reason without the name of the model's class, for those that several families share."""
    first, space, rest = reason.partition(" ")
    names_class = first.rstrip(":").endswith(("Model", "CausalLM"))
    return (rest if names_class and space else reason).replace("|", "/").removeprefix("has ")[:160]


if __name__ == "__main__":
    sys.exit(main())
