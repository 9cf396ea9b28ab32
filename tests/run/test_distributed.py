"""Two gloo processes on the CPU, as torchrun starts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import COMMAND, checkpoint, rows

from gpt.weights.checkpoint import read
from gpt.weights.runs import snapshots_of

FORKS = Path(__file__).parents[1] / "forks.py"
PLAIN = f"""{COMMAND} --model.config.dropout 0 --log_every 1 --trainer.accumulate_grad_batches 1
--trainer.val_check_interval 5 --trainer.max_steps 10 --checkpoint_every 5 --keep_checkpoints 9"""
ONE = f"{PLAIN} --data.batch_size 36"
TWO = f"{PLAIN} --data.batch_size 18 --trainer.devices 2"

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]


@pytest.fixture(scope="module")
def forks():
    """The process that launches runs, see forks.py."""
    with subprocess.Popen(
        [sys.executable, str(FORKS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def launch(forks, workplace):
    """Runs `gpt COMMAND` on so many processes, expects these exit statuses, and returns what they print."""

    def run(command, processes=2, terminate=None, sabotage=None, status=0) -> str:
        asked = {"folder": str(workplace), "arguments": command.split(), "processes": processes}
        forks.stdin.write(json.dumps({**asked, "terminate": terminate, "sabotage": sabotage}) + "\n")
        forks.stdin.flush()
        ended = {}
        while ended.get("folder") != asked["folder"]:  # an answer to a test that was timed out
            ended = json.loads(forks.stdout.readline())
        assert ended["statuses"] == [status] * processes, ended["err"][-3000:]
        return ended["err"]

    return run


def losses(run: str) -> list[float]:
    """Return the losses of training and of validation, and its bits per byte."""
    names = "train_loss", "val_loss", "val_bits_per_byte"
    return [float(row[name]) for row in rows(run) for name in names if row[name]]


def assert_close(run: str, other: str, losses_rel=1e-5, rtol=1e-3, atol=1e-4) -> None:
    """Losses and weights equal except for the order in which sums over the batch are added up."""
    assert losses(run) == pytest.approx(losses(other), rel=losses_rel)
    weights, expected = checkpoint(run).weights, checkpoint(other).weights
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=rtol, atol=atol, msg=name)


def test_two_processes_do_what_one_does_and_go_on_with_each_others_runs(launch):
    """They agree on a folder, and send no masks to each other."""
    launch(f"{ONE} --run one", processes=1)
    launch(f"{TWO} --run two", sabotage="buffers")
    assert sorted(os.listdir("runs")) == ["one", "two"]
    assert len(losses("two")) == 10 + 2 * 2
    assert_close("two", "one")
    *_, (step, _, path) = snapshots_of(Path("runs/two"))
    assert step == 10
    for name, weight in read(path).weights.items():
        assert torch.equal(weight, checkpoint("two").weights[name].bfloat16())
    shutil.copytree("runs/one", "runs/from-one")
    shutil.copytree("runs/two", "runs/from-two")

    told = launch(f"{TWO} --resume runs/from-one/checkpoints/step-5.safetensors")
    assert "after step 5" in told
    assert_close("from-one", "one")
    step_5 = "runs/from-two/checkpoints/step-5.safetensors"
    launch(f"{ONE} --trainer.devices 1 --resume {step_5}", processes=1)
    assert_close("from-two", "one")


def test_a_loss_between_two_rows_goes_on_on_more_processes(launch):
    """The second process takes the sum that the first one had of updates 4 and 5."""
    launch(f"{ONE} --log_every 3 --run one", processes=1)
    shutil.copytree("runs/one", "runs/two")
    launch(f"{TWO} --log_every 3 --resume runs/two/checkpoints/step-5.safetensors")
    assert_close("two", "one")


def test_two_processes_weigh_what_they_score_as_one_does(launch, workplace):
    """Completions of 1 to 10 tokens: the mean of an update is over its scored tokens, whoever has them."""
    lines = [json.dumps({"prompt": "fox", "completion": " fox" * (1 + k * k % 10)}) for k in range(200)]
    (workplace / "pairs.jsonl").write_text("\n".join(lines), "utf-8")
    command = f"{PLAIN} --data.corpus pairs.jsonl --data.val_fraction 0.2 --model.optimizer.name adamw"
    launch(f"{command} --data.batch_size 8 --trainer.devices 1 --run one", processes=1)
    launch(f"{command} --data.batch_size 4 --trainer.devices 2 --run two")
    accumulate = f"--data.tokens_per_update {8 * 16} --data.batch_size 2 --trainer.devices 2"
    launch(f"{command} {accumulate} --run accumulating")
    assert_close("two", "one")
    assert_close("accumulating", "one")


def test_processes_that_are_no_longer_replicas_stop_without_saving(launch):
    """In the last bit of one weight."""
    told = launch(f"{TWO} --run two", sabotage="diverge", status=2)
    assert "process 1 has other values than process 0 after step 5, in " in told
    assert not list(Path("runs/two/checkpoints").glob("*"))


@pytest.mark.slow
def test_tokens_per_update_make_the_same_run_on_any_number_of_processes(launch):
    """One process accumulates three batches of 12 windows, each of two processes two of 9."""
    command = f"{PLAIN} --model.optimizer.name adamw --data.tokens_per_update {36 * 16} --data.batch_size 12"
    launch(f"{command} --trainer.devices 1 --run one", processes=1)
    launch(f"{command} --trainer.devices 2 --run two")
    launch(f"{command} --trainer.devices 2 --run changing", terminate=([0], 3), status=143)
    resume = "fit --resume runs/changing --trainer.devices"
    launch(f"{resume} 1", processes=1, terminate=([0], 6), status=143)
    assert checkpoint("changing").run.step == 7
    launch(f"{resume} 2")
    for run in ("two", "changing"):
        assert len(losses(run)) == 10 + 2 * 2
        assert_close(run, "one", rtol=0)


def test_a_signal_stops_both_and_they_resume_exactly(launch):
    """To one process, as a person sends it, and to all, as a cluster does; each has its own dropout.

    Only the first finds the temperature of a validation.
    """
    command = f"{TWO} --model.config.dropout 0.3 --temperature_scaling true"
    launch(f"{command} --run whole")
    for run, ranks in (("one", [1]), ("all", [0, 1])):
        launch(f"{command} --run {run}", terminate=(ranks, 3), status=143)
        saved = checkpoint(run)
        assert saved.run.step == 4
        assert not torch.equal(saved.tensors["random/0/cpu"], saved.tensors["random/1/cpu"])
        launch(f"fit --resume auto --run {run}")
        for name, weight in checkpoint("whole").weights.items():
            assert torch.equal(checkpoint(run).weights[name], weight)
        assert losses(run) == losses("whole")
        assert checkpoint(run).run.best_loss == checkpoint("whole").run.best_loss


def test_a_full_disk_of_one_process_stops_both(launch):
    told = launch(f"{TWO} --checkpoint_every 2 --run full", sabotage="full", status=2)
    assert "runs/full/checkpoints/last.safetensors: No space left on device" in told
    assert checkpoint("full").run.step == 5
    launch("fit --resume auto --run full")
    assert checkpoint("full").run.step == 10


@pytest.mark.slow
def test_two_in_bfloat16_accumulate_and_recompute_as_one_does(launch):
    """The same micro-batches of 9 windows, half of them on each: sums differ only in their order."""
    command = f"{PLAIN} --data.tokens_per_update {36 * 16} --data.batch_size 9"
    command += " --trainer.precision bf16-mixed --model.checkpoint_activations true"
    # A bias of keys has no gradient but rounding, of which AdamW makes a step as large as the rate.
    command += " --model.config.qkv_bias false"
    launch(f"{command} --trainer.devices 1 --run one", processes=1)
    launch(f"{command} --trainer.devices 2 --run two")
    assert_close("two", "one", losses_rel=1e-4, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_the_first_process_plans_for_both(launch):
    """Whose clocks and speeds differ: both make the same updates of the same model, and end in time."""
    Path("text.txt").write_text("".join(f"{n * n} is the square of {n}.\n" for n in range(9000)), "utf-8")
    small = "--model.config.emb_dim 32 --model.config.num_layers 1 --trainer.accelerator cpu"
    told = launch(f"fit text.txt {small} --minutes 20s --run timed")
    assert told.count("the plan is 32 x 1") == 1
    assert "ended after step " in told
    run = checkpoint("timed").run
    assert run.step == run.total > 0
    assert run.options["trainer"]["devices"] == 2
