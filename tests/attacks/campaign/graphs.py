"""Attacks on graphs and weights: other bytes, other files behind a graph's names, and what is no file at all."""

import os

import onnx

from specbuild.runtime import Engine
from specbuild.runtime.errors import BundleError

from . import golden
from .attack import Attack
from .bundle_copy import copied, manifest, put, replace
from .mutations import mutate_bytes
from .outcome import Fault

OUTSIDE = (
    "../outside.bin",
    "/etc/passwd",
    "/dev/zero",
    "other.bin",
    "../draft/weights.bin",
    "./weights.bin",
    "",
    "a/b",
)


class GraphsAttack(Attack):
    """Loads a bundle whose graphs and weights are not what was built."""

    def attempt(self, rng, place):
        root = copied(self.bench.bundle, place)
        names = sorted(name for name in manifest(root)["files"] if name.endswith((".onnx", ".bin")))
        graph = rng.choice([name for name in names if name.endswith(".onnx")])
        kind = rng.choice(("bytes", "bytes", "bytes", "unhashed", "external", "external", "special", "swapped"))
        if kind in ("bytes", "unhashed"):
            name = rng.choice((*names, graph))
            content = mutate_bytes(rng, (root / name).read_bytes())
            put(root, name, content, hashed=kind == "bytes")
            self._load(root, rng, name, promised=kind == "unhashed")
        elif kind == "external":
            listed = external(rng, root, graph)
            self._load(root, rng, graph, promised=not listed)
        elif kind == "special":
            special(rng, root, rng.choice(names))
            self._load(root, rng, "", promised=True)
        else:
            other = rng.choice([name for name in names if name != graph])
            put(root, graph, (root / other).read_bytes(), hashed=True)
            self._load(root, rng, graph, promised=False)

    def _load(self, root, rng, name, promised):
        """Load and decode; `promised`: only a BundleError will do. A draft decides no tokens."""
        models = manifest(root)["models"].values()
        sizes = {graph: size for model in models for size, graph in model["graphs"].items()}
        try:
            engine = Engine.load(root, batch_size=int(sizes.get(name, rng.choice((1, 2, 4)))))
        except BundleError:
            raise
        except Exception as error:
            if promised:
                raise Fault("raw", f"not BundleError but {type(error).__name__}: {error}") from error
            raise
        with engine:
            if promised:
                raise Fault("wrong", f"a bundle was loaded whose {name or 'file'} no manifest lists like this")
            if name.startswith("draft/"):
                self.bench.golden.check(engine)
            else:
                golden.run(engine)


def external(rng, root, graph):
    """Have some of a graph's tensors lie elsewhere; whether that is in files that the manifest lists."""
    model = onnx.load(str(root / graph), load_external_data=False)
    where, weights = (root / graph).parent, (root / graph).parent / "weights.bin"
    os.link(weights, where / "other.bin")
    os.link(weights, root / "outside.bin")
    location, listed = rng.choice(OUTSIDE), True
    tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
    for tensor in rng.sample(tensors, rng.choice((1, len(tensors)))):
        entries = {entry.key: entry for entry in tensor.external_data}
        if rng.random() < 0.3:
            key = rng.choice(("offset", "length"))
            entries[key].value = rng.choice(("-1", "0", "1", "9" * 30, "1e3", "", "x", str(2**63), str(10**9)))
        else:
            entries["location"].value = location
            listed = listed and location in ("../draft/weights.bin", "./weights.bin")
    put(root, graph, model.SerializeToString(), hashed=True)
    return listed


def special(rng, root, name):
    """Put what is no file, or not this one, in a file's place."""
    path = root / name
    size, content = path.stat().st_size, path.read_bytes()
    path.unlink()
    match rng.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "nowhere", path.name, "/dev/stdin")))
        case 3:
            outside = root.parent / "outside"
            replace(outside, content)
            path.symlink_to(outside)
        case 4:
            with path.open("wb") as file:
                file.truncate(rng.choice((size, 2**40)))
        case _:
            pass  # it is missing
