"""Draw docs/pictures/round.svg and house.svg, a round and the packages: python scripts/release/drawings.py."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "pictures"
INK, SOFT, LINE, PLAIN, COMMITTED = "#1b1f24", "#5c6670", "#aab4be", "#f4f6f8", "#8fb4d9"
ACCEPTED, OWN, REJECTED = "#bfe8d9", "#ffe2a8", "#f3d4d4"
SMALL = 'text-anchor="{}" font-family="monospace" font-size="11"'

# A round after "for i in": each node's token and parent, and the target's choice behind each node of its path.
BEFORE = ["for", "i"]
NODES = [("in", -1), ("range", 0), ("items", 0), ("(", 1), (":", 2), ("len", 3), ("n", 3), ("(", 5)]
CHOICES = {0: "range", 1: "(", 3: "n", 6: "):"}
HEIGHTS = [62, 30, 95, 30, 95, 8, 52, 8]  # of the nodes in the picture of the tree

PACKAGES = {
    "cli": "the command specbuild",
    "serve": "APIs of OpenAI and others",
    "builder": "checkpoints become a bundle",
    "measure": "tune, bench, verify, cost",
    "engine": "queue, slots, worker",
    "decoding": "the round",
    "drafting": "who proposes",
    "requests": "prompts, texts, results",
    "sampling": "one choice",
    "backends": "who computes",
    "speculation": "trees, when to draft",
    "bundle": "files and hashes",
}
WAY = [
    ("serve", "http: key, limits, body"),
    ("serve", "request: queue, template, tokens"),
    ("engine", "a slot, once one is free"),
    ("decoding", "a round, until the text ends:"),
    ("speculation", "what is worth drafting"),
    ("drafting", "a tree of likely tokens"),
    ("backends", "one step of the target for all nodes"),
    ("sampling", "the target's choices along the tree"),
    ("requests", "tokens become text"),
    ("serve", "openai: an event for the client"),
]


class Drawing:
    """An SVG of a size, on a ground of its own, so that dark pages show it too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
            ' font-family="system-ui, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
        ]
        self.box(0, 0, width, height, "#ffffff", "none")

    def box(self, x: float, y: float, width: float, height: float, fill: str = PLAIN, stroke: str = LINE) -> None:
        """Add a rectangle."""
        size = f'x="{x}" y="{y}" width="{width}" height="{height}"'
        self.parts.append(f'<rect {size} rx="4" fill="{fill}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, words: str, style: str = "", fill: str = INK) -> None:
        """Add words that begin at x, on the line y."""
        self.parts.append(f'<text x="{x}" y="{y}" fill="{fill}" {style}>{escape(words)}</text>')

    def line(self, *points: tuple[float, float], stroke: str = LINE, width: float = 1.5) -> None:
        """Add a line through points."""
        way = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{way}" fill="none" stroke="{stroke}" stroke-width="{width}"/>')

    def token(self, x: float, y: float, word: str, fill: str, width: float = 56) -> None:
        """Add a token in its box."""
        self.box(x, y, width, 24, fill)
        self.text(x + width / 2, y + 16, word, 'text-anchor="middle" font-family="monospace" font-size="11"')

    def number(self, x: float, y: float, number: int) -> None:
        """Add a number in a circle around a point."""
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="10" fill="{INK}"/>')
        self.parts.append(
            f'<text x="{x}" y="{y + 4}" fill="#ffffff" font-size="11" text-anchor="middle">{number}</text>'
        )

    def svg(self) -> str:
        """Return the file."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def path_of(node: int) -> list[int]:
    """Return a node and its ancestors."""
    return [] if node < 0 else [node, *path_of(NODES[node][1])]


def accepted() -> list[int]:
    """Return the drafted nodes along the target's own choices."""
    path, node = [], 0
    while True:
        following = [i for i, (token, parent) in enumerate(NODES) if parent == node and token == CHOICES[node]]
        if not following:
            return path
        node = following[0]
        path.append(node)


def fills() -> list[str]:
    """Return each node's colour once the target has chosen; the root is its own earlier choice."""
    path = accepted()
    return [OWN, *(ACCEPTED if node in path else REJECTED for node in range(1, len(NODES)))]


def draw_tree(drawing: Drawing, x: float, y: float, colours: list[str]) -> list[tuple[float, float]]:
    """Draw the nodes from left to right by their depth; return where they are."""
    places = [(x + 84 * (len(path_of(i)) - 1), y + height) for i, height in enumerate(HEIGHTS)]
    for i, (_, parent) in enumerate(NODES[1:], 1):
        (left, top), (right, bottom) = places[parent], places[i]
        drawing.line((left + 56, top + 12), (right, bottom + 12))
    for (left, top), (token, _), colour in zip(places, NODES, colours, strict=True):
        drawing.token(left, top, token, colour)
    return places


def draw_mask(drawing: Drawing, x: float, y: float, columns: list[str]) -> None:
    """Draw what each node sees: a row for a node, a column for a row of the cache."""
    for column, token in enumerate(columns):
        drawing.text(x + 15 + 34 * column, y - 8, token, SMALL.format("middle"))
    for row, (token, _) in enumerate(NODES):
        drawing.text(x - 10, y + 13 + 20 * row, token, SMALL.format("end"))
        seen = {*range(len(BEFORE)), *(len(BEFORE) + i for i in path_of(row))}
        for column in range(len(columns)):
            drawing.box(x + 34 * column, y + 20 * row, 30, 17, COMMITTED if column in seen else PLAIN)


def draw_cache(drawing: Drawing, x: float, y: float, columns: list[str]) -> None:
    """Draw the cache's rows before and after a commit."""
    after = [*range(len(BEFORE) + 1), *(i + len(BEFORE) for i in accepted())]
    for target, source in enumerate(after):
        drawing.line((x + 18 + 40 * source, y + 24), (x + 18 + 40 * target, y + 78))
        drawing.token(x + 40 * target, y + 78, columns[source], COMMITTED, 37)
    for column in range(len(after), len(columns)):
        drawing.token(x + 40 * column, y + 78, "", "#ffffff", 37)
    for column, (token, colour) in enumerate(zip(columns, [*[COMMITTED] * len(BEFORE), *fills()], strict=True)):
        drawing.token(x + 40 * column, y, token, colour, 37)


def round_picture() -> str:
    """Return the picture of a round: draft, verify, accept, commit."""
    drawing = Drawing(900, 470, "A round: a drafted tree, one step of the target, the accepted path, the cache")
    path, columns = accepted(), [*BEFORE, *(token for token, _ in NODES)]
    bonus = CHOICES[path[-1]]
    words = {
        (20, 30): "1 Draft: a tree of likely tokens behind “for i in”",
        (470, 30): "2 Verify: one step of the target for all nodes",
        (20, 285): "3 Accept: along the target's own choices",
        (470, 285): "4 Commit: the cache keeps the accepted rows",
    }
    for (x, y), head in words.items():
        drawing.text(x, y, head, 'font-size="15" font-weight="600"')
    draw_tree(drawing, 20, 80, [OWN, *[PLAIN] * (len(NODES) - 1)])
    draw_mask(drawing, 530, 68, columns)
    drawing.text(530, 246, "a node sees committed rows and its ancestors", fill=SOFT)
    x, y = draw_tree(drawing, 20, 315, fills())[path[-1]]
    drawing.line((x + 56, y + 12), (x + 84, y + 12))
    drawing.token(x + 84, y, bonus, OWN)
    drawing.text(20, 455, f"{len(path)} drafted tokens and one of the target's own in one step", fill=SOFT)
    draw_cache(drawing, 472, 316, columns)
    drawing.text(472, 440, f"the next round begins with “{bonus}”; rejected rows are written over", fill=SOFT)
    return drawing.svg()


def layers() -> tuple[list[list[str]], list[list[str]]]:
    """Return the packages by layer, and those of the runtime, from what `make lint` checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        each["containers"][0]: each["layers"]
        for each in settings["tool"]["importlinter"]["contracts"]
        if each["type"] == "layers"
    }
    rows = {name: [layer.split(" | ") for layer in listed] for name, listed in found.items()}
    inner = [row for row in rows["specbuild.runtime"] if (ROOT / "runtime" / row[0]).is_dir()]
    return rows["specbuild"][:-1], inner


def house_picture() -> str:
    """Return the picture of the packages, each above those that it may import, and of a request's way."""
    outer, inner = layers()
    height = 100 + 52 * (len(outer) + len(inner))
    drawing = Drawing(900, height, "The packages, and the way of a request through them")
    drawing.text(20, 30, "Imports go downwards", 'font-size="15" font-weight="600"')
    drawing.text(560, 30, "The way of a request", 'font-size="15" font-weight="600"')
    top, centres = 46, dict[str, tuple[float, float]]()
    below = top + 52 * len(outer)
    drawing.box(20, below, 520, 52 * len(inner) + 30, "#ffffff", INK)
    drawing.text(32, below + 20, "runtime: loads a bundle and decodes")
    rows = [(top + 52 * i, 20, 520, row) for i, row in enumerate(outer)]
    rows += [(below + 28 + 52 * i, 32, 496, row) for i, row in enumerate(inner)]
    for y, x, width, row in rows:
        for i, name in enumerate(row):
            part = width / len(row)
            drawing.box(x + part * i, y, part - (6 if i < len(row) - 1 else 0), 44)
            drawing.text(x + part * i + 10, y + 19, name, 'font-weight="600"')
            drawing.text(x + part * i + 10, y + 36, PACKAGES[name], 'font-size="11"', SOFT)
            centres[name] = x + part * i + min(part, 260) - 24, y + 22
    places = list[tuple[float, float]]()
    for name, _ in WAY:
        x, y = centres[name]
        later = sum(each == name for each, _ in WAY[len(places) + 1 :])
        places.append((x - 26 * later, y))
    for number, ((x, y), (name, words)) in enumerate(zip(places, WAY, strict=True), 1):
        drawing.number(x, y, number)
        drawing.number(570, 28 + 36 * number, number)
        drawing.text(588, 32 + 36 * number, f"{name}: {words}")
    return drawing.svg()


def pictures() -> dict[str, str]:
    """Return each file's name and text."""
    return {"round.svg": round_picture(), "house.svg": house_picture()}


if __name__ == "__main__":
    for name, text in pictures().items():
        (OUT / name).write_text(text, encoding="utf-8")
