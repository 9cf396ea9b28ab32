import math

import pytest

from gpt.training.schedule import learning_rate_factor


def factors(**options):
    return [learning_rate_factor(step, total_steps=100, **options) for step in range(101)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_climbs_from_the_first_step_to_the_peak(schedule):
    values = factors(schedule=schedule, warmup_steps=10)
    assert values[:10] == pytest.approx([k / 10 for k in range(1, 11)])
    assert values[10] == pytest.approx(1.0)


def test_linear_ends_at_its_final_value():
    values = factors(schedule="linear", warmup_steps=20, final=0.1)
    assert values[60] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)


def test_cosine_at_its_corners():
    values = factors(schedule="cosine", final=0.2)
    assert values[0] == pytest.approx(1.0)
    assert values[25] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert values[50] == pytest.approx(0.6)
    assert values[100] == pytest.approx(0.2)
