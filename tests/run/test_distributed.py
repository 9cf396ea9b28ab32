"""Two gloo processes on the CPU, as torchrun starts them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, rows

from gpt.weights.checkpoint import read, snapshots_of

FORKS = Path(__file__).parents[1] / "forks.py"
PLAIN = [
    *TINY,
    *("--model.config.dropout", "0", "--log_every", "1"),
    *("--trainer.accumulate_grad_batches", "1", "--trainer.val_check_interval", "5"),
    *("--trainer.max_steps", "10", "--checkpoint_every", "5", "--keep_checkpoints", "9"),
]
ONE = [*PLAIN, "--data.batch_size", "36"]
TWO = [*PLAIN, "--data.batch_size", "18", "--trainer.devices", "2"]

Launch = Callable[..., None]

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen]:
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
def launch(forks: subprocess.Popen, workplace: Path) -> Launch:
    """Runs `gpt ARGUMENTS` on so many processes and expects these exit statuses."""

    def run(
        *arguments: str,
        processes: int = 2,
        terminate: tuple[list[int], int] | None = None,
        sabotage: str | None = None,
        status: int = 0,
    ):
        asked = {"folder": str(workplace), "arguments": arguments, "processes": processes}
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


def weights(run: str, name: str = "last.safetensors") -> dict[str, torch.Tensor]:
    return read(f"runs/{run}/checkpoints/{name}").weights


def assert_same(run: str, other: str) -> None:
    """Losses and weights equal except for the order in which sums over the batch are added up."""
    assert losses(run) == pytest.approx(losses(other), rel=1e-5)
    one, two = weights(run), weights(other)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)


def test_two_processes_do_what_one_does_and_go_on_with_each_others_runs(launch):
    launch(*ONE, "--run", "one", processes=1)
    launch(*TWO, "--run", "two")
    assert sorted(os.listdir("runs")) == ["one", "two"]  # the processes agreed on the folder
    assert len(losses("two")) == 10 + 2 * 2
    assert_same("one", "two")
    *_, (step, _, path) = snapshots_of(Path("runs/two"))
    assert step == 10
    for name, weight in read(path).weights.items():
        assert torch.equal(weight, weights("two")[name].bfloat16())
    shutil.copytree("runs/one", "runs/from-one")
    shutil.copytree("runs/two", "runs/from-two")

    told = launch(*TWO, "--resume", "runs/from-one/checkpoints/step-5.safetensors")
    assert "after step 5" in told
    assert_same("from-one", "one")
    one = [*ONE, "--trainer.devices", "1"]
    launch(*one, "--resume", "runs/from-two/checkpoints/step-5.safetensors", processes=1)
    assert_same("from-two", "one")


def test_two_processes_weigh_what_they_score_as_one_does(launch, workplace):
    """Completions of 1 to 10 tokens: the mean of an update is over its scored tokens, whoever has them."""
    lines = [json.dumps({"prompt": "fox", "completion": " fox" * (1 + k * k % 10)}) for k in range(200)]
    (workplace / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = [*PLAIN, "--data.corpus", "pairs.jsonl", "--data.val_fraction", "0.2"]
    options += ["--model.optimizer.name", "adamw", "--model.optimizer.betas", "[0.9, 0.95]"]
    for batch, devices, run in (("8", "1", "one"), ("4", "2", "two")):
        how = ["--data.batch_size", batch, "--trainer.devices", devices]
        launch(*options, *how, "--run", run, processes=int(devices))
    assert_same("one", "two")
    how = ["--data.tokens_per_update", str(8 * 16), "--data.batch_size", "2", "--trainer.devices", "2"]
    launch(*options, *how, "--run", "accumulating")
    assert_same("one", "accumulating")


def test_processes_that_are_no_longer_replicas_stop_without_saving(launch):
    """In the last bit of one weight."""
    told = launch(*TWO, "--run", "two", sabotage="diverge", status=2)
    assert "process 1 has other values than process 0 after step 5, in " in told
    assert not list(Path("runs/two/checkpoints").glob("*"))


def test_masks_are_not_sent_from_process_to_process(launch):
    launch(*TWO, "--run", "two", sabotage="buffers")


@pytest.mark.slow
def test_tokens_per_update_make_the_same_run_on_any_number_of_processes(launch):
    """One process accumulates three batches of 12 windows, each of two processes two of 9."""
    options = [
        *PLAIN,
        "--model.optimizer.name",
        "adamw",
        "--data.tokens_per_update",
        str(36 * 16),
        "--data.batch_size",
        "12",
    ]
    one, two = ["--trainer.devices", "1"], ["--trainer.devices", "2"]
    launch(*options, *one, "--run", "one", processes=1)
    launch(*options, *two, "--run", "two")
    launch(*options, *two, "--run", "changing", terminate=([0], 3), status=143)
    launch("fit", "--resume", "runs/changing", *one, processes=1, terminate=([0], 6), status=143)
    assert read("runs/changing/checkpoints/last.safetensors").run.step == 7
    launch("fit", "--resume", "runs/changing", *two)
    for run in ("two", "changing"):
        assert len(losses(run)) == 10 + 2 * 2
        assert losses(run) == pytest.approx(losses("one"), rel=1e-5)
        for name, weight in weights("one").items():
            torch.testing.assert_close(weights(run)[name], weight, rtol=0, atol=1e-4, msg=name)


def test_a_signal_stops_both_and_they_resume_exactly(launch):
    """To one process, as a person sends it, and to all, as a cluster does; each has its own dropout.

    Only the first finds the temperature of a validation.
    """
    options = [*TWO, "--model.config.dropout", "0.3", "--temperature_scaling", "true"]
    launch(*options, "--run", "whole")
    for run, ranks in (("one", [1]), ("all", [0, 1])):
        launch(*options, "--run", run, terminate=(ranks, 3), status=143)
        saved = read(f"runs/{run}/checkpoints/last.safetensors")
        assert saved.run.step == 4
        assert not torch.equal(saved.tensors["random/0/cpu"], saved.tensors["random/1/cpu"])
        launch("fit", "--resume", "auto", "--run", run)
        for name, weight in weights("whole").items():
            assert torch.equal(weights(run)[name], weight)
        assert losses(run) == losses("whole")
        last = "checkpoints/last.safetensors"
        assert read(f"runs/{run}/{last}").run.best_loss == read(f"runs/whole/{last}").run.best_loss


def test_a_full_disk_of_one_process_stops_both(launch):
    options = [*TWO, "--checkpoint_every", "2", "--run", "full"]
    told = launch(*options, sabotage="full", status=2)
    assert "runs/full/checkpoints/last.safetensors: No space left on device" in told
    assert read("runs/full/checkpoints/last.safetensors").run.step == 5
    launch("fit", "--resume", "auto", "--run", "full")
    assert read("runs/full/checkpoints/last.safetensors").run.step == 10


@pytest.mark.slow
def test_two_in_bfloat16_accumulate_and_recompute_as_one_does(launch):
    """The same micro-batches of 9 windows, half of them on each: sums differ only in their order."""
    options = [*PLAIN, "--data.tokens_per_update", str(36 * 16), "--data.batch_size", "9"]
    options += ["--trainer.precision", "bf16-mixed", "--model.checkpoint_activations", "true"]
    # The keys' biases have gradients from rounding only, which these betas, unlike the recipe's, keep small.
    options += ["--model.optimizer.betas", "[0.9, 0.95]"]
    launch(*options, "--trainer.devices", "1", "--run", "one", processes=1)
    launch(*options, "--trainer.devices", "2", "--run", "two")
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    for name, weight in weights("one").items():
        torch.testing.assert_close(weights("two")[name], weight, rtol=0, atol=1e-3, msg=name)


@pytest.mark.slow
def test_the_first_process_plans_for_both(launch):
    """Whose clocks and speeds differ: both make the same updates of the same model, and end in time."""
    Path("text.txt").write_text("".join(f"{n * n} is the square of {n}.\n" for n in range(9000)), "utf-8")
    small = ["--model.config.emb_dim", "32", "--model.config.num_layers", "1", "--trainer.accelerator", "cpu"]
    told = launch("fit", "text.txt", *small, "--minutes", "20s", "--run", "timed")
    assert told.count("the plan is 32 x 1") == 1
    assert "ended after step " in told
    run = read("runs/timed/checkpoints/last.safetensors").run
    assert run.step == run.total > 0
    assert run.options["trainer"]["devices"] == 2
