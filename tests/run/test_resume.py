"""A run that resumes any of its checkpoints ends as the one that was never interrupted."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rewritten import retold, rewritten
from safetensors.torch import load_file
from tiny_runs import COMMAND, checkpoint, fit, gpt, killed, result, run_in

from gpt.run.start import start
from gpt.weights.checkpoint import read, write


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run over more than two epochs, with dropout and sampled ids, that kept a checkpoint of every step."""
    every = "--checkpoint_every 1 --keep_checkpoints 100"
    return run_in(tmp_path_factory.mktemp("whole"), f"{every} --model.sampled_softmax 4")


@pytest.mark.parametrize("step", [1, 7, 9, 18, 19])
def test_resumed_from_a_step_it_ends_the_same(step, whole, workplace):
    """After the first one, a validation, each epoch, and before the last."""
    run = killed(whole, step)
    assert gpt(f"fit --resume {run}") == 0
    assert result(run) == result(whole)


def test_options_on_the_command_line_win_and_are_named(whole, workplace, capsys):
    run = killed(whole, 9)
    options = "--model.optimizer.lr 0.0125 --trainer.max_steps 10 --model.config.window_dropout true"
    assert gpt(f"fit --resume auto {options} --model.optimizer.schedule=constant") == 0
    err = capsys.readouterr().err
    assert "resuming runs/cut/checkpoints/last.safetensors, after step 9" in err
    assert "changed model.optimizer.lr: 0.007568 -> 0.0125" in err
    assert "changed trainer.max_steps: 20 -> 10" in err
    assert "changed model.config.window_dropout: False -> True" in err
    assert "run:" not in err
    factor = 10 / 50  # of the warm-up, in the tenth update
    rates = [float(row["learning_rate"]) for row in result(run)[1] if row["train_loss"]]
    assert rates[-1] == pytest.approx(0.0125 * factor)
    saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert saved["model"]["optimizer"]["lr"] == 0.0125
    assert checkpoint(run).config.window_dropout


def test_null_in_a_file_chooses_no_other_precision(mine, workplace, capsys):
    """`--print_config` writes it for a precision that the machine chooses."""
    Path("printed.yaml").write_text("trainer: {precision: null}\n", "utf-8")
    assert gpt("fit --resume runs/mine --config printed.yaml --trainer.max_steps 3") == 0
    assert "changed trainer.precision" not in capsys.readouterr().err
    assert checkpoint("mine").run.options["trainer"]["precision"] == "32-true"
    chosen = start("fit", ["--resume", "runs/mine", "--trainer.precision", "null"])
    assert chosen.options.trainer.precision is None


FIXED = ["model.config.emb_dim 64", "model.optimizer.name adamw", "data.vocabulary gpt2:299"]


@pytest.mark.parametrize("option", FIXED)
def test_what_the_weights_do_not_allow_is_refused(option, whole, workplace, refusal):
    killed(whole, 9)
    err = refusal(f"fit --resume auto --{option}")
    assert all(word in err for word in option.split())


def test_a_limit_counts_that_the_clock_has_changed_since(whole, workplace, capsys):
    """A plan for 20 steps, of which the clock has left 12: 20 are asked for, as the plan had said."""
    run = killed(whole, 9)
    saved = checkpoint(run)
    saved.run.total = 12
    saved.run.planned_seconds = 60.0
    with open("changed.safetensors", "wb") as file:  # the tensors are mapped from the checkpoint
        write(file, saved.tensors, saved.model, saved.run)
    Path("changed.safetensors").replace(run / "checkpoints" / "last.safetensors")
    shutil.copytree(run, "runs/asked")
    assert gpt("fit --resume runs/cut") == 0
    assert checkpoint("cut").run.step == 12
    assert gpt("fit --resume runs/asked --trainer.max_steps 20") == 0
    assert checkpoint("asked").run.step == 20
    assert "changed trainer.max_steps: 12 -> 20" in capsys.readouterr().err


def test_a_plan_can_be_made_longer_by_time_or_epochs(whole, workplace, capsys):
    """Its guess of 20 steps is no limit."""
    plan = {"total": 20, "planned_seconds": 60.0}
    rewritten(whole / "checkpoints" / "last.safetensors", "runs/plan/checkpoints/last.safetensors", run=plan)
    assert gpt("fit --resume runs/plan/checkpoints/last.safetensors --trainer.max_epochs 3 --run more") == 0
    assert checkpoint("more").run.step == 25  # 613 windows, three times, in updates of 74
    assert "max_epochs 3" in capsys.readouterr().err


def test_the_same_command_goes_on_though_its_recipe_asks_for_what_the_text_did_not_allow(workplace, capsys):
    """The text has fewer tokens than the recipe's vocabulary."""
    recipe = "model: {config: {vocab_size: 9000, emb_dim: 32}}\ndata: {vocabulary: learn}\n"
    Path("recipe.yaml").write_text(recipe, "utf-8")
    shape = "--model.config.num_heads 2 --model.config.num_layers 1 --model.config.context_length 16"
    rest = "--trainer.accelerator cpu --trainer.precision 32-true --run r --resume auto_or_new"
    command = f"fit text.txt --config recipe.yaml {shape} {rest} --trainer.max_steps"
    assert gpt(f"{command} 1") == 0
    assert gpt(f"{command} 2") == 0
    size = checkpoint("r").config.vocab_size
    assert f"the weights decide, not --config: model.config.vocab_size {size}\n" in capsys.readouterr().err
    assert gpt(f"{command} 3 --model.config.vocab_size 9000") == 2


def test_another_way_to_accumulate_takes_the_place_of_the_first(whole, workplace):
    killed(whole, 9)
    assert gpt("fit --resume runs/cut --data.tokens_per_update 592 --trainer.max_steps 10") == 0
    assert checkpoint("cut").run.options["trainer"]["accumulate_grad_batches"] == 1


def test_the_checkpoint_alone_is_enough(whole, workplace, capsys):
    """Fit, resume, validate and generate at a size that is nobody's default, from a file that was moved."""
    shutil.copy(whole / "checkpoints" / "step-18.safetensors", "moved.safetensors")
    assert gpt("fit --resume moved.safetensors --run elsewhere") == 0
    resumed, wanted = result("elsewhere"), result(whole)
    assert resumed[0] == wanted[0]
    capsys.readouterr()
    shutil.move("runs/elsewhere/checkpoints/last.safetensors", "last.safetensors")
    shutil.rmtree("runs")
    assert gpt("validate --ckpt_path last.safetensors") == 0
    loss = next(row["val_loss"] for row in wanted[1] if row["step"] == "20" and row["val_loss"])
    assert float(loss) == pytest.approx(yaml.safe_load(capsys.readouterr().out)["val_loss"], rel=1e-6)
    assert gpt("generate --checkpoint last.safetensors --max_new_tokens 3") == 0


def test_a_finished_run_that_was_moved_has_nothing_left_to_do(whole, workplace, capsys):
    shutil.copy(whole / "checkpoints" / "last.safetensors", "moved.safetensors")
    assert gpt("fit --resume moved.safetensors --run elsewhere") == 0
    assert "all 20 steps are done" in capsys.readouterr().err
    assert not Path("runs/elsewhere").exists()


def test_a_checkpoint_that_does_not_name_its_text_asks_for_it(whole, workplace, refusal):
    retold(whole / "checkpoints" / "step-18.safetensors", "moved.safetensors", '"corpus":"text.txt",', "")
    assert "does not name its text: give it with --data.corpus" in refusal("fit --resume moved.safetensors")
    assert gpt("fit --resume moved.safetensors --data.corpus text.txt") == 0


def flip_a_bit(data: bytes) -> bytes:
    """In a tensor: safetensors would not notice."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def break_the_json_of_the_run(data: bytes) -> bytes:
    """The tensors and the header's own JSON stay intact."""
    return data.replace(b'\\"step\\":18', b'\\"step\\";18')


@pytest.mark.parametrize("damage", [flip_a_bit, break_the_json_of_the_run])
def test_auto_skips_a_broken_checkpoint_and_says_so(damage, whole, workplace, capsys):
    run = killed(whole, 18)
    last = run / "checkpoints" / "last.safetensors"
    shutil.copy(whole / "checkpoints" / "step-9.safetensors", run / "checkpoints" / "step-9.safetensors")
    last.write_bytes(damage(last.read_bytes()))
    assert load_file(last).keys() == read(whole / "checkpoints" / "step-18.safetensors").tensors.keys()
    assert gpt("fit --resume auto --run cut") == 0
    err = capsys.readouterr().err
    assert "after step 9" in err
    assert "skipped runs/cut/checkpoints/last.safetensors, which is broken" in err
    assert result(run) == result(whole)
    assert (run / "checkpoints" / "last.safetensors.broken").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--resume auto", "no checkpoint under runs/"),
        ("--resume auto --run mine", "no checkpoint in runs/mine"),
        ("--resume auto_or_new", "--run"),
    ],
)
def test_auto_refuses_if_there_is_nothing_to_resume(options, message, workplace, refusal):
    assert message in refusal(f"{COMMAND} {options}")
    assert not Path("runs").exists()


def test_only_broken_checkpoints_are_never_overwritten(workplace, capsys):
    last = Path("runs/mine/checkpoints/last.safetensors")
    last.parent.mkdir(parents=True)
    last.write_bytes(b"PK half of a file")
    for way in ("auto", "auto_or_new"):
        assert fit(f"--run mine --resume {way}") == 2
        assert "last.safetensors" in capsys.readouterr().err
    assert last.read_bytes() == b"PK half of a file"


class Code:
    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def pickle_to(value: object, path: str) -> None:
    Path(path).write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("save", [torch.save, pickle_to])
def test_code_in_a_checkpoint_is_refused_and_not_run(save, workplace, refusal):
    save({"state_dict": {}, "gpt": Code()}, "evil.safetensors")
    for command in ("fit --resume", "validate --ckpt_path"):
        assert "evil.safetensors" in refusal(f"{command} evil.safetensors")
    assert not Path("ran").exists()


def test_an_accumulated_batch_is_a_batch(workplace):
    """1 x 22, and 1 x 22 resumed as 2 x 11: the same steps, to rounding, past an epoch's end."""
    steps = """--model.optimizer.name adamw --model.optimizer.schedule constant --model.optimizer.rest_lr 3e-3
    --model.config.dropout 0 --trainer.val_check_interval 1000 --checkpoint_every 11 --trainer.max_steps"""
    whole = "--data.batch_size 22 --trainer.accumulate_grad_batches 1"
    halves = "--data.batch_size 11 --trainer.accumulate_grad_batches 2"
    assert fit(steps, "40", whole, "--run one") == 0
    assert fit(steps, "11", whole, "--run two") == 0
    assert fit(steps, "40", halves, "--run two --resume auto") == 0
    one, two = checkpoint("one"), checkpoint("two")
    assert two.run.step == 40
    assert two.run.place == one.run.place
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-3, atol=1e-4)
