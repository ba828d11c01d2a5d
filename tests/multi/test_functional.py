"""Functional collectives on the backend: eager, compiled, and through autograd.

Every rank can make every rank's input, so the wanted result is worked out with plain tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from ranks import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

Results = Any
"""A tensor or a list of them."""

SHAPE = (4, 8)
OTHER = (8, 4)


def value(rank: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of `rank`: small integers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Case:
    """A collective, and what it gives `rank` when the ranks put in `xs`."""

    run: Callable[[Tensor, Any], Results]
    wanted: Callable[[list[Tensor], int], Results]
    differentiable: bool = False


def blocks(tensor: Tensor, parts: int, dim: int = 0) -> list[Tensor]:
    return list(tensor.chunk(parts, dim))


def reduced(xs: list[Tensor], op: str = "sum") -> Tensor:
    stacked = torch.stack(xs)
    return {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.mean(0),
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: stacked.prod(0),
    }[op]()


def split_unevenly(rank: int) -> list[int]:
    """Rank 0 keeps one row and sends three; rank 1 sends two and keeps two."""
    return [[1, 3], [2, 2]][rank]


def received_unevenly(rank: int) -> list[int]:
    return [split_unevenly(source)[rank] for source in range(2)]


def wanted_uneven(xs: list[Tensor], rank: int) -> Tensor:
    return torch.cat([x.split(split_unevenly(source))[rank] for source, x in enumerate(xs)])


CASES = {
    "all_reduce sum": Case(
        lambda x, g: funcol.all_reduce(x, "sum", g), lambda xs, r: reduced(xs), True
    ),
    "all_reduce avg": Case(
        lambda x, g: funcol.all_reduce(x, "avg", g), lambda xs, r: reduced(xs, "avg")
    ),
    "all_reduce max": Case(
        lambda x, g: funcol.all_reduce(x, "max", g), lambda xs, r: reduced(xs, "max")
    ),
    "all_reduce min": Case(
        lambda x, g: funcol.all_reduce(x, "min", g), lambda xs, r: reduced(xs, "min")
    ),
    "all_reduce product": Case(
        lambda x, g: funcol.all_reduce(x, "product", g), lambda xs, r: reduced(xs, "product")
    ),
    "all_reduce of a transposed view": Case(
        lambda x, g: funcol.all_reduce(x.t(), "sum", g), lambda xs, r: reduced(xs).t(), True
    ),
    "all_reduce twice": Case(
        lambda x, g: funcol.all_reduce(funcol.all_reduce(x, "sum", g) * 2 + 1, "sum", g),
        lambda xs, r: (reduced(xs) * 2 + 1) * len(xs),
        True,
    ),
    "two independent": Case(
        lambda x, g: funcol.all_reduce(x + 1, "sum", g) - funcol.all_reduce(x * 3, "sum", g),
        lambda xs, r: reduced([x + 1 for x in xs]) - reduced([x * 3 for x in xs]),
        True,
    ),
    "broadcast": Case(lambda x, g: funcol.broadcast(x, 1, g), lambda xs, r: xs[1]),
    "all_gather dim 0": Case(
        lambda x, g: funcol.all_gather_single(x, 0, g), lambda xs, r: torch.cat(xs), True
    ),
    "all_gather dim 1": Case(
        lambda x, g: funcol.all_gather_single(x, 1, g), lambda xs, r: torch.cat(xs, 1), True
    ),
    "all_gather by its old name": Case(
        lambda x, g: funcol.all_gather_tensor_autograd(x, 0, g), lambda xs, r: torch.cat(xs), True
    ),
    "reduce_scatter dim 0": Case(
        lambda x, g: funcol.reduce_scatter_single(x, "sum", 0, g),
        lambda xs, r: blocks(reduced(xs), len(xs))[r],
        True,
    ),
    "reduce_scatter dim 1": Case(
        lambda x, g: funcol.reduce_scatter_single(x, "sum", 1, g),
        lambda xs, r: blocks(reduced(xs), len(xs), 1)[r],
        True,
    ),
    "reduce_scatter avg": Case(
        lambda x, g: funcol.reduce_scatter_single(x, "avg", 0, g),
        lambda xs, r: blocks(reduced(xs, "avg"), len(xs))[r],
    ),
    "reduce_scatter by its old name": Case(
        lambda x, g: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, g),
        lambda xs, r: blocks(reduced(xs), len(xs))[r],
        True,
    ),
    "all_to_all even": Case(
        lambda x, g: funcol.all_to_all_single_autograd(x, None, None, g),
        lambda xs, r: torch.cat([blocks(x, len(xs))[r] for x in xs]),
        True,
    ),
    "all_to_all uneven": Case(
        lambda x, g: funcol.all_to_all_single_autograd(
            x, received_unevenly(dist.get_rank()), split_unevenly(dist.get_rank()), g
        ),
        wanted_uneven,
        True,
    ),
    "all_reduce_coalesced": Case(
        lambda x, g: funcol.all_reduce_coalesced([x, x.reshape(OTHER) * 2], "sum", g),
        lambda xs, r: [reduced(xs), reduced(xs).reshape(OTHER) * 2],
        True,
    ),
    "all_gather_coalesced": Case(
        lambda x, g: funcol.all_gather_single_coalesced([x, x.reshape(OTHER) * 2], g),
        lambda xs, r: [torch.cat(xs), torch.cat([x.reshape(OTHER) * 2 for x in xs])],
        True,
    ),
    "reduce_scatter_coalesced": Case(
        lambda x, g: funcol.reduce_scatter_single_coalesced(
            [x, x.reshape(OTHER) * 2], "sum", [0, 0], g
        ),
        lambda xs, r: [
            blocks(reduced(xs), len(xs))[r],
            blocks(reduced(xs).reshape(OTHER) * 2, len(xs))[r],
        ],
        True,
    ),
    "permute_tensor": Case(
        lambda x, g: funcol.permute_tensor(x.reshape(-1), [1, 0], g).reshape(SHAPE),
        lambda xs, r: xs[1 - r],
    ),
}
TWO_RANKS_ONLY = {"all_to_all uneven", "permute_tensor"}
DIFFERENTIABLE = [name for name, case in CASES.items() if case.differentiable]


def as_list(results: Results) -> list[Tensor]:
    return list(results) if isinstance(results, list | tuple) else [results]


def compiled(fn: Callable[..., Results]) -> Callable[..., Results]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def check_values(rank: int, name: str, compile_it: bool) -> None:
    case, group = CASES[name], dist.group.WORLD
    size = dist.get_world_size()
    xs = [value(source) for source in range(size)]

    def call(x: Tensor) -> Results:
        return [out * 1 for out in as_list(case.run(x, group))]  # used at once: it must be there

    run = compiled(call) if compile_it else call
    for _ in range(2):
        x = xs[rank].clone()
        got = run(x)
        assert_close(x, xs[rank], rtol=0, atol=0)  # inputs are left alone
        assert_close(got, as_list(case.wanted(xs, rank)), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_collective_gives_what_plain_tensors_give(pool2: RankPool, name: str) -> None:
    pool2(check_values, name, False)


@pytest.mark.parametrize("name", CASES)
def test_compiled_collective_gives_what_plain_tensors_give(pool2: RankPool, name: str) -> None:
    pool2(check_values, name, True)


@pytest.mark.parametrize("name", [name for name in CASES if name not in TWO_RANKS_ONLY])
def test_collective_of_four_gives_what_plain_tensors_give(pool4: RankPool, name: str) -> None:
    pool4(check_values, name, False)


# ---- autograd


def total_loss(outs: Results, rank: int) -> Tensor:
    parts = [(out * (index + rank + 2)).square() for index, out in enumerate(as_list(outs))]
    return sum((part.sum() for part in parts), torch.zeros(()))


def check_gradient(rank: int, name: str, compile_it: bool) -> None:
    case, size, group = CASES[name], dist.get_world_size(), dist.group.WORLD
    xs = [value(source).requires_grad_() for source in range(size)]
    sum((total_loss(case.wanted(xs, r), r) for r in range(size)), torch.zeros(())).backward()
    mine = value(rank).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return total_loss(case.run(x * 1, group), rank)

    (compiled(loss) if compile_it else loss)(mine).backward()
    assert_close(mine.grad, xs[rank].grad)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_flows_back_across_ranks(pool2: RankPool, name: str) -> None:
    pool2(check_gradient, name, False)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_compiled_gradient_flows_back_across_ranks(pool2: RankPool, name: str) -> None:
    pool2(check_gradient, name, True)


NN_CASES = {
    "all_reduce": Case(lambda x, g: dist_nn.all_reduce(x), lambda xs, r: reduced(xs)),
    "all_gather": Case(lambda x, g: torch.cat(dist_nn.all_gather(x)), lambda xs, r: torch.cat(xs)),
    "reduce_scatter": Case(
        lambda x, g: dist_nn.reduce_scatter(torch.empty(2, 8), list(x.chunk(2))),
        lambda xs, r: blocks(reduced(xs), 2)[r],
    ),
    "all_to_all": Case(
        lambda x, g: torch.cat(
            dist_nn.all_to_all([torch.empty(2, 8), torch.empty(2, 8)], list(x.chunk(2)))
        ),
        lambda xs, r: torch.cat([blocks(x, 2)[r] for x in xs]),
    ),
    "all_to_all_single": Case(
        lambda x, g: dist_nn.all_to_all_single(torch.empty(SHAPE), x),
        lambda xs, r: torch.cat([blocks(x, 2)[r] for x in xs]),
    ),
    "broadcast": Case(lambda x, g: dist_nn.broadcast(x, 0), lambda xs, r: xs[0]),
    "reduce": Case(
        lambda x, g: dist_nn.reduce(x, 0) * (dist.get_rank() == 0),
        lambda xs, r: reduced(xs) * (r == 0),
    ),
    "gather": Case(
        lambda x, g: torch.cat(dist_nn.gather(x, 0)) * (dist.get_rank() == 0),
        lambda xs, r: torch.cat(xs) * (r == 0),
    ),
    "scatter": Case(
        lambda x, g: dist_nn.scatter([part.contiguous() for part in x.chunk(2)], 0),
        lambda xs, r: blocks(xs[0], 2)[r],
    ),
}


def check_nn(rank: int, name: str) -> None:
    case = NN_CASES[name]
    xs = [value(source).requires_grad_() for source in range(2)]
    wanted = case.wanted(xs, rank)
    sum(total_loss(case.wanted(xs, r), r) for r in range(2)).backward()
    mine = value(rank).requires_grad_()
    got = case.run(mine * 1, None)
    assert_close(got, wanted, rtol=0, atol=0)
    total_loss(got, rank).backward()
    gradient = xs[rank].grad  # none where this rank's input is not used
    assert_close(mine.grad, torch.zeros(SHAPE) if gradient is None else gradient)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", NN_CASES)
def test_autograd_functions_of_distributed_nn_agree(pool2: RankPool, name: str) -> None:
    pool2(check_nn, name)


# ---- how a group may be named


def group_of(form: str) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    return {
        "group": lambda: dist.new_group([0, 1]),
        "name": lambda: dist.new_group([0, 1]).group_name,
        "ranks": lambda: [0, 1],
        "mesh": lambda: mesh,
        "dim of a mesh": lambda: (mesh, 0),
    }[form]()


def check_group_form(rank: int, form: str, compile_it: bool) -> None:
    group = group_of(form)

    def call(x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group) + 1

    got = (compiled(call) if compile_it else call)(value(rank))
    assert_close(got, value(0) + value(1) + 1, rtol=0, atol=0)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["group", "name", "ranks", "mesh", "dim of a mesh"])
def test_groups_are_found_by(pool2: RankPool, form: str, compile_it: bool) -> None:
    pool2(check_group_form, form, compile_it)


def check_subgroups(rank: int, compile_it: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            funcol.all_gather_single(x, 0, (mesh, 0)) * 1,
            funcol.all_reduce(x, "sum", (mesh, 1)) * 1,
        )

    down, across = (compiled(call) if compile_it else call)(value(rank))
    column, row = rank % 2, rank // 2
    assert_close(down, torch.cat([value(column), value(column + 2)]), rtol=0, atol=0)
    assert_close(across, value(row * 2) + value(row * 2 + 1), rtol=0, atol=0)


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_mesh_dims_reduce_apart(pool4: RankPool, compile_it: bool) -> None:
    pool4(check_subgroups, compile_it)


# ---- waiting


def check_wait(rank: int) -> None:
    outs = [funcol.all_reduce(value(rank) * k, "sum", dist.group.WORLD) for k in range(1, 9)]
    assert all(isinstance(out, funcol.AsyncCollectiveTensor) for out in outs)
    for k, out in reversed(list(enumerate(outs, start=1))):
        got = funcol.wait_tensor(out.elem)
        assert_close(got, (value(0) + value(1)) * k, rtol=0, atol=0)
        assert_close(out.wait(), got, rtol=0, atol=0)  # a second wait is harmless


def test_results_may_be_waited_for_in_any_order(pool2: RankPool) -> None:
    pool2(check_wait)


def check_views_of_results(rank: int) -> None:
    out = funcol.all_gather_single(value(rank), 0, dist.group.WORLD)
    view = out.view(2, *SHAPE)[1]  # views do not wait, using them does
    assert_close(view + 0, value(1), rtol=0, atol=0)


def test_views_of_results_are_waited_for_when_used(pool2: RankPool) -> None:
    pool2(check_views_of_results)


def check_dtypes(rank: int, dtype: torch.dtype) -> None:
    got = funcol.all_reduce(value(rank, dtype=dtype), "sum", dist.group.WORLD) * 1
    wanted = (value(0) + value(1)).to(dtype)
    assert got.dtype == dtype
    assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]
)
def test_sums_of_other_dtypes_keep_them(pool2: RankPool, dtype: torch.dtype) -> None:
    pool2(check_dtypes, dtype)


# ---- the plain verbs, rewritten by the compiler


def plain_all_reduce(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def plain_all_gather(x: Tensor) -> Tensor:
    out = x.new_empty(2 * x.size(0), x.size(1))
    dist.all_gather_single(out, x)
    return out + 1


def plain_all_gather_list(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(parts, x)
    return parts[0] * 2 - parts[1]


def plain_reduce_scatter(x: Tensor) -> Tensor:
    out = x.new_empty(x.size(0) // 2, x.size(1))
    dist.reduce_scatter_single(out, x)
    return out + 1


def plain_all_to_all(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out + 1


PLAIN = {
    "all_reduce": (plain_all_reduce, lambda xs, r: reduced(xs) * 2 + 1),
    "all_gather": (plain_all_gather, lambda xs, r: torch.cat(xs) + 1),
    "all_gather into a list": (plain_all_gather_list, lambda xs, r: xs[0] * 2 - xs[1]),
    "reduce_scatter": (plain_reduce_scatter, lambda xs, r: blocks(reduced(xs), 2)[r] + 1),
    "all_to_all": (plain_all_to_all, lambda xs, r: torch.cat([blocks(x, 2)[r] for x in xs]) + 1),
}


def check_plain(rank: int, name: str) -> None:
    fn, wanted = PLAIN[name]
    xs = [value(source) for source in range(2)]
    for run in (fn, compiled(fn)):
        assert_close(run(value(rank)), wanted(xs, rank), rtol=0, atol=0)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_verbs_compile_into_one_graph(pool2: RankPool, name: str) -> None:
    pool2(check_plain, name)


def check_breaks(rank: int) -> None:
    """Verbs that no graph can hold: dynamo calls them, and compiles nothing of what they call."""

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        dist.broadcast(y, src=0)
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        dist.barrier()
        return y + 1

    for _ in range(2):
        names = []

        def backend(graph: torch.fx.GraphModule, inputs: Any, names: list[str] = names) -> Any:
            names.append("a graph")
            return graph.forward

        run = torch.compile(fn, backend=backend)
        for _ in range(3):
            assert_close(run(value(rank)), value(0) * 4 + 1, rtol=0, atol=0)
        assert len(names) == 2, "x * 2, and y + 1"
        torch._dynamo.reset()  # must not make dynamo forget to keep out


def test_verbs_that_break_a_graph_are_left_alone_by_dynamo(pool2: RankPool) -> None:
    pool2(check_breaks)
