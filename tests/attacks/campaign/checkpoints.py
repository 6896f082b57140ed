"""Attacks by checkpoints: configurations, tokenizers, weight headers and indices that no training wrote."""

import json
import struct

from data_files import table

from . import tiny_pair, tokenizer
from .attack import Attack
from .bundle_copy import copied, replace
from .mutations import HOSTILE, mutate_bytes, mutate_json, to_bytes

SIZES = (0, -1, 1, 3, 10**5, 10**9, 2**31, 2**63, 10**30, 1.5, "2", None, [], True)
FIELDS = (
    *("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "eos_token_id", "pad_token_id", "layer_types", "sliding_window"),
)
OTHERS = table("config_fields.json")


def configuration(rng, body):
    """Another config.json."""
    match rng.randrange(5):
        case 0 | 1:
            for name in rng.sample(FIELDS, rng.choice((1, 1, 2, 4))):
                body[name] = rng.choice(SIZES)
        case 2 | 3:
            for name, values in rng.sample([*OTHERS.items()], rng.choice((1, 2))):
                body[name] = rng.choice((*values, *values, rng.choice(HOSTILE)))
        case _:
            body = mutate_json(rng, body)[0]
    return to_bytes(body)


def weights(rng, content):
    """Another file of safetensors: its header changed, with its length right or not, or any bytes."""
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    match rng.randrange(6):
        case 0:
            return mutate_bytes(rng, content[: 8 + size]) + data
        case 1:
            return struct.pack("<Q", rng.choice((0, 1, size + 1, 2**31, 2**63, 2**64 - 1, len(content)))) + content[8:]
        case 2:
            name = rng.choice([name for name in header if name != "__metadata__"])
            shape = header[name]["shape"]
            header[name] |= rng.choice(
                (
                    {"shape": [2**40, 2**40]},
                    {"shape": shape[::-1]},
                    {"shape": [*shape, 1]},
                    {"dtype": rng.choice(("F16", "I64", "BOOL", "F8_E4M3", "X"))},
                    {"data_offsets": rng.choice(([0, 2**62], [5, 1], [0, 0], [-1, 4]))},
                )
            )
        case 3:
            start = rng.randrange(len(data) // 4) * 4
            return content[: 8 + size + start] + struct.pack("<f", rng.choice((float("nan"), 1e38))) + data[start + 4 :]
        case 4:
            return content[: rng.randrange(len(content))]
        case _:
            header = mutate_json(rng, header)[0]
    text = to_bytes(header)
    return struct.pack("<Q", len(text)) + text + data


class CheckpointsAttack(Attack):
    """Takes a checkpoint through the first stages of a build."""

    def __init__(self, bench):
        from specbuild.builder import plan, prepare
        from specbuild.builder.frontend import checkpoint

        super().__init__(bench)
        self.prepare, self.check_room, self.frontend = prepare.prepare, plan.check_room, checkpoint
        self.folders = [bench.once("sharded", tiny_pair.checkpoint), bench.once("whole", tiny_pair.whole)]

    def attempt(self, rng, place):
        from specbuild.builder.config.build_config import BuildConfig

        root = copied(rng.choice(self.folders), place)
        self.damage(rng, root)
        draft = rng.choice((None, None, None, str(self.folders[0])))
        seq = rng.choice((None, None, 64, 128))
        config = BuildConfig(target=str(root), output=place / "out", draft=draft, max_seq_len=seq)
        found = self.prepare(config)
        self.check_room(config, found)
        self.frontend.load(found.target, "eager")

    def damage(self, rng, root):
        """Change one of a checkpoint's files."""
        files = sorted(path.name for path in root.iterdir())
        shards = [name for name in files if name.endswith(".safetensors")]
        others = [name for name in files if name.endswith(".json") and name not in ("config.json", "tokenizer.json")]
        match rng.randrange(8):
            case 0 | 1 | 2:
                name = "config.json"
                content = configuration(rng, json.loads((root / name).read_bytes()))
            case 3 | 4:
                name = rng.choice(shards)
                content = weights(rng, (root / name).read_bytes())
            case 5:
                name = "tokenizer.json"
                content = tokenizer.mutated(rng, (root / name).read_bytes())
            case 6:
                name = rng.choice(others)
                body = json.loads((root / name).read_bytes())
                content = to_bytes(mutate_json(rng, body)[0])
            case _:
                name = rng.choice(files)
                content = mutate_bytes(rng, (root / name).read_bytes()[:100_000])
        replace(root / name, content)
