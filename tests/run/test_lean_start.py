"""What a command imports decides how long it takes to start: each of these libraries takes 0.1 to 1.5 s."""

import json
import subprocess
import sys

UNUSED = {"torch._dynamo", "transformers", "scipy", "matplotlib.pyplot", "datasets", "pyarrow", "sympy"}
CODE = """
import json, sys
from gpt.cli import main
assert main(sys.argv[1:]) == 0
print(json.dumps(sorted(sys.modules)))
import torch._dynamo  # the true one
assert torch._dynamo.config.optimize_ddp
"""


def imported(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], check=False, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_training_and_generating_load_only_what_they_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("One two three. " * 200, encoding="utf-8")
    shape = "{vocab_size: 300, context_length: 8, emb_dim: 8, num_heads: 2, num_layers: 1}"
    options = ("--data.corpus", "text.txt", "--data.vocabulary", "gpt2:300", "--trainer.max_steps", "2")
    modules = imported("fit", *options, "--model.config", shape, "--trainer.val_check_interval", "2")
    assert not modules & UNUSED
    assert not imported("generate", "--max_new_tokens", "3") & (UNUSED | {"lightning", "matplotlib"})
