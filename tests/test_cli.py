import gc
import subprocess
import sys
from typing import Any

import pytest
import yaml
from tiny_runs import TEXT, TINY

from gpt.cli import COMMANDS, main, message
from gpt.files import atomic_write

# What `gpt fit` imports beside Lightning and its imports: each takes little time.
LIGHT = {"PIL", "docstring_parser", "gpt", "jsonargparse", "matplotlib", "regex", "safetensors", "tiktoken"}
LIGHT |= {"tiktoken_ext", "tokenizers", "torch", "typeshed_client", "yaml"}

PRINT_CONFIG = "fit no-such.txt --config quick --print_config"  # the text is not read
# A program, and what it does not import.
PROGRAMS = {
    "help": ("from gpt.cli import main; import gpt; main(['--help'])", "torch numpy importlib.metadata"),
    "the options of fit": (f"from gpt.cli import main; assert main({PRINT_CONFIG.split()}) == 0", "datasets"),
    "the package": ("import gpt.generation, gpt.plan.command; from gpt import GPT, generate", "datasets"),
}


def run(program: str, **how: object) -> "subprocess.CompletedProcess[str]":
    """Run a program whose assertions have to hold, in a process of its own."""
    how |= {"capture_output": True, "encoding": "utf-8"}
    done = subprocess.run([sys.executable, "-c", program], check=False, **how)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("program", "others"), PROGRAMS.values(), ids=PROGRAMS)
def test_nothing_heavy_is_imported_for(program, others):
    heavy = {"lightning", "transformers", "matplotlib", *others.split()}
    run(f"{program}; import sys; heavy = {heavy} & set(sys.modules); assert not heavy, heavy")


@pytest.mark.slow
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
    parts_of_torch, *others = run(program, cwd=tmp_path).stdout.splitlines()[-1].split()
    assert int(parts_of_torch) < 30  # its compiler, for example, has hundreds
    assert set(others) <= LIGHT, set(others) - LIGHT


def test_pythons_collector_leaves_out_what_a_process_of_its_own_has_imported(workplace):
    before = gc.get_freeze_count()
    assert main(["runs"]) == 2  # in a notebook's process, which goes on
    assert gc.get_freeze_count() == before
    call = "import gc, sys; from gpt.cli import main; sys.argv[1:] = ['runs']; main()"
    run(f"{call}; assert gc.isenabled() and gc.get_freeze_count()")


@pytest.mark.parametrize("command", ["plan novl.txt", "fit --minutes 1 --data.corpus=novl.txt"])
def test_a_text_is_looked_for_before_torch_is_imported(command, tmp_path):
    (tmp_path / "novel.txt").write_text("text", "utf-8")
    call = f"import sys; from gpt.cli import main; assert main({command.split()}) == 2"
    done = run(f"{call}; assert not {{'torch', 'lightning'}} & set(sys.modules)", cwd=tmp_path)
    assert done.stderr == f"gpt {command.split()[0]}: no corpus 'novl.txt': did you mean novel.txt?\n"


def test_the_help_lists_every_command_and_the_version_is_printed(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert "\n'gpt --version' prints the version.\n" in out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gpt 0.")


BAD = {
    "name with a line break": ("evaluate --checkpoint x\ny", "x"),
    "unknown command": ("frobnicate", "unknown command, expected one of fit"),
    "mistyped command": ("genrate", "unknown command, did you mean generate?"),
    "unknown option": ("generate --promt x", "did you mean --prompt?"),
    "option with dashes": ("prepare tokens --vocab-size 5", "did you mean --vocab_size?"),
    "option without its value, before another": ("generate --prompt --interactive", "prompt"),
    "value of another type": ("generate --max_new_tokens many", "max_new_tokens"),
    "no run yet": ("generate", "gpt fit"),
    "checkpoint that is not one": ("generate --checkpoint junk", "junk"),
    "text shorter than the context": ("fit short.txt --config quick", "128"),
    "missing config": ("fit --config nope.yaml", "nope.yaml"),
    "wrong config key": ("fit --config bad.yaml", "confg"),
    "config that is not YAML": ("fit --config worse.yaml", "config"),
    "config that is not text": ("prepare --config binary.yaml", "utf-8"),
    "unwritable folder": ("fit --data.corpus text.txt --config quick", "runs"),
}


@pytest.mark.parametrize(("command", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_status_2(command, named, workplace, refusal):
    texts = {
        "junk": "no checkpoint",
        "short.txt": "too short",
        "bad.yaml": "model:\n  confg: 1\n",
        "worse.yaml": "model: [",
        "runs": "a file where a folder would be",
    }
    for name, text in texts.items():
        (workplace / name).write_text(text, "utf-8")
    (workplace / "binary.yaml").write_bytes(b"corpus: \xff\xfe")
    before = {path: path.stat().st_mtime_ns for path in workplace.iterdir()}
    told = refusal(*command.split(" "))
    assert told.startswith(f"gpt {command.split()[0]}: ") and named in told
    assert {path: path.stat().st_mtime_ns for path in workplace.iterdir()} == before


@pytest.mark.parametrize(("word", "status", "told"), [("--help", 0, b""), ("fitt", 2, b"unknown command")])
def test_python_runs_the_package_as_the_command_whose_reader_may_leave(word, status, told):
    """`gpt ... | head -1` closes the pipe early."""
    command = [sys.executable, "-m", "gpt", word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == status
    assert told in err if told else err == b""


def test_a_failed_rename_names_the_target(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as error, atomic_write(tmp_path / "folder"):
        pass
    assert message(error.value).startswith(f"{tmp_path / 'folder'}: ")


# Options that are text, and those that are given without a name.
TEXTS = {
    "generate": ("prompt checkpoint stop", ""),
    "prepare": ("output vocabulary text_column template.user", "corpus"),
    "plot": ("output", "runs"),
}


def printed_options(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The options that a command line means."""
    with pytest.raises(SystemExit) as exit_:
        main([*words[:1], "--print_config", *words[1:]])
    assert exit_.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("typed", ["###", "null", "~", "[end]", '["a"]', "{a: 1}", "- a", "---", "1", "a: b"])
@pytest.mark.parametrize("command", TEXTS)
def test_a_text_is_taken_as_it_is_typed(command, typed, capsys):
    """Not as YAML, in which the first three of them mean nothing and the fourth is a list."""
    named, unnamed = map(str.split, TEXTS[command])
    words = [word for name in named for word in (f"--{name}", typed)]
    words += ["--", typed] if unnamed else []
    options = printed_options(capsys, command, *words)
    for name in (*named, *unnamed):
        group, _, last = name.rpartition(".")
        expected = [typed] if name in ("stop", "runs") else typed
        assert (options[group] if group else options)[last] == expected


def test_several_runs_are_words_and_a_flag_stands_alone(capsys):
    assert printed_options(capsys, "plot", "a", "b", "--x", "tokens")["runs"] == ["a", "b"]
    options = printed_options(capsys, "generate", "--interactive", "--show_copied")
    assert options["interactive"] is options["show_copied"] is True


NO_TEXT = "expected a list of text, got null in it"
ALIAS = "it has an alias (*), write out what it stands for"  # aliases of aliases expand without bound
FORMATS = "one of 'hf', 'nanogpt', 'book', 'gguf', 'html'"
# A command, the file for its --config, and what is said of it.
REFUSED_FILES = [
    ("generate", "prompt: null", "--prompt: expected text, got null\n"),
    ("generate", "num_samples: null", "--num_samples: expected int, got null\n"),
    ("generate", "interactive: null", "--interactive: expected bool, got null\n"),
    ("serve", "host: null", "--host: expected text, got null\n"),
    ("plot x", "output: null", "--output: expected text, got null\n"),
    ("attention", "text: null", "--text: expected text, got null\n"),
    ("prepare text.txt", "template: null", "--template: expected a mapping, got null\n"),
    ("export", "format: null", f"--format: expected {FORMATS}, got null\n"),
    ("prepare text.txt", "template: {user: null}", "the template's user must be a text"),
    ("generate", "stop: [a, null]", NO_TEXT),
    ("generate", "stop: &a [x]\nprompt: *a\n", ALIAS),
]


@pytest.mark.parametrize(("command", "file", "told"), REFUSED_FILES)
def test_a_file_of_options_with_null_or_an_alias_where_a_value_is_needed_is_refused(
    command, file, told, workplace, refusal
):
    (workplace / "options.yaml").write_text(file, "utf-8")
    line = refusal(f"{command} --config options.yaml")
    assert line.startswith(f"gpt {command.split()[0]}: ") and told in line


def test_null_in_a_config_is_taken_where_no_value_is_needed(workplace, refusal):
    (workplace / "null.yaml").write_text("checkpoint: null\ntop_k: null\nstop: null\n", "utf-8")
    assert "no checkpoint under runs/" in refusal("generate --config null.yaml")


@pytest.mark.parametrize(
    ("written", "typed", "expected"),
    [("[a, b]", "", ["a", "b"]), ("ab", "", ["ab"]), ("[a]", "[x]", ["a", "[x]"]), ("[7]", "", ["7"])],
)
def test_several_texts_of_a_config_stay_apart(written, typed, expected, workplace, monkeypatch):
    import gpt.generation.write

    def write(stop: list[str] | None = None) -> None:
        """Keep what it is given.

        Args:
            stop: texts.
        """
        given.append(stop)

    given: list[object] = []
    monkeypatch.setattr(gpt.generation.write, "write", write)
    (workplace / "stop.yaml").write_text(f"stop: {written}", "utf-8")
    assert main(["generate", "--config", "stop.yaml", *(["--stop", typed] if typed else [])]) == 0
    assert given == [expected]
