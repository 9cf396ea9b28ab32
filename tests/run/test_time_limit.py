"""The clock of a run: how many updates a limit of time allows."""

import pytest

from gpt.run.time_limit import Speed, TimeLimit
from gpt.weights.checkpoint import RunPart


def test_the_speed_is_that_of_the_last_seconds():
    """Three updates of a second, two of two, one that takes longer than the window of three seconds."""
    speed = Speed(window=3.0, slower=1.0)
    speed.begin(0.0)
    seconds = [speed.update(-1, now) for now in (1.0, 2.0, 3.0, 5.0, 7.0, 17.0)]
    assert seconds == pytest.approx([1.0, 1.0, 1.0, 4 / 3, 2.0, 10.0])


def test_the_speed_of_late_updates_is_measured_from_the_first_of_them():
    speed = Speed(window=100.0, slower=3.0)
    assert speed.update(-1, 5.0) is None  # it may have compiled
    assert [speed.update(late, now) for late, now in ((0, 6.0), (1, 9.0))] == [1.0, None]
    assert speed.update(2, 15.0) == pytest.approx(2.0)  # six seconds, for three units of work
    usual = Speed(window=100.0, slower=1.0)
    usual.begin(0.0)
    assert [usual.update(late, now) for late, now in ((0, 1.0), (1, 2.0))] == [1.0, 1.0]


def test_the_speed_of_a_run_is_that_of_the_last_fifth_of_its_time_without_validations():
    """A fifth of a minute has 12 seconds: in the end 30 updates of 0.2 seconds and 60 of 0.1."""
    limit = TimeLimit(60.0, "a minute", includes_last=True)
    part = RunPart(total=10_000)
    now = 0.0
    for each in [0.2] * 100 + [0.1] * 60:
        if part.step == 130:
            limit.validated(5.0)
            now += 5.0
        now += each
        part.step += 1
        limit.update(part, now)
    assert part.seconds_per_step == pytest.approx(12 / 90, rel=0.01)


@pytest.mark.parametrize(("step", "last"), [(100, 540), (101, 551)])
def test_a_validation_that_is_due_now_still_has_to_fit_into_the_time(step, last):
    """50 seconds are left for updates of 0.1, a validation of one second after each 100, and the last one."""
    limit = TimeLimit(60.0, "a minute", validation=1.0, includes_last=True)
    part = RunPart(step=step, seconds_per_step=0.1)
    assert limit.last_step(part, 10.0, 100) == pytest.approx(last, abs=1)


@pytest.mark.parametrize(("step", "early"), [(0, 601.0), (400, 201.0), (450, 101.0), (500, -3.0)])
def test_the_last_fifth_of_the_updates_counts_as_much_slower_as_it_is(step, early):
    """The last 100 of 500 updates take twice as long, so all of them take the time of 600 early ones."""
    assert Speed(window=1.0, slower=2.0).last_step(step, early) == 500
