"""Every option of Lightning's Trainer is honoured, or refused with what to use instead."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from tiny_runs import fit

from gpt.cli import main
from gpt.errors import InputError
from gpt.run.trainer_options import REFUSED, check_trainer_options
from gpt.training.module import LanguageModel

ALL = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
OTHER = {  # a value that each refused option must not have
    "fast_dev_run": True,
    "min_epochs": 2,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 3,
    "overfit_batches": 1,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 5,
    "enable_checkpointing": False,
    "gradient_clip_algorithm": "value",
    "use_distributed_sampler": True,
    "barebones": True,
    "sync_batchnorm": True,
    "reload_dataloaders_every_n_epochs": 1,
    "default_root_dir": "elsewhere",
    "enable_autolog_hparams": False,
    "model_registry": "owner/model",
}


def test_every_option_is_honoured_or_refused_as_the_table_in_the_docs_says():
    text = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    table = {
        honoured: re.findall(rf"^\| `(\w+)` \| {honoured} \|(.*)\|$", text, re.M)
        for honoured in ("yes", "no")
    }
    assert {name: remark.strip() for name, remark in table["no"]} == {
        name: instead for name, (_, instead) in REFUSED.items()
    }
    names = [name for rows in table.values() for name, _ in rows]
    assert sorted(names) == sorted(ALL)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_option_names_what_to_use(name):
    for value in REFUSED[name][0]:
        check_trainer_options({name: value})
    with pytest.raises(InputError, match=rf"--trainer\.{name} {OTHER[name]}") as refused:
        check_trainer_options({name: OTHER[name]})
    assert REFUSED[name][1] in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 0},
        {"gradient_clip_val": -0.5},
        {"limit_train_batches": 0},
        {"limit_train_batches": 0.0},
        {"limit_val_batches": 1},
        {"limit_val_batches": 0.5},
        {"val_check_interval": 0},
        {"val_check_interval": 0.5},
        {"val_check_interval": 1.0},
        {"val_check_interval": 1000.0},
        {"deterministic": "warn"},
        {"profiler": "simple"},
        {"val_check_interval": "00:00:10:00"},
        {"precision": "16-true"},
        *(
            {"callbacks": [{"class_path": f"lightning.pytorch.callbacks.{name}"}]}
            for name in ("Timer", "EarlyStopping", "StochasticWeightAveraging", "WeightAveraging")
        ),
        {"callbacks": {"class_path": "lightning.pytorch.callbacks.BatchSizeFinder"}},
        {"callbacks": {"class_path": "LearningRateFinder"}},
    ],
    ids=str,
)
def test_values_that_would_do_something_else_are_refused(options):
    with pytest.raises(InputError, match=r"give |positive"):
        check_trainer_options(options)


def test_several_nodes_need_a_launcher_for_which_they_would_wait(monkeypatch):
    for name in ("MASTER_ADDR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    check_trainer_options({"num_nodes": 1})
    with pytest.raises(InputError, match=r"num_nodes 2 .*torchrun"):
        check_trainer_options({"num_nodes": 2})
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    check_trainer_options({"num_nodes": 2})


@pytest.mark.parametrize("device", ["gpu", "cuda", "mps", "banana"])
def test_a_device_that_is_not_there_is_refused_in_one_line_with_one_that_is(device, workplace, capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert fit("--trainer.accelerator", device) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert device in err.lower()
    assert "cpu" in err
    assert not Path("runs").exists()


def test_a_refusal_comes_before_anything_is_read_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--data.corpus", "missing.txt", "--trainer.fast_dev_run", "true"]) == 2
    assert "--trainer.fast_dev_run True is not supported" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_honoured_options_reach_the_trainer(tmp_path, monkeypatch, text_file):
    from gpt.run.fit import TrainingCLI, main

    class Built(TrainingCLI):
        def run(self):
            pass

    monkeypatch.chdir(tmp_path)
    values = {
        "accelerator": "cpu",
        "devices": "1",
        "precision": "32-true",
        "min_steps": "3",
        "limit_train_batches": "7",
        "limit_val_batches": "0",
        "val_check_interval": "6",
        "enable_progress_bar": "false",
        "enable_model_summary": "true",
        "accumulate_grad_batches": "3",
        "gradient_clip_val": "0.5",
        "benchmark": "true",
        "detect_anomaly": "true",
        "plugins": "lightning.pytorch.plugins.environments.LightningEnvironment",
        "callbacks": "lightning.pytorch.callbacks.DeviceStatsMonitor",
        "logger": "lightning.pytorch.loggers.CSVLogger",
        "logger.save_dir": "csv",
    }
    tiny = [
        "--model.config.emb_dim",
        "32",
        "--model.config.num_layers",
        "1",
        "--model.config.vocab_size",
        "300",
    ]
    options = [word for name, value in values.items() for word in (f"--trainer.{name}", value)]
    trainer = main(["fit", "--data.corpus", str(text_file), *tiny, *options], Built).trainer
    assert (trainer.min_steps, trainer.limit_train_batches, trainer.limit_val_batches) == (3, 7, 0)
    assert (trainer.val_check_interval, trainer.accumulate_grad_batches) == (6, 3)
    assert (trainer.gradient_clip_val, trainer.precision) == (0.5, "32-true")
    names = {type(callback).__name__ for callback in trainer.callbacks}
    assert {"DeviceStatsMonitor", "RichModelSummary"} <= names
    assert [callback.show for callback in trainer.callbacks if hasattr(callback, "show")] == [False, False]
    assert "CSVLogger" in {type(logger).__name__ for logger in trainer.loggers}
    assert trainer._detect_anomaly


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.accelerator", "tpu"], "torch_xla"),
        (["--trainer.precision", "transformer-engine"], "transformer_engine"),
        (["--trainer.strategy", "xla"], "torch_xla"),
        (["--trainer.logger", "CometLogger"], "comet"),
        (["--trainer.strategy", "ddp_fork"], "give ddp"),
        (["--trainer.strategy", "ddp_spawn_find_unused_parameters_true"], "give ddp"),
    ],
)
def test_what_needs_another_package_or_start_is_one_line(options, message, workplace, capsys):
    assert fit(*options) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 7.28 TiB"), torch.OutOfMemoryError("CUDA")]
)
def test_a_batch_that_does_not_fit_is_one_line(error, workplace, monkeypatch, capsys):
    def step(self, *_):
        raise error

    monkeypatch.setattr(LanguageModel, "training_step", step)
    assert fit("--trainer.enable_progress_bar", "false") == 2
    err = capsys.readouterr().err
    assert "give a smaller --data.batch_size, or --data.tokens_per_update" in err.splitlines()[-1]
