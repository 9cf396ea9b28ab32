"""The command line of `gpt fit` and `gpt validate`, and what it starts."""

import os
from pathlib import Path

import pytest
from tiny_runs import checkpoint, contents, fit, gpt, result

from gpt.data.prepare import prepare
from gpt.run.arguments import scan
from gpt.run.options import OPTIONS, Options
from gpt.run.start import start

FEW = "--model.optimizer.name adamw --trainer.max_steps 2 --trainer.val_check_interval 2"


def options_of(command: str) -> Options:
    return start("fit", command.split()).options


def test_the_config_of_a_resumed_run_repeats_it_wherever_it_lies(workplace):
    assert fit(f"{FEW} --run r") == 0
    assert gpt("fit --resume runs/r --trainer.max_steps 4") == 0
    Path("runs/r/config.yaml").rename("moved.yaml")
    assert gpt("fit --config moved.yaml --run again") == 0
    assert checkpoint("again").run.step == 4
    assert result("again")[1][0]["step"] == "2"  # from the beginning


@pytest.mark.parametrize(
    "command",
    [
        f"fit old {FEW} --run r --data.val_fraction 0.5",
        "fit --resume runs/mine --data.corpus old --data.text_column text",
        "fit old --minutes 1 --data.most_bytes 1000",
        "plan old --data.skip_bad_rows 1",
    ],
)
def test_typed_options_of_reading_are_refused_for_a_prepared_folder(command, mine, refusal):
    prepare("text.txt", "old", vocab_size=300)
    assert "old is prepared already: to have it with another " in refusal(command)


def test_a_recipe_and_a_resumed_run_may_have_options_of_reading_for_a_prepared_folder(workplace, capsys):
    """As `docs/cluster.md` trains on one with the recipes of GPT-2."""
    prepare("text.txt", "old", vocab_size=300)
    Path("recipe.yaml").write_text("data: {val_fraction: 0.4}", "utf-8")
    command = f"--config recipe.yaml --data.corpus old {FEW} --run r --resume auto_or_new"
    assert fit(command) == 0
    assert "old is prepared already, so val_fraction 0.4 of a config" in capsys.readouterr().err
    assert gpt("fit --resume runs/r --trainer.max_steps 4") == 0
    assert gpt("validate runs/r") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--resume runs/mine --run other", "--run other is not the run that is resumed, runs/mine"),
        ("--resume=", "no checkpoint in ."),
        ("--resume runs/mine --ckpt_path runs/mine", "--resume and --ckpt_path name a checkpoint: give only"),
        ("--run=", "expected a plain folder name for --run, got ''"),
    ],
)
def test_what_is_mistyped_or_contradicts_itself_starts_no_run(options, message, mine, refusal):
    assert message in refusal(f"fit --data.corpus text.txt {options}")
    assert os.listdir("runs") == ["mine"]


def test_a_resume_with_nothing_left_to_do_writes_nothing(mine, capsys):
    before = contents(mine)
    assert gpt("fit --resume runs/mine --log_every 1") == 0
    assert "all 2 steps are done" in capsys.readouterr().err
    assert contents(mine) == before


def test_validate_does_not_score_a_new_model_in_place_of_a_missing_checkpoint(workplace, refusal):
    err = refusal("validate auto_or_new --run none --config quick")
    assert "nothing to validate: runs/none has no checkpoint" in err


def test_validate_needs_a_checkpoint_and_takes_a_runs_folder(workplace, refusal, capsys):
    assert "--ckpt_path" in refusal("validate")
    assert fit(f"{FEW} --data.val_fraction 0 --run r") == 0
    assert "no text is held out: give a --data.val_fraction above 0" in refusal("validate runs/r")
    assert gpt("validate runs/r --data.val_fraction 0.1") == 0
    assert "val_bits_per_byte" in capsys.readouterr().out


def test_a_config_is_a_file_or_one_of_the_package(workplace, refusal):
    assert options_of("--config tinyshakespeare").model.config.emb_dim == 128
    Path("tinyshakespeare").write_text("run: mine\n", "utf-8")  # a file comes first
    assert options_of("--config tinyshakespeare").run == "mine"
    error = refusal("fit --config nowhere.yaml")
    assert "--config nowhere.yaml: no such file, nor one of" in error and "sweep, tinyshakespeare" in error
    assert "--config quik: no such file; did you mean quick?" in refusal("fit --config quik")


def test_the_last_of_several_sources_counts(workplace):
    Path("a.yaml").write_text("trainer: {max_steps: 5, max_epochs: 7}\nlog_every: 3\n", "utf-8")
    Path("b.yaml").write_text("trainer: {max_steps: 6}\n", "utf-8")
    options = options_of("my.txt --data.shift --log_every 9 --config a.yaml --config b.yaml")
    assert (options.trainer.max_steps, options.trainer.max_epochs, options.log_every) == (6, 7, 9)
    assert (options.data.corpus, options.data.shift) == ("my.txt", True)
    assert options.model.config.emb_dim == 768  # a file takes the recipe's place


def test_print_config_is_a_file_for_config(workplace, capsys):
    Path("my.txt").touch()
    command = "my.txt --trainer.max_steps 7 --model.optimizer.betas [0.8,0.9] --run 2024"
    assert gpt(f"fit {command} --print_config") == 0
    Path("printed.yaml").write_text(capsys.readouterr().out, "utf-8")
    printed = options_of("--config printed.yaml")
    assert printed == options_of(command)
    assert (printed.run, printed.model.optimizer.betas) == ("2024", (0.8, 0.9))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        pytest.param("data.batchsize", "data.batch_size", id="similar"),
        pytest.param("lr", "model.optimizer.lr", id="the last part"),
        pytest.param("trainer.lr", "model.optimizer.lr", id="another group"),
        pytest.param("max_iters", "trainer.max_steps", id="the name in another program"),
    ],
)
def test_an_unknown_option_is_answered_with_what_was_meant(given, meant, workplace, refusal):
    assert f"there is no option --{given}; did you mean --{meant}?" in refusal(f"fit --{given} 3")


PRECISIONS = "--trainer.precision: expected one of '32-true', 'bf16-mixed', '16-mixed', got"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fit --trainer.precision fp16", PRECISIONS),
        ("plan text.txt --trainer.precision bf16", PRECISIONS),
        ("fit --data.batch_size many", "--data.batch_size: expected int, got 'many'"),
        ("fit --data.batch_size", "--data.batch_size: expected one argument"),
        ("plan text.txt --minutes soon", "--minutes 'soon': expected a time, such as 90s, 10m or 8h"),
        ("fit -x", "there is no option --x"),
        ("fit --model.optimizer.lr nan", "--model.optimizer.lr: expected float"),
        ("plan --model.config.dropout x", "gpt plan: --model.config.dropout: expected float, got 'x'\n"),
    ],
)
def test_a_value_that_is_none_says_what_was_expected(command, message, workplace, refusal):
    assert message in refusal(command)


NULLS = {
    "trainer: {max_steps: }": "--trainer.max_steps: expected int, got null",
    "trainer: {logger: null}": "--trainer.logger: expected str, got null",
    "model: {optimizer: {betas: null}}": "--model.optimizer.betas: expected tuple[float, float], got null",
    "data: {batch_size: null}": "--data.batch_size: expected int, got null",
}


@pytest.mark.parametrize(("text", "message"), NULLS.items(), ids=NULLS)
def test_null_in_a_file_is_refused_for_an_option_that_needs_a_value(text, message, workplace, refusal):
    Path("mine.yaml").write_text(text, "utf-8")
    assert message in refusal("fit text.txt --config mine.yaml")


TYPED = ["###", "~", "[end]", "'a'", '"a"', '["a"]', '{"a": 1}', "1", "true", "&a", "---"]


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if "str" in str(option.kind)])
def test_a_text_is_taken_as_it_is_typed(name):
    for typed in TYPED:
        assert scan([f"--{name}={typed}"], "fit").own[name] == typed
