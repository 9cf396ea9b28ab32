"""Someone edits the arithmetic in a copy of the package: texts are greedy by its own `model(tokens)`.

What other programs would compute otherwise is not exported.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt

EDITS = {
    "another activation": (
        "model.py",
        'self.activation = nn.GELU(approximate="none" if config.exact_gelu else "tanh")',
        "self.activation = nn.SiLU()",
    ),
    "a scaled residual": (
        "model.py",
        "return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
        "return x + 0.5 * self.dropout(self.feed_forward(self.feed_forward_norm(x)))",
    ),
    "capped logits": (
        "model.py",
        "return self.head(features if last is None else features[:, -last:])",
        "return torch.tanh(self.head(features if last is None else features[:, -last:])).roll(1, -1)",
    ),
    "an added layer": (
        "model.py",
        "self.final_norm = nn.LayerNorm(config.emb_dim)",
        "self.final_norm = nn.Sequential(nn.LayerNorm(config.emb_dim), nn.Linear(64, 64))",
    ),
    "rotary positions": (
        "attention/multi_head.py",
        "        if cache is not None:\n            key, value = cache.update(key, value)  # (B, H, S, K)\n",
        "        query, key = _rotated(query), _rotated(key)\n"
        "        if cache is not None:\n            key, value = cache.update(key, value)  # (B, H, S, K)\n",
    ),
}
ROTATED = '''

def _rotated(x):
    """Su et al. 2021: pairs of numbers turn by an angle that grows from the first token given."""
    half = x.shape[3] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)
'''

# Runs in the copy: writes a checkpoint, and prints texts by the model itself, by `generate` and by a server.
PROGRAM = """
import json, sys, torch
from pathlib import Path
from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import build
from gpt.serve.app import create_app
from gpt.share.export import export_weights
from tests_server import talk

torch.manual_seed(0)
torch.set_num_threads(1)
config = GPTConfig(vocab_size=257, context_length=64, emb_dim=64, num_heads=2, num_layers=2)
model = GPT(config).eval()
for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.2)
prompts = [[5, 6, 7], [250, 3] * 10]
with torch.no_grad():
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(24):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1, :257].argmax()))
        expected.append(tokens)
if len(sys.argv) > 1:
    build.build()
written = generate(model, prompts, max_new_tokens=24, temperature=0)

async def ask(client):
    form = {"model": "tiny", "prompt": prompts, "max_tokens": 24, "temperature": 0, "logprobs": 1}
    answer = await client.post("/v1/completions", json=form)
    return [choice["text"] for choice in answer.json()["choices"]]

tokenizer = Tokenizer("gpt2", vocab_size=257)
served = talk(create_app(model, tokenizer, name="tiny"), ask)
texts = [tokenizer.decode(row[len(p):row.index(256, len(p))] if 256 in row[len(p):] else row[len(p):])
         for row, p in zip(expected, prompts)]
model.save_pretrained("weights")
refused = ""
try:
    export_weights("weights", Path("page.html"), "html")
except InputError as error:
    refused = str(error)
print(json.dumps([expected, written, texts, served, refused, Path("page.html").exists()]))
"""


@pytest.fixture
def copy(tmp_path) -> Path:
    """A folder with the package and what talks to a server without a socket."""
    shutil.copytree(Path(gpt.__file__).parent, tmp_path / "gpt", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests_server.py").write_text(
        "import asyncio, httpx\n"
        "def talk(app, use):\n"
        "    async def main():\n"
        "        async with app.router.lifespan_context(app), httpx.AsyncClient(\n"
        "                transport=httpx.ASGITransport(app), base_url='http://test', timeout=60) as client:\n"
        "            return await use(client)\n"
        "    return asyncio.run(main())\n",
        encoding="utf-8",
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EDITS, "nothing"])
def test_an_edited_package_writes_what_its_model_computes(name, copy):
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    if name in EDITS:
        file, before, after = EDITS[name]
        path = copy / "gpt" / file
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1
        path.write_text(source.replace(before, after) + ROTATED * ("_rotated" in after), encoding="utf-8")
    build = ["build"] if shutil.which("c++") else []
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *build],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    expected, written, texts, served, refused, exported = json.loads(done.stdout.splitlines()[-1])
    assert written == expected
    assert served == texts
    assert exported == (name == "nothing")
    assert exported or "the edited gpt/" in refused
    told = [line for line in done.stderr.splitlines() if line.startswith("gpt: ")]
    program = "gpt: PyTorch decodes, as the compiled program does not compute this model: its l"
    assert [line.startswith(program) for line in told[:1]] == [True] * bool(build and name != "nothing")
    anew = "gpt: each token reads its text again"
    assert [line.startswith(anew) for line in told[1:]] == [True] * (name == "rotary positions")
