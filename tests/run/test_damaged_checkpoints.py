"""Readable checkpoints with values that no run saves: one line, status 2, and nothing is trained."""

import io
import os
from pathlib import Path

import pytest
import torch
from rewritten import retold, rewritten
from tiny_runs import fit, gpt

from gpt.errors import InputError
from gpt.weights.checkpoint import read, write

LAST = "runs/mine/checkpoints/last.safetensors"
EVIL = Path("runs/mine/checkpoints/evil.safetensors")
MORE = f"fit --resume {EVIL} --trainer.max_steps 3"


@pytest.fixture
def saved(mine):
    """The checkpoint of a short run."""
    return read(LAST)


def test_a_tensor_of_another_shape(saved, refusal):
    rewritten(LAST, EVIL, tensors={"token_embedding.weight": torch.zeros(1)})
    assert "has shape (1,)" in refusal(MORE)


@pytest.mark.parametrize("config", [{"emb_dim": 10**9}, {"num_layers": [1]}, {"x": 1}], ids=str)
def test_settings_that_do_not_fit_the_weights(config, saved, refusal):
    rewritten(LAST, EVIL, model={"config": {**saved.model.config, **config}})
    for command in ("validate --ckpt_path", "fit --resume"):  # the latter has no step left
        assert "evil.safetensors" in refusal(f"{command} {EVIL}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"step":2', '"step":-5'),
        ('"step":2', '"step":"2"'),
        ('"step":2', '"step":2.5'),
        ('"session":1', '"session":1e999'),
        ('"save":1', f'"save":{1 << 53}'),
        ('"session":1', f'"session":{1 << 53}'),
        ('"place":', f'"place":{1 << 53},"was":'),
    ],
)
def test_numbers_that_are_none_or_out_of_range(text, value, mine, refusal):
    """Edited in the header, with the right checksum: the values are wrong, or too large."""
    retold(LAST, EVIL, text, value)
    assert "evil.safetensors" in refusal(MORE)


def test_a_save_that_no_reader_would_take_is_not_made(saved):
    saved.run.save = 1 << 53
    file = io.BytesIO()
    with pytest.raises(InputError, match="save is 9007199254740992, more than a run can count"):
        write(file, saved.tensors, saved.model, saved.run)
    assert file.getvalue() == b""


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("exp_avg", None), ("exp_avg", torch.zeros(7)), ("speed", torch.zeros(32))],
    ids=["missing", "another shape", "unknown"],
)
def test_an_optimizer_state_that_is_not_the_weights(name, tensor, mine, capsys):
    rewritten(LAST, EVIL, tensors={f"optimizer/final_norm.weight/{name}": tensor})
    assert gpt(MORE) == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert "evil.safetensors: the optimizer's" in told and "final_norm.weight" in told
    assert read(LAST).run.step == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_among_the_checkpoints_stops_nobody(mine, refusal):
    os.mkfifo("runs/mine/checkpoints/pipe.safetensors")
    assert fit("--trainer.max_steps 1 --run other") == 0
    assert gpt("fit --resume runs/mine --trainer.max_steps 3") == 0
    assert "no checkpoint at" in refusal("fit --resume runs/mine/checkpoints/pipe.safetensors")
