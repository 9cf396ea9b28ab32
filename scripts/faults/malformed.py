"""Malformed input for `torture.py`: command lines, and token files that do not fit together."""

import json
import random
import shutil
from pathlib import Path

from gpt.data.prepare import prepare

NUMBERS = (
    *("model.config.num_heads", "model.config.emb_dim", "model.config.dropout", "model.config.vocab_size"),
    *("model.optimizer.lr", "data.batch_size", "data.val_fraction", "trainer.devices", "log_every"),
    *("checkpoint_every", "keep_checkpoints", "seed_everything"),
)
TEXTS = {
    "data.corpus": ("", "missing.txt", "no/such/*.txt", "hub:", "/dev/null"),
    "trainer.precision": ("7", "half-a-bit"),
    "model.optimizer.name": ("sgd", "1"),
    "run": ("../up", "a/b", "", ".hidden"),
    "resume": ("missing", "auto", "auto_or_new", "missing/last.safetensors"),
}
NEEDED = ("format", "tokenizer", "splits")  # of meta.json


def command_line(folder: Path, chance: random.Random) -> list[str]:
    """Unknown commands and options, values of a wrong type or out of range."""
    junk = "".join(chance.choice("abc.:/{}[]'\"\\\x07é \t%$") for _ in range(chance.randint(1, 12)))
    name = chance.choice(list(TEXTS))
    command = chance.choice(("fit", "generate", "prepare", "validate", "export", "evaluate"))
    return chance.choice((
        ["no-" + junk],
        [command, f"--q{junk.strip()}", "1"],
        ["generate", "--checkpoint", chance.choice(("", "missing", "text.txt", "/dev/null"))],
        ["fit", f"--{chance.choice(NUMBERS)}", chance.choice(("x", "-9", "nan", "[]"))],
        ["fit", f"--{name}", chance.choice(TEXTS[name])],
    ))  # fmt: skip


def token_files(folder: Path, chance: random.Random) -> list[str]:
    """A prepared folder with a missing or truncated file, or a meta.json that does not fit."""
    intact, broken = folder / "intact-tokens", folder / "broken-tokens"
    if not intact.exists():
        prepare(str(folder / "text.txt"), str(intact), vocab_size=300)
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(intact, broken)
    meta, filled = (
        broken / "meta.json",
        [file for file in sorted(broken.glob("*.bin")) if file.stat().st_size],
    )
    values = json.loads(meta.read_text(encoding="utf-8"))
    shape = chance.choice(("text", "missing", "wrong", "no file", "cut"))
    if shape == "missing":
        del values[chance.choice(NEEDED)]
    elif shape == "wrong":
        values[chance.choice(NEEDED)] = chance.choice((None, "x", [[]], {"a": 1}))
    elif shape == "no file":
        chance.choice(filled).unlink()
    elif shape == "cut":
        cut = max(filled, key=lambda file: file.stat().st_size)
        cut.write_bytes(cut.read_bytes()[: -chance.randint(1, 200)])
    text = (
        chance.choice(("", "[", "7", "{}", "\x00", '{"format": 99}'))
        if shape == "text"
        else json.dumps(values)
    )
    meta.write_text(text, encoding="utf-8")
    return ["fit", "--data.corpus", broken.name, "--model.config.vocab_size", "300"]
