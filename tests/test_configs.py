"""Every file in configs/ parses and builds."""

from dataclasses import replace

import pytest
import torch
import yaml
from processes import ROOT

from gpt import GPTConfig
from gpt.plain import as_dict
from gpt.run.start import start
from gpt.training.lora import LoRAConfig
from gpt.training.module import LanguageModel

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses_and_builds(path, tmp_path, model):
    model.save_pretrained(tmp_path / "weights")
    tunes = path.stem in ("chat", "finetune", "lora")
    weights = ["--model.init_from", str(tmp_path / "weights")] if tunes else []
    options = start("fit", ["--config", str(path), *weights]).options
    assert options.run == path.stem
    from_scratch = replace(options.model, lora=LoRAConfig(), init_from=None)
    with torch.device("meta"):
        module = LanguageModel(**as_dict(from_scratch))
    assert module.model.num_parameters() > 0


@pytest.mark.parametrize("name", GPTConfig.names())
def test_the_named_sizes_have_configs_of_the_same_shape_with_updates_of_half_a_million_tokens(name):
    values = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text("utf-8"))
    shape = GPTConfig(**values["model"]["config"])
    assert shape == GPTConfig.from_name(name)
    assert values["data"]["tokens_per_update"] == 2**19
    assert "accumulate_grad_batches" not in values["trainer"]
    assert 2**19 % (64 * shape.context_length) == 0  # of 64 GPUs, or fewer
