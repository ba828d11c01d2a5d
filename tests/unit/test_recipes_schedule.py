import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_dist.recipes.schedule import OptimizerConfig, learning_rate_at


def rates(num_steps: int, config: OptimizerConfig) -> list[float]:
    return [
        learning_rate_at(step, num_steps=num_steps, config=config)
        for step in range(1, num_steps + 1)
    ]


@given(st.integers(1, 300), st.floats(0, 0.99), st.floats(0, 1))
def test_the_rate_rises_to_its_peak_then_falls_to_its_end(
    num_steps: int, warmup: float, final: float
) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, warmup_ratio=warmup, final_learning_rate_ratio=final
    )
    found = rates(num_steps, config)
    peak = int(warmup * num_steps)
    assert all(0 <= rate <= 2 * (1 + 1e-9) for rate in found)
    assert found[:peak] == sorted(found[:peak])
    falling = found[max(peak - 1, 0) :]
    assert all(
        later <= earlier + 1e-9 for earlier, later in zip(falling, falling[1:], strict=False)
    )
    assert found[-1] == pytest.approx(2 * final, abs=1e-9)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    found = rates(10, OptimizerConfig(learning_rate=1.0, warmup_ratio=0.4))
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4] < 1


def test_half_way_through_the_cosine_is_half_way_down() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_ratio=0.0, final_learning_rate_ratio=0.2)
    assert learning_rate_at(5, num_steps=10, config=config) == pytest.approx(0.6)


@pytest.mark.parametrize("step", [-1, 0, 11])
def test_a_step_outside_the_run_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="1 to 10"):
        learning_rate_at(step, num_steps=10, config=OptimizerConfig())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("max_gradient_norm", -1.0),
        ("max_gradient_norm", math.inf),
        ("final_learning_rate_ratio", 1.5),
        ("warmup_ratio", 1.0),
        ("warmup_ratio", -0.1),
        ("weight_decay", -1.0),
        ("weight_decay", math.nan),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        OptimizerConfig(**{name: value})
