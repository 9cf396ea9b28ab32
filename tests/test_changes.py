"""The changes that people make: docs/design.md names the files of each, and no other needs one.

Each is made in a copy of the package. Most of them then train ten steps.
"""

import csv
import difflib
import math
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from processes import ROOT, forked

from gpt import GPT, GPTConfig

SIZES = {"emb_dim": 32, "num_heads": 2, "num_layers": 1, "context_length": 32, "vocab_size": 300}
FIT = """fit --data.corpus text.txt --run changed --trainer.max_steps 10 --log_every 1 --snapshot_megabytes 0
--model.optimizer.lr 5e-3 """ + " ".join(f"--model.config.{name} {size}" for name, size in SIZES.items())
Texts = dict[str, str]
"""Texts that stand once in a file, with what takes their place.

An empty one stands for the end of the file, which may be new.
"""


def before(text: str, new: str) -> Texts:
    """The change that writes `new` before a text."""
    return {text: new + text}


def after(text: str, new: str) -> Texts:
    """The change that writes `new` after a text."""
    return {text: text + new}


ROTATED = '''

def _rotated(x, first):
    """Su et al. 2021: pairs of numbers turn by an angle that grows with the position."""
    half = x.shape[3] // 2
    positions = torch.arange(first, first + x.shape[2], device=x.device)[:, None]
    angles = positions * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
'''

SQLITE_ROWS = '''

def _sqlite_rows(name: str) -> Iterator[Row]:
    """Yield the rows of the table `documents`."""
    import sqlite3

    database = sqlite3.connect(name)
    database.row_factory = sqlite3.Row
    for number, row in enumerate(database.execute("SELECT * FROM documents"), start=1):
        yield Row(number, dict(row))
    database.close()
'''

NUMPY_FORMAT = '''"""An archive of NumPy arrays."""

import numpy as np

from gpt.files import atomic_write


def write(config, weights, folder):
    """Write model.npz, with the names of a GPT."""
    with atomic_write(folder / "model.npz", "wb") as file:
        np.savez(file, **{name: tensor.numpy() for name, tensor in weights.items()})
'''

TOKENIZE_REQUEST = '''

class TokenizeRequest(_Form):
    """The body of `POST /tokenize`."""

    text: str
'''

TOKENIZE = """    async def tokenize(self, request: Request) -> JsonObject:
        body = await self.limits.read_body(request)
        form = TokenizeRequest.model_validate_json(body)
        return {"tokens": await self.work_in_thread(body, self.tokenizer.encode, form.text)}

"""

CHANGES: dict[str, dict[str, Texts]] = {
    "rotary positions": {
        "gpt/attention/multi_head.py": before(
            "        if cache is not None:\n            key, value = cache.update(",
            "        first = 0 if cache is None else cache.length\n"
            "        query, key = _rotated(query, first), _rotated(key, first)\n",
        )
        | {"": ROTATED}
    },
    "SwiGLU": {
        "gpt/model.py": {
            'nn.GELU(approximate="none" if config.exact_gelu else "tanh")': "nn.SiLU()",
            "self.activation(self.up(x))": "self.activation(self.gate(x)) * self.up(x)",
        }
        | before(
            "        self.down = nn.Linear(",
            "        self.gate = nn.Linear(config.emb_dim, 4 * config.emb_dim)\n",
        )
    },
    "another optimizer": {
        "gpt/training/optimizers/recipe.py": after('Literal["muon", "adamw"', ', "sgd"')
        | before(
            '    if config.name == "adamw":\n',
            '    if config.name == "sgd":\n'
            "        sgd = torch.optim.SGD([main, *rest], momentum=config.momentum)\n"
            '        return CombinedOptimizer(Part(sgd, ("momentum_buffer",)))\n',
        )
    },
    "another schedule": {
        "gpt/training/schedule.py": after('"cosine", "constant"', ', "root"')
        | before(
            '    if schedule == "constant":\n',
            '    if schedule == "root":\n        return float((step + 1) ** -0.5)\n',
        )
    },
    "a second loss term": {
        "gpt/training/module.py": after(
            "        return self.cross_entropy(batch)", " + self.model.final_norm.weight.square().mean()"
        )
    },
    "a new metric": {
        "gpt/training/module.py": after('"val_bits_per_byte", "val_standard_error"', ', "val_bits_per_token"')
        | before(
            "        self.log_dict(metrics)\n", "        metrics['val_bits_per_token'] = loss / math.log(2)\n"
        )
    },
    "a new column of metrics.csv": {
        "gpt/run/record.py": before("    *VALIDATED,\n)", '    "train_perplexity",\n')
        | after('"gradient_norm": norm', ', "train_perplexity": math.exp(loss)')
    },
    "another stop rule": {
        "gpt/run/options.py": before(
            "    model: ModelOptions = ModelOptions()\n",
            '    target_loss: float | None = None\n    """Stop at a val_loss below this."""\n',
        ),
        "gpt/run/limits.py": after("patience: int | None", ", target: float | None")
        | after("        self.patience = patience\n", "        self.target = target\n")
        | after("LossHistory(run, options.early_stopping", ", options.target_loss")
        | before(
            "        if self.patience is not None and run.stalled",
            "        if self.target is not None and run.best_loss and run.best_loss < self.target:\n"
            "            return f'val_loss is below {self.target}'\n",
        ),
    },
    "another corpus": {"data/mine.yaml": {"": "about: a text\ncorpus:\n  files: text.txt\n"}},
    "another corpus format": {
        "gpt/data/formats.py": after('".parquet": "parquet"', ', ".sqlite": "sqlite"'),
        "gpt/data/rows.py": before(
            '    elif kind == "parquet":\n        yield',
            '    elif kind == "sqlite":\n        yield from _sqlite_rows(name)\n',
        )
        | {"": SQLITE_ROWS},
    },
    "another sampling method": {
        "gpt/generation/sampling.py": after('    "min_p": (0, 1),\n', '    "epsilon": (0, 1),\n')
        | before(
            "\n    def __post_init__(self) -> None:\n        for name, (low",
            "    epsilon: float = 0.0  # draw from tokens at least this likely\n",
        )
        | before(
            "    return logits\n\n\ndef _nucleus_edge",
            "    likely = logits.softmax(-1) >= sampling.epsilon\n"
            "    likely |= logits == logits.amax(dim=-1, keepdim=True)\n"
            "    logits = logits.masked_fill(~likely, -torch.inf)\n",
        ),
        "gpt/generation/write.py": after("    min_p: float | None = None,\n", "    epsilon: float = 0.0,\n")
        | before(
            "        repetition_penalty: a value",
            "        epsilon: draw from tokens at least this likely.\n",
        )
        | after("min_p=min_p", ", epsilon=epsilon"),
    },
    "another export": {
        "gpt/weights/formats/numpy.py": {"": NUMPY_FORMAT},
        "gpt/weights/commands.py": after("import book, gguf, hf, nanogpt", ", numpy")
        | after('Literal["hf", "nanogpt", "book", "gguf"', ', "numpy"')
        | after('"book": book.write', ', "numpy": numpy.write'),
    },
    "a new HTTP endpoint": {
        "gpt/serve/requests.py": {"": TOKENIZE_REQUEST},
        "gpt/serve/app.py": before("log_probabilities\nfrom", "TokenizeRequest, ")
        | after('    app.get("/about")(service.about)\n', '    app.post("/tokenize")(service.tokenize)\n')
        | before("    def about(self)", TOKENIZE),
    },
}


def as_named(file: str) -> str:
    """A file as the table of docs/design.md names it; a new one is named by its folder."""
    return file if (ROOT / file).exists() else f"{Path(file).parent.as_posix()}/"


def test_the_table_has_the_files_of_each_change_and_no_change_needs_more_than_two():
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = text.split("| change | files |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)[1:]  # without the line below the header
    named = {name: set(re.findall(r"`([\w./]+)`", files)) for name, files in rows}
    assert named == {name: set(map(as_named, files)) for name, files in CHANGES.items()}
    assert max(map(len, named.values())) <= 2


def changed(source: str, texts: Texts) -> str:
    """The source of a file with these changes."""
    for old, new in texts.items():
        assert old == "" or source.count(old) == 1, old
        source = source.replace(old, new) if old else source + new
    return source


def diff_of(change: str) -> str:
    """A change as a diff without context and line numbers."""
    lines = []
    for file, texts in CHANGES[change].items():
        source = (ROOT / file).read_text("utf-8")
        new = changed(source, texts)
        lines += difflib.unified_diff(source.splitlines(), new.splitlines(), file, file, n=0, lineterm="")
    return "".join("@@\n" if line.startswith("@@") else f"{line.rstrip()}\n" for line in lines)


def test_the_diffs_that_the_documents_show_are_these_changes():
    text = (ROOT / "docs" / "research.md").read_text("utf-8")
    shown = dict(re.findall(r"^\*\*(.+?)\*\*:\n\n```diff\n(.*?)```", text, re.M | re.S))
    assert len(shown) == text.count("```diff") > 2
    assert shown == {name: diff_of(name) for name in shown}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a copy of the package, and a text."""
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    for folder in ("gpt", "configs", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "text.txt").write_text("".join(lines()), "utf-8")
    return tmp_path


def make(change: str, package: Path) -> None:
    """Make a change in a copy of the package."""
    for name, texts in CHANGES[change].items():
        file = package / name
        source = file.read_text("utf-8") if file.exists() else ""
        file.write_text(changed(source, texts), "utf-8")


def lines() -> list[str]:
    return [f"Word {n * 7919 % 251} comes after word {n}.\n" for n in range(2000)]


# A fork has the modules of this checkout, from which it was started.
FORGET = """import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "gpt"]:
    del sys.modules[name]
sys.path.insert(0, ".")
"""


def execute(package: Path, program: str, status: int = 0) -> str:
    """Run a Python program whose `gpt` is the copy, and return its output. Expect this exit status."""
    files = package / "output.txt", package / "errors.txt"
    with files[0].open("wb") as output, files[1].open("wb") as errors:
        streams = {1: output.fileno(), 2: errors.fileno()}
        with forked(code=FORGET + program, streams=streams, folder=package) as process:
            process.join()
    assert process.exitcode == status, files[1].read_text("utf-8")
    return files[0].read_text("utf-8")


def gpt(package: Path, *commands: str, status: int = 0) -> str:
    """Run commands one after another. Expect this as the highest exit status."""
    words = [command.split() for command in commands]
    return execute(package, f"from gpt.cli import main; sys.exit(max(map(main, {words})))", status)


def column(package: Path, name: str) -> list[float]:
    """A column of metrics.csv, where it has values."""
    with open(package / "runs/changed/metrics.csv", encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def train(change: str, package: Path, options: str = "", *more: str, steps: int = 10) -> None:
    """Make a change, train with it, and run more commands. Expect a loss that falls over so many steps."""
    make(change, package)
    gpt(package, f"{FIT} {options}", *more)
    losses = column(package, "train_loss")
    assert len(losses) == steps and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["rotary positions", "SwiGLU"])
def test_another_architecture_trains_and_writes(change, package):
    train(change, package, "", "generate --checkpoint runs/changed --max_new_tokens 4")
    gpt(package, "export --checkpoint runs/changed", status=2)  # other programs know GPT-2 only


@pytest.mark.slow
def test_another_optimizer_trains_and_resumes(package):
    resume = "fit --resume runs/changed --trainer.max_steps 12"
    train("another optimizer", package, "--model.optimizer.name sgd", resume, steps=12)


@pytest.mark.slow
def test_another_stop_rule_ends_the_run(package):
    train("another stop rule", package, "--trainer.val_check_interval 4 --target_loss 100", steps=4)


@pytest.mark.slow
def test_another_corpus_is_read(package):
    train("another corpus", package, "--data.corpus mine")


@pytest.mark.slow
def test_another_schedule_decides_the_learning_rate(package):
    train("another schedule", package, "--model.optimizer.schedule root --model.optimizer.warmup_steps 0")
    assert column(package, "learning_rate") == pytest.approx([5e-3 / update**0.5 for update in range(1, 11)])


RECORDED = {
    "a new metric": ("val_bits_per_token", "val_loss", lambda loss: loss / math.log(2)),
    "a new column of metrics.csv": ("train_perplexity", "train_loss", math.exp),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", RECORDED)
def test_a_new_figure_is_recorded(change, package):
    train(change, package)
    name, source, formula = RECORDED[change]
    assert column(package, name) == pytest.approx(list(map(formula, column(package, source))))


@pytest.mark.slow
def test_a_second_loss_term_is_added(package):
    train("a second loss term", package)
    assert column(package, "train_loss")[0] == pytest.approx(math.log(SIZES["vocab_size"]) + 1, abs=0.1)


@pytest.mark.slow
def test_another_corpus_format_is_read(package):
    with closing(sqlite3.connect(package / "text.sqlite")) as database:
        database.execute("CREATE TABLE documents (text TEXT)")
        database.executemany("INSERT INTO documents VALUES (?)", [[line * 8] for line in lines()])
        database.commit()
    train("another corpus format", package, "--data.corpus text.sqlite --data.most_bytes 50000")


@pytest.fixture
def model(package: Path) -> GPT:
    """A model in the folder `model`, of a size whose tokenizer needs no file."""
    model = GPT(GPTConfig(**SIZES))
    model.save_pretrained(package / "model")
    return model


@pytest.mark.slow
def test_another_sampling_method_chooses_tokens(package, model):
    make("another sampling method", package)
    command = "generate --checkpoint model --max_new_tokens 8 --prompt Word --seed 0 --top_k null"
    drawn, filtered, greedy = (
        gpt(package, f"{command} {option}") for option in ("--epsilon 0", "--epsilon 0.5", "--temperature 0")
    )
    assert filtered == greedy != drawn  # no token but the likeliest has a probability of one half


@pytest.mark.slow
def test_another_export_is_written(package, model):
    make("another export", package)
    gpt(package, "export --checkpoint model --output exported --format numpy")
    with np.load(package / "exported/model.npz") as arrays:
        np.testing.assert_array_equal(arrays["final_norm.weight"], model.final_norm.weight.detach())
        assert {"token_embedding.weight", "blocks.0.attention.W_query.weight"} <= set(arrays)


@pytest.mark.slow
def test_a_new_endpoint_answers(package, model):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    pytest.importorskip("httpx", reason="httpx is not installed")
    make("a new HTTP endpoint", package)
    program = """
from fastapi.testclient import TestClient
from gpt.serve.app import create_app
from gpt.weights.load import load

client = TestClient(create_app(*load("model")))
print(client.post("/tokenize", json={"text": "Hi"}).text)
"""
    assert execute(package, program) == '{"tokens":[39,72]}\n'
