import subprocess
import sys

import pytest
import yaml
from tiny_runs import TEXT, TINY

from gpt.cli import COMMANDS, main, message
from gpt.files import atomic_write

HELP = "import gpt, gpt.cli; gpt.cli.main(['--help'])"
ALONE = "import gpt.cli, sys; sys.argv[1:] = ['runs']; gpt.cli.main()"
CALLED = "import gpt.cli; gpt.cli.main(['runs'])"
FIT_MISTYPED = "import gpt.cli; assert gpt.cli.main(['fit', '--data.batchsize', '3']) == 2"
FIT_CONFIG = "import gpt.cli; assert gpt.cli.main(['fit', '--config', 'quick', '--print_config']) == 0"
PACKAGE = "import gpt.generation, gpt.plan.command; from gpt import GPT, Tokenizer, generate"

# What `gpt fit` imports beside Lightning and its imports: each takes little time.
LIGHT = {"PIL", "docstring_parser", "gpt", "jsonargparse", "matplotlib", "regex", "safetensors", "tiktoken"}
LIGHT |= {"tiktoken_ext", "tokenizers", "torch", "typeshed_client", "yaml"}


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        pytest.param(HELP, "torch lightning datasets numpy matplotlib importlib.metadata", id="help"),
        pytest.param(FIT_MISTYPED, "lightning datasets transformers matplotlib", id="fit, a wrong option"),
        pytest.param(FIT_CONFIG, "lightning datasets transformers matplotlib", id="fit, its options"),
        pytest.param(PACKAGE, "lightning datasets transformers matplotlib", id="package"),
    ],
)
def test_nothing_heavy_is_imported_for(program, heavy):
    check = f"import sys; heavy = set({heavy.split()}) & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", f"{program}; {check}"], check=True, stdout=subprocess.DEVNULL)


def test_a_run_of_one_step_imports_little_beside_lightning(tmp_path):
    """What Lightning imports by itself, torch's compiler and torchmetrics among it, cannot be left out."""
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    program = f"""
import sys, lightning.pytorch
from gpt.cli import main

before = set(sys.modules)
assert main({TINY} + ["--trainer.max_steps", "1", "--data.vocabulary", "learn"]) == 0
added = [name.partition(".")[0] for name in set(sys.modules) - before]
print(added.count("torch"), *set(added) - sys.stdlib_module_names)
"""
    process = [sys.executable, "-c", program]
    done = subprocess.run(process, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True)
    parts_of_torch, *others = done.stdout.splitlines()[-1].split()
    assert int(parts_of_torch) < 30  # its compiler, for example, has hundreds
    assert set(others) <= LIGHT, set(others) - LIGHT


@pytest.mark.parametrize(("program", "frozen"), [(ALONE, True), (CALLED, False)])
def test_pythons_collector_leaves_out_what_a_process_of_its_own_has_imported(program, frozen):
    check = f"import gc; assert gc.isenabled() and bool(gc.get_freeze_count()) == {frozen}"
    subprocess.run([sys.executable, "-c", f"{program}; {check}"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "command", ["fit novl.txt", "plan novl.txt", "fit --minutes 1 --data.corpus=novl.txt"]
)
def test_a_text_is_looked_for_before_torch_is_imported(command, tmp_path):
    (tmp_path / "novel.txt").write_text("text", "utf-8")
    program = f"import sys; from gpt.cli import main; assert main({command.split()}) == 2"
    check = "assert not {'torch', 'lightning'} & set(sys.modules)"
    process = [sys.executable, "-c", f"{program}; {check}"]
    done = subprocess.run(process, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True)
    assert done.stderr == f"gpt {command.split()[0]}: no corpus 'novl.txt': did you mean novel.txt?\n"


def test_the_help_lists_every_command_and_the_version_is_printed(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gpt 0.")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_each_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: gpt {command}" in out
    assert f"gpt {command} " in out.split("\n\n", 1)[1]


def test_what_reads_no_text_needs_none():
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "no-such.txt", "--help"])
    assert exit_.value.code == 0
    assert main(["fit", "no-such.txt", "--config", "quick", "--print_config"]) == 0


BAD = {
    "name with a line break": ("evaluate --checkpoint x\ny", "x"),
    "unknown command": ("frobnicate", "unknown command, expected one of fit"),
    "mistyped command": ("genrate", "unknown command, did you mean generate?"),
    "unknown option": ("generate --promt x", "did you mean --prompt?"),
    "option with dashes": ("prepare tokens --vocab-size 5", "did you mean --vocab_size?"),
    "option without its value, before another": ("generate --prompt --interactive", "prompt"),
    "value of another type": ("generate --max_new_tokens many", "max_new_tokens"),
    "no run yet": ("generate", "gpt fit"),
    "no such checkpoint": ("generate --checkpoint nope.safetensors", "nope.safetensors"),
    "checkpoint that is not one": ("generate --checkpoint junk", "junk"),
    "a torch file of something else": ("generate --checkpoint other.pt", "other.pt"),
    "validated what is not a checkpoint": ("validate --ckpt_path junk", "junk"),
    "missing corpus": ("fit --data.corpus nope.txt", "nope.txt"),
    "empty corpus": ("fit --data.corpus empty.txt", "empty.txt"),
    "text too short to hold some out": ("fit --data.corpus short.txt", "short.txt"),
    "text shorter than the context": ("fit short.txt --config quick", "128"),
    "missing config": ("fit --config nope.yaml", "nope.yaml"),
    "wrong config key": ("fit --config bad.yaml", "confg"),
    "config that is not YAML": ("fit --config worse.yaml", "config"),
    "config that is not text": ("prepare --config binary.yaml", "utf-8"),
    "heads that do not divide": ("fit --model.config.num_heads 5 --model.config.emb_dim 96", "num_heads 5"),
    "negative rate": ("fit --model.optimizer.lr -1", "lr"),
    "run name with a path": ("fit --run ../elsewhere", "../elsewhere"),
    "unwritable folder": ("fit --data.corpus text.txt --config quick", "runs"),
}


@pytest.mark.parametrize(("command", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(command, named, tmp_path, monkeypatch, capfd, text_file):
    import torch

    monkeypatch.chdir(tmp_path)
    texts = {
        "junk": "no checkpoint",
        "empty.txt": "",
        "short.txt": "too short",
        "bad.yaml": "model:\n  confg: 1\n",
        "worse.yaml": "model: [",
        "runs": "a file where a folder would be",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "binary.yaml").write_bytes(b"corpus: \xff\xfe")
    torch.save({"weights": torch.zeros(1)}, tmp_path / "other.pt")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert main(command.split(" ")) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"gpt {command.split()[0]}: ")
    assert err.count("\n") == 1 and named in err, err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """`gpt ... | head -1` closes the pipe early."""
    code = "import sys; from gpt.cli import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()
    process.stderr.close()


def test_python_runs_the_package_as_the_command():
    done = subprocess.run([sys.executable, "-m", "gpt", "fitt"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"unknown command" in done.stderr


def test_a_failed_rename_names_the_target(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as error, atomic_write(tmp_path / "folder"):
        pass
    assert message(error.value).startswith(f"{tmp_path / 'folder'}: ")


TEXTS = {
    "generate": ["prompt", "checkpoint", "stop"],
    "serve": ["checkpoint", "host", "name", "api_key"],
    "attention": ["checkpoint", "text", "output"],
    "evaluate": ["checkpoint", "data"],
    "import": ["source", "output"],
    "export": ["checkpoint", "output", "push"],
    "prepare": ["corpus", "output", "vocabulary", "text_column", "template.user"],
    "plot": ["runs", "output"],
}


@pytest.mark.parametrize(
    "typed", ["###", "null", "~", "[end]", "'a'", '"a"', '["a"]', "{a: 1}", "- a", "---", "1", "&a", "a: b"]
)
@pytest.mark.parametrize("command", TEXTS)
def test_a_text_is_taken_as_it_is_typed(command, typed, capsys):
    """Not as YAML, in which the first three of them mean nothing and the fourth is a list."""
    positional = {"corpus", "source", "runs"}
    words = [word for name in TEXTS[command] if name not in positional for word in (f"--{name}", typed)]
    words += ["--", typed] if positional & set(TEXTS[command]) else []
    with pytest.raises(SystemExit) as exit_:
        main([command, "--print_config", *words])
    assert exit_.value.code == 0
    options = yaml.safe_load(capsys.readouterr().out)
    for name in TEXTS[command]:
        group, _, last = name.rpartition(".")
        expected = [typed] if name in ("stop", "runs") else typed
        assert (options[group] if group else options)[last] == expected


def test_several_runs_are_words_and_a_flag_stands_alone(capsys):
    with pytest.raises(SystemExit):
        main(["plot", "a", "b", "--print_config", "--x", "tokens"])
    assert yaml.safe_load(capsys.readouterr().out)["runs"] == ["a", "b"]
    with pytest.raises(SystemExit):
        main(["generate", "--print_config", "--interactive", "--show_copied"])
    options = yaml.safe_load(capsys.readouterr().out)
    assert options["interactive"] is options["show_copied"] is True
