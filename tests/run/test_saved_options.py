"""The options that a checkpoint carries are plain values: nothing they name is imported, run or fetched."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from faults.watched import watched
from tiny_runs import TEXT, TINY, fit, result

from gpt.cli import main
from gpt.errors import InputError
from gpt.run.saved_options import plain_options
from gpt.weights.checkpoint import read

POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch pwned", "shell": True}}
DDP = "lightning.pytorch.strategies.DDPStrategy"
HOSTILE = {
    "a class inside a strategy": {
        "trainer": {"strategy": {"class_path": DDP, "init_args": {"ddp_comm_state": POPEN}}}
    },
    "a class": {"trainer": {"strategy": POPEN}},
    "a name to import": {"trainer": {"strategy": "evil_module.Strategy"}},
    "a name of jsonargparse's": {"trainer": {"logger": "WandbLogger"}},
    "a list of classes": {"trainer": {"callbacks": [POPEN]}},
    "a class in a list": {"trainer": {"logger": [True, POPEN]}},
    "a plugin": {"trainer": {"plugins": "evil_module.Plugin"}},
    "dotted names": {"trainer.strategy.class_path": "subprocess.Popen"},
    "half dotted names": {"trainer": {"strategy.class_path": "subprocess.Popen"}},
    "a class as the model": {"model": POPEN},
    "a class as the data": {"data": {"class_path": "subprocess.Popen"}},
    "a class as a number": {"data": {"batch_size": POPEN}},
    "a class in the shape": {"model": {"config": {"emb_dim": POPEN}}},
    "a file as a group": {"trainer": "evil.yaml"},
    "a URL as a group": {"model": "https://example.org/evil.yaml"},
    "a URL as an inner group": {"model": {"optimizer": "http://example.org/evil.yaml"}},
    "a URL as the corpus": {"data": {"corpus": "https://example.org/text.txt"}},
    "a chain of fsspec": {"data": {"corpus": "filecache::memory"}},
    "a path of another machine": {"data": {"corpus": "//example.org/text.txt"}},
    "a path of another Windows machine": {"data": {"corpus": "\\\\example.org\\text.txt"}},
    "a data set of the hub": {"data": {"corpus": "hub:owner/name"}},
    "a recipe with a URL": {"data": {"corpus": "evil-recipe.yaml"}},
    "another config": {"config": "evil.yaml", "subclass": 1},
    "unpickling": {"weights_only": False},
    "unpickling, deeper": {"trainer": {"weights_only": False}},
    "a registry": {"trainer": {"model_registry": "owner/model"}},
    "an unknown group": {"optimizer": {"class_path": "subprocess.Popen"}},
    "a Python object": "trainer: !!python/object/apply:subprocess.Popen [[touch, pwned]]\n",
    "a list": "- 1\n",
    "no text": 7,
    "an endless text": "run: " + "x" * 100_000,
    "a circle": "model: &a {config: *a}\n",
}


@pytest.fixture
def hostile_folder(workplace) -> Path:
    (workplace / "evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    evil = yaml.safe_dump({"strategy": POPEN})
    (workplace / "evil.yaml").write_text(evil, encoding="utf-8")
    recipe = "corpus: {files: ['https://example.org/text.txt']}\n"
    (workplace / "evil-recipe.yaml").write_text(recipe, encoding="utf-8")
    return workplace


def as_text(options: object) -> object:
    return yaml.safe_dump(options) if isinstance(options, dict) else options


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        assert fit("--trainer.max_steps", "2", "--run", "mine", "--trainer.val_check_interval", "2") == 0
    return folder / "runs" / "mine"


@pytest.mark.parametrize("way", ["fit --resume", "fit --ckpt_path", "validate --ckpt_path", "fit --config"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_option_is_refused_and_nothing_happens(
    name, way, trained, hostile_folder, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(str(hostile_folder))
    shutil.copytree(trained, "runs/evil")
    path = Path("runs/evil/checkpoints/last.ckpt")
    if way == "fit --config":
        path = Path("runs/evil/config.yaml")
        path.write_text(str(as_text(HOSTILE[name])), encoding="utf-8")
    else:
        torch.save(
            {
                **read(trained / "checkpoints" / "last.ckpt"),
                "run": {"saved_at": 0, "options": as_text(HOSTILE[name])},
            },
            path,
        )
    with watched(Path("runs/evil")) as seen:
        status = main([*way.split(), str(path)])
    err = capsys.readouterr().err
    assert seen == []
    assert status == 2
    assert err.count("\n") == 1
    assert str(path) in err
    assert not Path("pwned").exists()


def test_the_checkpoint_of_the_report_needs_no_run(hostile_folder, capsys):
    options = as_text(HOSTILE["a class inside a strategy"])
    saved = {"gpt": {"config": {}}, "state_dict": {}, "global_step": 0}
    torch.save({**saved, "run": {"saved_at": 0, "options": options}}, "e.ckpt")
    assert main(["validate", "--ckpt_path", "e.ckpt"]) == 2
    assert not Path("pwned").exists()
    assert "trainer.strategy" in capsys.readouterr().err


def test_jsonargparses_denylist_is_enforced_for_configs_too(hostile_folder, capsys):
    """A config of one's own may name classes, but none that jsonargparse knows to run anything."""
    Path("mine.yaml").write_text(yaml.safe_dump(HOSTILE["a class inside a strategy"]), encoding="utf-8")
    assert main([*TINY, "--config", "mine.yaml"]) == 2
    assert not Path("pwned").exists()
    assert "not allowed" in capsys.readouterr().err


def test_an_option_given_again_takes_the_refused_ones_place(trained, workplace, capsys):
    shutil.copytree(trained, "runs/mine")
    path = Path("runs/mine/checkpoints/last.ckpt")
    saved = read(trained / "checkpoints" / "last.ckpt")
    options = yaml.safe_load(saved["run"]["options"])
    options["trainer"]["logger"] = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    saved["run"]["options"] = yaml.safe_dump(options)
    torch.save(saved, path)
    assert main(["fit", "--resume", str(path), "--trainer.max_steps", "3"]) == 2
    assert "--trainer.logger" in capsys.readouterr().err
    more = ["--trainer.max_steps", "3", "--trainer.logger", "false"]
    assert main(["fit", "--resume", str(path), *more]) == 0
    assert read(path)["global_step"] == 3


def test_a_runs_config_repeats_the_run(trained, workplace):
    config = workplace / "copied" / "config.yaml"
    shutil.copytree(trained, config.parent)
    assert main(["fit", "--config", str(config), "--run", "again"]) == 0
    assert main(["fit", f"--config={config}", "--run", "once-more"]) == 0
    assert result(Path("runs/again"))[:2] == result(trained)[:2]
    assert result(Path("runs/once-more"))[:2] == result(trained)[:2]


def test_what_is_decided_anew_is_left_out():
    text = "ckpt_path: https://x.org/a\nweights_only: null\nmodel: {init_from: gpt2, config: {emb_dim: 8}}\n"
    expected = {"model": {"init_from": "gpt2", "config": {"emb_dim": 8}}}
    assert plain_options(text, Path("a.ckpt"), unused=("model.init_from",)) == expected
    with pytest.raises(InputError, match=r"model\.init_from"):
        plain_options(text, Path("a.ckpt"))


def test_durations_and_lists_are_plain():
    text = "trainer: {max_time: {hours: 1}, devices: [0, 1]}\nmodel: {optimizer: {betas: [0.9, 0.95]}}\n"
    assert plain_options(text, Path("a.ckpt")) == yaml.safe_load(text)


def test_saved_options_may_have_old_names():
    saved = yaml.safe_dump({"model": {"config": {"tied_head": False}}})
    assert plain_options(saved, Path("config.yaml")) == {"model": {"config": {"tie_embeddings": False}}}


@pytest.mark.parametrize("given", ["option", "file"])
def test_old_names_are_read_on_the_command_line_and_in_files(workplace, capsys, given):
    (workplace / "old.yaml").write_text("model: {config: {tied_head: false}}\n", encoding="utf-8")
    options = ["--model.config.tied_head=false"] if given == "option" else ["--config", "old.yaml"]
    with pytest.raises(SystemExit, match="0"):
        main([*TINY, *options, "--print_config"])
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["config"]["tie_embeddings"] is False
    assert given == "file" or "--model.config.tied_head is now called --model.config.tie_embeddings" in err


@pytest.mark.parametrize("command", ["--resume", "--ckpt_path"])
def test_options_that_claim_a_huge_model(command, trained, workplace, capsys):
    """A billion layers in the options and two in the file: refused before a model is built."""
    saved = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    options = yaml.safe_load(saved["run"]["options"])
    options["model"]["config"]["num_layers"] = saved["gpt"]["config"]["num_layers"] = 1_000_000_000
    torch.save(
        {**saved, "run": {**saved["run"], "options": yaml.safe_dump(options)}}, workplace / "huge.ckpt"
    )
    if command == "--resume":
        assert main(["fit", "--resume", "huge.ckpt"]) == 2
    else:
        assert main(["validate", "--ckpt_path", "huge.ckpt"]) == 2
    assert "huge.ckpt: the weights lack blocks." in capsys.readouterr().err
