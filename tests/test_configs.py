"""Every file in configs/ parses and builds."""

from pathlib import Path

import pytest
import torch
import yaml

from gpt import GPTConfig
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses_and_builds(path, monkeypatch, tmp_path, text_file):
    from gpt.run.fit import TrainingCLI, main

    class Parsed(TrainingCLI):
        """Stops after parsing the options."""

        def instantiate_classes(self):
            pass

        def run(self):
            pass

    monkeypatch.chdir(tmp_path)
    # The size of a vocabulary that is learned depends on the text.
    options = main(["fit", "--config", str(path), "--data.corpus", str(text_file)], Parsed).config
    config = GPTConfig(**options.model.config.as_dict())
    with torch.device("meta"):
        module = LanguageModel(config, OptimizerConfig(**options.model.optimizer.as_dict()))
    assert module.model.num_parameters() > 0
    assert options.data.vocab_size == config.vocab_size
    assert options.data.context_length == config.context_length
    assert options.run == path.stem
    assert list(tmp_path.iterdir()) == [text_file]


@pytest.mark.parametrize("name", GPTConfig.names())
def test_the_named_sizes_have_configs_of_the_same_shape(name):
    values = yaml.safe_load((CONFIGS[0].parent / f"{name}.yaml").read_text(encoding="utf-8"))
    assert GPTConfig(**values["model"]["config"]) == GPTConfig.from_name(name)


@pytest.mark.parametrize("name", GPTConfig.names())
def test_an_update_of_the_named_sizes_is_half_a_million_tokens(name):
    values = yaml.safe_load((CONFIGS[0].parent / f"{name}.yaml").read_text(encoding="utf-8"))
    tokens = values["data"]["tokens_per_update"]
    assert tokens == 2**19
    assert "accumulate_grad_batches" not in values["trainer"]
    for gpus in (1, 8, 64):
        assert tokens % (gpus * values["model"]["config"]["context_length"]) == 0
