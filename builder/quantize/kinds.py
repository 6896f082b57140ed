"""Chats and code to measure with: quantization costs one kind more than the other, and users' texts may lack either."""

from __future__ import annotations

from typing import Any

from specbuild.builder.frontend.checkpoint import encode

CHATS = (
    (
        "My bicycle squeaks when I pedal uphill. What should I look at first?",
        "Start with the chain: wipe it clean, put a drop of oil on every link, and turn the pedals backwards a few "
        "times. If it still squeaks, check that the bolts of the cranks are tight.",
    ),
    (
        "Explain to a ten-year-old why the moon changes its shape.",
        "The moon is a ball, and the sun always lights one half of it. While the moon goes around us we see that half "
        "from different sides: sometimes all of it, sometimes a thin edge, and sometimes none at all.",
    ),
    (
        "Give me three rules for a good commit message.",
        "1. Say in the first line what changes, in at most fifty characters.\n2. Say below it why, and what you tried."
        "\n3. Name the issue that it closes, so that somebody can find the discussion in a year.",
    ),
    (
        "How long do I boil an egg if I want the yolk to be soft?",
        "Put the egg into boiling water and take it out after six minutes. A large egg from the fridge needs seven. "
        "Rinse it with cold water, or it goes on cooking inside its shell.",
    ),
)
CODE = (
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    if len(ordered) % 2:\n"
    "        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n\n\nclass Counter:\n"
    "    def __init__(self):\n        self.counts = {}\n\n    def add(self, word):\n"
    "        self.counts[word] = self.counts.get(word, 0) + 1\n",
    "import json\nimport sys\nfrom pathlib import Path\n\n\ndef main(argv):\n    path = Path(argv[1])\n    try:\n"
    "        rows = json.loads(path.read_text(encoding='utf-8'))\n    except (OSError, ValueError) as error:\n"
    "        print(f'{path}: {error}', file=sys.stderr)\n        return 1\n    for row in rows:\n"
    "        print(row['name'], row.get('size', 0))\n    return 0\n",
    "for (let i = 0; i < items.length; i++) {\n  const item = items[i];\n  if (!item.visible) continue;\n"
    "  total += item.price * item.count;\n}\nconsole.log(`total: ${total.toFixed(2)}`);\n",
    "SELECT customers.name, COUNT(orders.id) AS orders\nFROM customers\n"
    "LEFT JOIN orders ON orders.customer = customers.id\nWHERE customers.country = 'FR'\n"
    "GROUP BY customers.name\nORDER BY orders DESC\nLIMIT 10;\n",
)


def kinds(tokenizer: Any, longest: int) -> dict[str, list[list[int]]]:
    """Return texts of at most `longest` token ids, by kind; without chats if the tokenizer's template refuses them."""
    texts = {"code": list(CODE)}
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in CHATS]
    try:
        texts["chat"] = [tokenizer.apply_chat_template(each, tokenize=False) for each in turns]
    except Exception:  # jinja2 and the templates raise many unrelated types
        texts.pop("chat", None)
    return {kind: [ids[:longest] for ids in encode(tokenizer, each) if ids] for kind, each in sorted(texts.items())}
