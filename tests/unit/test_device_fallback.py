"""What has no lowering runs on the CPU: correctly, counted, said once, or refused."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpu_dist.errors import UnsupportedError
from tpu_dist.runtime.operators.functional_kernels import functional_kernel
from tpu_dist.runtime.operators.lowering import Lowering
from tpu_dist.runtime.operators.operator import Operator

FALLS_BACK = "special_airy_ai.out"


def test_a_fallback_is_right_counted_and_said_once() -> None:
    torch.tpu.reset_fallback_counts()
    x = torch.linspace(-1, 1, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ours = torch.special.airy_ai(x.to("tpu"))
    torch.testing.assert_close(ours.cpu(), torch.special.airy_ai(x))
    assert torch.tpu.fallback_counts() == {FALLS_BACK: 3}
    said = [str(w.message) for w in caught if "has no lowering" in str(w.message)]
    assert len(said) == 1 and said[0].startswith(FALLS_BACK)


@pytest.mark.parametrize("error", [NotImplementedError, TypeError])
def test_what_jax_does_not_lower_runs_on_the_cpu_and_why_is_said_once(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(x: Any) -> Any:
        raise error("no such dtype here")

    kernel = kernel_of(broken)
    x = torch.linspace(-1, 1, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in [(5,), (1, 5)]:
            ours = kernel(x.to("tpu").reshape(shape))
            torch.testing.assert_close(ours.cpu(), torch.special.airy_ai(x).reshape(shape))
    said = [r.getMessage() for r in caplog.records if "no such dtype here" in r.getMessage()]
    assert len(said) == 1
    assert "aten.special_airy_ai.default" in said[0] and error.__name__ in said[0]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, AssertionError, ValueError])
def test_a_fault_in_a_lowering_is_raised(error: type[Exception]) -> None:
    def broken(x: Any) -> Any:
        raise error("a fault of ours")

    with pytest.raises(error, match="a fault of ours"):
        kernel_of(broken)(torch.ones(3, device="tpu"))


def kernel_of(function: Callable[..., Any]) -> Callable[..., Any]:
    overload = torch.ops.aten.special_airy_ai.default
    return functional_kernel(
        Operator(overload, Lowering(name="special_airy_ai", function=function))
    )


def test_pooling_of_nothing_is_native() -> None:
    torch.tpu.reset_fallback_counts()
    x = torch.ones(0, 2, 8, 8, device="tpu", requires_grad=True)
    out = torch.nn.functional.avg_pool2d(x, 3, 2)
    out.sum().backward()
    assert out.shape == (0, 2, 3, 3) and x.grad is not None and x.grad.shape == x.shape
    assert not torch.tpu.fallback_counts()


def test_a_fallback_writes_to_the_tensor_it_was_given() -> None:
    matrix = torch.tensor([[4.0, 1], [1, 3]])
    lu = torch.empty(2, 2, device="tpu").t()
    pivots = torch.empty(2, dtype=torch.int32, device="tpu")
    torch.linalg.lu_factor(matrix.to("tpu"), out=(lu, pivots))
    wanted, wanted_pivots = torch.linalg.lu_factor(matrix)
    torch.testing.assert_close(lu.cpu(), wanted)
    assert torch.equal(pivots.cpu(), wanted_pivots)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import torch\n{code}"],
        capture_output=True, text=True, timeout=120, cwd="/",
        env={**os.environ, "TPU_DIST_PLATFORM": "cpu", **environment},
    )  # fmt: skip


def test_fallbacks_can_be_refused() -> None:
    code = "x = torch.ones(3, device='tpu'); (x + x).sum().item(); torch.special.airy_ai(x)"
    done = run(code, TPU_DIST_FALLBACK="error")
    assert done.returncode == 1
    assert f"UnsupportedError: {FALLS_BACK} has no lowering to XLA" in done.stderr


@pytest.mark.parametrize("name", ["TPU_LAUNCH_BLOCKING", "TORCH_TPU_LAUNCH_BLOCKING"])
def test_debug_mode_is_chosen_by_the_environment(name: str) -> None:
    done = run("print(torch.tpu.eager_mode())", **{name: "1"})
    assert done.stdout == "EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING\n", done.stderr


def test_debug_mode_waits_for_each_operator() -> None:
    from torch.tpu import EagerMode

    assert torch.tpu.eager_mode() is EagerMode.DEFER_NEVER
    torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING)
    try:
        x = torch.ones(512, 512, device="tpu")
        for _ in range(10):
            x = x @ x / 512
            assert torch.tpu.current_stream().query(), "all is computed when an operator returns"
    finally:
        torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER)
    with pytest.raises(UnsupportedError, match="not there yet"):
        torch.tpu.set_eager_mode(EagerMode.DEFER_AND_FUSE)
