"""Malformed input for `torture.py`: command lines, configs, checkpoints and token files."""

import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from gpt.data.prepare import prepare

Arguments = list[str]
NEEDED = ("format", "tokenizer", "splits")  # of meta.json
Case = Callable[[Path, random.Random], Arguments]


def malformed(folder: Path, number: int, chance: random.Random) -> tuple[str, Arguments]:
    """Write malformed files to `folder` and return the kind and a command line that must be refused."""
    kinds: tuple[Case, ...] = (command_line, config, checkpoint, token_files)
    kind = kinds[number % len(kinds)]
    return kind.__name__, kind(folder, chance)


def command_line(folder: Path, chance: random.Random) -> Arguments:
    """Unknown commands and options, values of a wrong type or out of range."""
    command = chance.choice(("fit", "generate", "prepare", "inspect", "validate", "export", "evaluate"))
    junk = "".join(chance.choice("abc-=.:/{}[]'\"\\\x07é \t%$") for _ in range(chance.randint(1, 12)))
    options = {
        "--model.config.num_heads": ("0", "-1", "5", "many", "1e9", "null"),
        "--model.config.emb_dim": ("0", "-32", "3.5", "[]"),
        "--model.config.dropout": ("1", "-0.1", "nan", "much"),
        "--model.config.vocab_size": ("0", "-5", "x"),
        "--model.config.context_length": ("0", "-1", "10000000"),
        "--model.optimizer.lr": ("-1", "nan", "fast"),
        "--model.optimizer.name": ("sgd", "1"),
        "--model.skip_nonfinite": ("-1", "x"),
        "--data.batch_size": ("0", "-1", "x"),
        "--data.val_fraction": ("-1", "2", "nan", "x"),
        "--data.corpus": ("", "missing.txt", "no/such/*.txt", "hub:", "/dev/null"),
        "--trainer.max_steps": ("x", "-7", "1.5"),
        "--trainer.accelerator": ("abacus", "3"),
        "--trainer.devices": ("-3", "x"),
        "--trainer.precision": ("7", "half-a-bit"),
        "--trainer.accumulate_grad_batches": ("x", "-1"),
        "--trainer.val_check_interval": ("x", "-4", "0.5"),
        "--trainer.max_epochs": ("x", "-9"),
        "--checkpoint_every": ("0", "-1", "x"),
        "--keep_checkpoints": ("0", "x"),
        "--log_every": ("0", "-1", "x"),
        "--run": ("../up", "a/b", "", ".hidden"),
        "--resume": ("missing", "auto", "auto_or_new", "missing/last.safetensors"),
        "--seed_everything": ("x", "-1", "99999999999999999999"),
    }
    shape = chance.random()
    if shape < 0.15:
        return ["no-" + junk]
    if shape < 0.3:
        return [command, f"--{chance.choice('qxz')}{junk.strip('-= ') or 'q'}", "1"]
    if shape < 0.4:
        return ["generate", "--checkpoint", str(chance.choice(("", "missing", "text.txt", "/dev/null")))]
    name = chance.choice(list(options))
    return ["fit", name, chance.choice(options[name])]


def config(folder: Path, chance: random.Random) -> Arguments:
    """Files that are not YAML, not a mapping, or have unknown keys or wrong values."""
    texts = (
        "model: [",
        "- 1\n- 2\n",
        "42",
        "\x00\x01\x02",
        "model:\n  config:\n    num_haeds: 4\n",
        "model:\n  config: 7\n",
        "trainer: nothing\n",
        "trainer:\n  max_steps: soon\n",
        "data:\n  batch_size: {}\n",
        "a: &a [*a]\n",
        "run: !!python/object/apply:os.system ['echo pwned > pwned']\n",
        "model: !!python/name:os.system\n",
        "data:\n  corpus: [1, 2]\n",
        "model:\n  optimizer:\n    betas: [0.9]\n",
        "model:\n  optimizer:\n    schedule: sometimes\n",
        "trainer:\n  callbacks: nobody\n",
        "trainer:\n  strategy: teleport\n",
        ": : :\n",
        "model:\n\tconfig: 1\n",
        "seed_everything: [1]\n",
    )
    path = folder / "wrong.yaml"
    if chance.random() < 0.2:
        path.write_bytes(bytes(chance.randrange(128, 256) for _ in range(chance.randint(1, 200))))
    else:
        path.write_text(chance.choice(texts), encoding="utf-8")
    return ["fit", "--config", path.name]


def checkpoint(folder: Path, chance: random.Random) -> Arguments:
    """Pickles with code, archives with paths outside their folder, empty, random and unrelated files."""
    path = folder / chance.choice(("wrong.safetensors", "wrong.pt"))
    shape = chance.randrange(7)
    if shape == 0:
        path.write_bytes(pickle.dumps(Code()))
    elif shape == 1:
        torch.save({"state_dict": {}, "gpt": Code()}, path)
    elif shape == 2:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("../../pwned", "x")
            archive.writestr("archive/data.pkl", pickle.dumps(Code()))
    elif shape == 3:
        path.write_bytes(chance.randbytes(chance.randint(0, 3000)))
    elif shape == 4:
        torch.save({"state_dict": {"model.x": torch.zeros(2)}, "gpt": {"config": {"emb_dim": -1}}}, path)
    elif shape == 5:
        torch.save({"state_dict": {}, "gpt": {"config": {}}, "global_step": "x"}, path)
    else:
        torch.save([torch.zeros(3)], path)
        data = bytearray(path.read_bytes())
        path.write_bytes(data[: chance.randrange(len(data))])
    verb = chance.choice(
        (
            ["fit", "--resume"],
            ["fit", "--ckpt_path"],
            ["validate", "--ckpt_path"],
            ["generate", "--checkpoint"],
        )
    )
    return [*verb, path.name]


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo pwned > pwned",)


def token_files(folder: Path, chance: random.Random) -> Arguments:
    """Prepared folders with missing or truncated files, or a meta.json that does not fit."""
    intact, broken = folder / "intact-tokens", folder / "broken-tokens"
    if not intact.exists():
        prepare(str(folder / "text.txt"), str(intact), vocab_size=300)
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(intact, broken)
    meta = broken / "meta.json"
    shape = chance.randrange(5)
    if shape == 0:
        meta.write_text(
            chance.choice(("", "[", "7", "{}", "null", "\x00", '{"format": 99}')), encoding="utf-8"
        )
    elif shape == 1:
        values = json.loads(meta.read_text(encoding="utf-8"))
        del values[chance.choice(NEEDED)]
        meta.write_text(json.dumps(values), encoding="utf-8")
    elif shape == 2:
        values = json.loads(meta.read_text(encoding="utf-8"))
        values[chance.choice(NEEDED)] = chance.choice((None, "x", [[]], {"a": 1}))
        meta.write_text(json.dumps(values), encoding="utf-8")
    elif shape == 3:
        chance.choice([file for file in sorted(broken.glob("*.bin")) if file.stat().st_size]).unlink()
    else:
        victim = max(broken.glob("*.bin"), key=lambda file: file.stat().st_size)
        victim.write_bytes(victim.read_bytes()[: -chance.randint(1, 200)])
    return [
        "fit",
        "--data.corpus",
        broken.name,
        "--model.config.vocab_size",
        "300",
        "--trainer.max_steps",
        "1",
    ]
