"""`Limits`, on a clock that the tests tell: how many updates fit into a time, and what ends a run before."""

import dataclasses

import pytest

from gpt.errors import InputError
from gpt.plan.rule import END_SECONDS, Given, Machine, Plan, Text, choose
from gpt.run.limits import Limits, first_of_steps_and_epochs, next_part
from gpt.run.options import Options, TrainerOptions
from gpt.run.signals import Stopped
from gpt.training.options import ModelOptions
from gpt.weights.checkpoint import RunPart


def planned(**changes: object) -> Plan:
    """A plan whose steps, of a run without samples, are told."""
    machine = Machine(speed=3.3e11, memory=16e9)
    plan = choose(Text(size=10**7, val_fraction=0.01), machine, 60, Given())
    return dataclasses.replace(plan, **{"validation": 0.0, "slower": 1.0, "is_whole": True, **changes})


class Run:
    """Makes updates until `limits` end them: `seconds(step)` each, and validations of `validation`."""

    def __init__(
        self, plan: Plan | None, *, interval: int = 1000, sampled: int = 1, minute: float = 60.0
    ) -> None:
        self.part = RunPart()
        trainer = TrainerOptions(max_steps=plan.steps if plan else -1, val_check_interval=interval)
        options = Options(trainer=trainer, model=ModelOptions(sampled_softmax=sampled))
        self.limits = Limits(options, self.part, plan, deadline=True)
        self.limits.set_steps_and_epochs(1, 1)
        self.limits.begin(minute + END_SECONDS)
        self.now = 0.0
        self.validated: list[int] = []

    def train(self, seconds, validation: float = 0.0, loss=lambda step: 5.0 - step / 10_000) -> None:
        while not self.limits.is_over:
            self.now += seconds(self.part.step)
            self.part.step += 1
            self.limits.update(self.now)
            if self.limits.validates:
                self.now += validation
                self.validated.append(self.part.step)
                self.limits.validated(loss(self.part.step), self.now, validation)


@pytest.mark.parametrize("guess", [100, 300, 900])
@pytest.mark.parametrize("each", [0.04, 0.2])
def test_the_clock_corrects_the_number_of_steps(guess, each, capsys):
    run = Run(planned(steps=guess), interval=100)
    run.train(lambda _: each, validation=1.0)
    assert run.now == pytest.approx(60.0, rel=0.01)
    assert run.part.step == pytest.approx((60 - len(run.validated)) / each, abs=3)
    assert run.limits.why() == "the time of --minutes is over"
    assert "1:00 of training (--minutes without start and end)" in capsys.readouterr().err


@pytest.mark.parametrize("later", [0.05, 0.4])
def test_a_run_keeps_its_time_where_the_speed_changes(later):
    """Another process begins, or ends, half-way."""
    run = Run(planned(steps=300))
    run.train(lambda step: 0.2 if step < 150 else later)
    assert run.now == pytest.approx(60.0, rel=0.01)


@pytest.mark.parametrize("supposed", [1.0, 1.5, 2.9])
@pytest.mark.parametrize("real", [1.2, 1.5, 2.8])
def test_the_last_fifth_of_the_steps_takes_longer_where_ids_are_sampled(supposed, real):
    """As long as supposed or not: a minute is kept."""
    run = Run(planned(steps=500, slower=supposed), sampled=8)
    run.train(lambda step: 0.1 if step < 0.8 * run.part.total - 0.5 else 0.1 * real)
    assert run.now == pytest.approx(60.0, rel=0.011)


def test_what_a_plan_supposes_counts_until_it_is_measured():
    """A minute has 600 updates of a tenth of a second, or 350 and three validations of six seconds."""
    run = Run(planned(steps=300, slower=2.0, validation=6.0), interval=100)
    for step, total in ((1, 300), (2, 350)):  # after one update nothing is known of the speed
        run.part.step = step
        run.limits.update(0.1 * step)
        assert run.part.total == pytest.approx(total, abs=1)


TIME = "the time of --minutes is over"
EARLY = "before its time, as held-out text was best after step {} and more steps gained nothing"
STALLED = "before its time, as the held-out loss has not fallen since step {}"
A_PART = {"steps": 200, "is_whole": False}
ALL_TIME = {"steps": 1000}
DECIDED = {
    "the time ends inside a part": (A_PART, 17, {}, 170, TIME),
    "each part gains: twice as many steps, then all that the time allows": (A_PART, 85, {}, 850, TIME),
    "the second part gains nothing": (A_PART, 85, {400: 4.995}, 400, EARLY.format(200)),
    "the first part was best before its end": (A_PART, 85, {100: 4.0}, 200, EARLY.format(100)),
    "a further part begins with a higher rate": (A_PART, 50, {200: 4.0, 300: 4.6, 400: 4.8}, 500, TIME),
    "no fall at step 500 brings the end nearer, once": (
        ALL_TIME,
        100,
        {500: 4.97, 600: 4.98, 625: 3.0},
        625,
        STALLED.format(400),
    ),
    "no fall at step 900, when 1,125 would be later": (ALL_TIME, 100, {900: 4.97}, 1000, TIME),
}


@pytest.mark.parametrize(("plan", "seconds", "losses", "steps", "why"), DECIDED.values(), ids=DECIDED)
def test_held_out_losses_decide_when_a_run_ends(plan, seconds, losses, steps, why):
    """A step takes a tenth of a second. Losses that are not given fall slowly from 5."""
    run = Run(planned(**plan) if plan else None, interval=100, minute=seconds)
    run.train(lambda _: 0.1, loss=lambda step: losses.get(step, 5.0 - step / 10_000))
    assert run.part.step == pytest.approx(steps, abs=1)
    assert run.limits.why() == why
    assert not run.part.is_part  # a resumed run has no further part


@pytest.mark.parametrize(
    ("in_time", "end", "why"),
    [
        (119, 100, "the rest of the time is too short for a further part"),
        (120, 1 << 53, ""),  # all the time is the last part
        (299, 1 << 53, ""),
        (300, 200, "a further part of the time"),
    ],
)
def test_a_further_part_is_as_long_as_all_before_where_there_is_time_for_it_and_another(in_time, end, why):
    part = next_part(RunPart(step=100, best_step=100), in_time)
    assert (part.step, part.why) == (end, why)


@pytest.mark.parametrize(
    ("limits", "run", "step"),
    [
        pytest.param({"max_epochs": 3}, {}, 20, id="19.56 updates of 100 windows read 652 three times"),
        pytest.param({"max_epochs": 3}, {"step": 6, "place": 1800}, 8, id="six updates were larger"),
        pytest.param({"max_epochs": 2, "max_steps": 9}, {"total": 7}, 9, id="the total came from epochs"),
        pytest.param({"max_steps": 9}, {"total": 7}, 7, id="the total was planned"),
    ],
)
def test_epochs_count_the_windows_that_were_read(limits, run, step):
    end = first_of_steps_and_epochs(TrainerOptions(**limits), RunPart(**run), 652, 100)
    assert end.step == step


def test_a_resumed_run_makes_the_updates_that_its_checkpoint_says(capsys):
    options = Options(trainer=TrainerOptions(max_steps=600, val_check_interval=100))
    saved = RunPart(step=31, total=285, seconds=7.0)
    limits = Limits(options, saved)
    limits.set_steps_and_epochs(1, 1)
    limits.begin()
    assert "planned: 285 steps (as planned at its last save)" in capsys.readouterr().err
    saved.step = 32
    limits.update(900.0)
    assert saved.total == 285
    assert limits.why() == "as planned at its last save"


def test_a_run_that_was_killed_in_a_part_of_its_time_gets_a_further_part_when_it_is_resumed():
    """It was killed after 150 of the 200 steps of its first part, with 70 of its 85 seconds left."""
    run = Run(planned(**A_PART), interval=100, minute=85.0)
    killed = RunPart(
        step=150, total=200, seconds=15.0, seconds_per_step=0.1, is_part=True, planned_seconds=85.0
    )
    options = run.limits.options
    run.part = killed
    run.limits = Limits(options, killed)
    run.limits.set_steps_and_epochs(1, 1)
    run.limits.begin()
    run.now = killed.seconds
    run.train(lambda _: 0.1)
    assert run.part.step == pytest.approx(850, abs=1)
    assert run.validated == [200, 400, 850]
    assert run.limits.why() == TIME
    assert not killed.is_part


ENDED = {
    "steps": (
        {"max_steps": 9, "max_epochs": 9},
        {},
        r"\(max_steps 9\): ask .* with --trainer.max_steps",
    ),
    "epochs": ({"max_steps": 99, "max_epochs": 1}, {}, r"\(max_epochs 1\): .* with --trainer.max_epochs"),
    "a plan": ({"max_steps": 7}, {}, r"\(as planned at its last save\): .* --trainer.max_steps"),
    "a part": ({"max_steps": 9}, {"is_part": True}, r"\(a part of the time\): .* --trainer.max_steps"),
}


@pytest.mark.parametrize(("limits", "saved", "line"), ENDED.values(), ids=ENDED)
def test_a_run_that_has_ended_says_which_limit_to_raise(limits, saved, line):
    run = RunPart(step=9, total=9, place=900, **saved)
    resumed = Limits(Options(trainer=TrainerOptions(**limits)), run)
    resumed.set_steps_and_epochs(900, 100)
    with pytest.raises(Stopped, match=f"all 9 steps are done {line}"):
        resumed.check_left()


def test_time_that_is_over_before_the_first_step_is_said():
    limits = Limits(Options(trainer=TrainerOptions(max_steps=5)), RunPart(), planned(steps=5), deadline=True)
    limits.set_steps_and_epochs(1, 1)
    with pytest.raises(InputError, match="over before the first step: give more --minutes"):
        limits.begin(0.5)
