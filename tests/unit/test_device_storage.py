"""Tensors on "tpu": what shares memory, what is written where, what leaves the process."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

Tensor = torch.Tensor

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "select": lambda x: x[1],
    "select in the middle": lambda x: x[:, 2],
    "slice": lambda x: x[1:3],
    "slice of columns": lambda x: x[:, :, 1:4],
    "step": lambda x: x[:, ::2],
    "steps of two dims": lambda x: x[::2, :, ::3],
    "view": lambda x: x.view(-1),
    "narrow then flatten": lambda x: x[1:3].flatten(),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 2),
    "unsqueeze": lambda x: x[:, None, 1],
    "squeeze": lambda x: x[:1].squeeze(0),
    "as_strided": lambda x: x.as_strided((3, 2), (7, 3), 5),
    "split": lambda x: x.split(2, dim=1)[1],
    "unbind": lambda x: x.unbind(2)[3],
    "one element": lambda x: x[1, 2, 3],
    "nothing": lambda x: x[2:2],
    "slice of a transpose": lambda x: x.transpose(0, 1)[1:, 1:3],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view as int32": lambda x: x.view(torch.int32),
    "view as wider": lambda x: x.view(torch.float64),
    "view as bytes": lambda x: x[1].view(torch.uint8)[2:3],
}


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The same tensor on the CPU and on the device."""
    there = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    return there, there.to("tpu")


def same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.device == torch.device("tpu", 0)
    assert ours.stride() == theirs.stride() and ours.storage_offset() == theirs.storage_offset()
    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shows_what_it_shows_on_the_cpu(name: str) -> None:
    theirs, ours = pair(4, 5, 6)
    same(VIEWS[name](ours), VIEWS[name](theirs))


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_is_seen_in_its_base_and_nowhere_else(name: str) -> None:
    theirs, ours = pair(4, 5, 6)
    for base in (theirs, ours):
        view = VIEWS[name](base)
        view.mul_(3)
        view.copy_(view + 1)
        if view.dim() == 1:
            view.fill_(7)
    same(ours, theirs)


def test_a_write_to_the_base_is_seen_in_a_view() -> None:
    theirs, ours = pair(4, 5)
    for base in (theirs, ours):
        view = base.t()[1:3]
        base.add_(1)
        base[2] = 0
        base[0, :] = view[0, 0]
    same(ours.t()[1:3], theirs.t()[1:3])


def test_a_clone_is_another_tensor_whichever_is_written_to() -> None:
    for first in (True, False):
        theirs, ours = pair(3, 3)
        copies = [theirs.clone(), ours.clone()]
        for original, clone in zip((theirs, ours), copies, strict=True):
            (original if first else clone).add_(10)
            (original if first else clone)[1].zero_()
        same(ours, theirs)
        same(copies[1], copies[0])


def test_copying_between_tensors_casts_broadcasts_and_aliases() -> None:
    theirs, ours = pair(4, 4)
    for base, device in ((theirs, "cpu"), (ours, "tpu")):
        base[:2].copy_(base[2:])
        base[:, 0].copy_(torch.tensor([9, 8, 7, 6], device=device))
        base[3].copy_(torch.tensor(2.5, dtype=torch.float64, device=device))
        base.add_(base.t().clone())
    same(ours, theirs)
    ours[1].copy_(torch.ones(4))  # from the host
    theirs[1].copy_(torch.ones(4))
    back = torch.empty(4, 4)
    back.copy_(ours)
    assert torch.equal(back, theirs)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    ],
)  # fmt: skip
def test_every_dtype_goes_there_and_back_with_its_width(dtype: torch.dtype) -> None:
    source = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    there = source.to("tpu")
    assert there.dtype == dtype and there.untyped_storage().nbytes() == 5 * dtype.itemsize
    back = there[1:].cpu()
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), source[1:].view(torch.uint8))


def test_sixty_four_bits_are_kept_and_jax_is_left_alone() -> None:
    import jax
    from jax import numpy as jnp

    big = torch.tensor([2**53 + 1, -(2**62)], device="tpu")
    assert (big + 1).tolist() == [2**53 + 2, -(2**62) + 1]
    third = torch.tensor([1.0], dtype=torch.float64, device="tpu") / 3
    assert third.item() == 1 / 3
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3).dtype == jnp.int32


def test_strides_of_results_are_torchs() -> None:
    for make in (
        lambda d: torch.ones(2, 3, device=d).t() + 1,
        lambda d: torch.ones(2, 3, 4, 5, device=d).to(memory_format=torch.channels_last) * 2,
        lambda d: torch.empty_like(torch.ones(2, 3, device=d).t()),
        lambda d: torch.ones(2, 3, 4, device=d).permute(2, 0, 1).clone(),
        lambda d: torch.ones(2, 3, device=d).t().contiguous(),
        lambda d: torch.ones(3, 1, device=d).expand(3, 4) + torch.ones(4, 3, device=d).t(),
        lambda d: torch.ones(4, 4, device=d).t().sum(0, keepdim=True),
        lambda d: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).to(d),
    ):
        ours, theirs = make("tpu"), make("cpu")
        assert ours.stride() == theirs.stride()
        assert ours.shape == theirs.shape


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("target", ["cpu", "tpu", None])
def test_a_saved_tensor_is_loaded_where_it_is_asked_for(
    target: str | None, weights_only: bool
) -> None:
    theirs, ours = pair(4, 5)
    for tensor in (ours, theirs, ours.t()[1:]):
        file = io.BytesIO()
        torch.save({"x": tensor, "again": tensor}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=target, weights_only=weights_only)
        wanted = tensor.device.type if target is None else target
        assert loaded["x"].device.type == wanted
        assert torch.equal(loaded["x"].cpu(), tensor.cpu())
        loaded["x"].zero_()
        assert not loaded["again"].any(), "tensors that shared a storage still do"


def test_deepcopy_keeps_what_is_shared_and_pickle_the_device() -> None:
    _, ours = pair(4, 5)
    whole, view = copy.deepcopy((ours, ours[1]))
    assert whole.device.type == "tpu" and torch.equal(whole.cpu(), ours.cpu())
    whole.zero_()
    assert not view.any() and ours.any()
    loaded = pickle.loads(pickle.dumps(ours.t()))
    assert loaded.device.type == "tpu" and torch.equal(loaded.cpu(), ours.t().cpu())


def test_a_storage_can_be_freed_and_filled_again() -> None:
    _, ours = pair(4, 4)
    storage = ours.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    with pytest.raises(RuntimeError, match="freed by resize_"):
        ours + 1
    storage.resize_(64)
    ours.copy_(torch.ones(4, 4))
    assert ours.sum().item() == 16
    ours.resize_(2, 2)
    assert ours.shape == (2, 2) and ours.untyped_storage().nbytes() == 64
    ours.resize_(5, 5)
    assert ours.flatten()[:16].sum().item() == 16


def test_set_makes_a_tensor_look_at_another_storage() -> None:
    _, ours = pair(4, 4)
    other = torch.empty(0, device="tpu").set_(ours.untyped_storage(), 4, (2, 2), (4, 1))
    other.fill_(0)
    assert ours[1, :2].tolist() == [0, 0] and ours[2, :2].tolist() == [0, 0]
    other.set_(ours)
    assert other.shape == (4, 4)


def test_metadata_in_place() -> None:
    theirs, ours = pair(1, 3, 4)
    for x in (theirs, ours):
        x.squeeze_(0).t_().unsqueeze_(1).transpose_(0, 1)
    same(ours, theirs)


def test_data_ptr_tells_storages_apart() -> None:
    _, ours = pair(4)
    storage = ours.untyped_storage()
    assert storage.data_ptr() == ours[1:].untyped_storage().data_ptr()
    assert storage.data_ptr() != ours.clone().untyped_storage().data_ptr()


def test_printing_shows_values_and_device() -> None:
    _, ours = pair(2, 2)
    assert "[1., 2.]" in repr(ours) and "device='tpu:0'" in repr(ours)
    assert "Parameter" in repr(torch.nn.Parameter(ours))
    assert f"{ours[0, 0]:.1f}" == "1.0"
    assert repr(torch.empty(0, device="tpu")) == "tensor([], device='tpu:0')"


def test_autograd_notices_what_was_written_to() -> None:
    x = torch.ones(3, device="tpu", requires_grad=True)
    y = x.exp()
    y[0] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x.add_(1)
    z = x.clone()
    version = z._version
    z[1:].mul_(2)
    assert z._version == version + 1
    z.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 2, 2]


def test_another_device_of_the_process_is_refused() -> None:
    with pytest.raises(RuntimeError, match="one TPU device"):
        torch.ones(2, device="tpu:1")
    assert torch.ones(2, device="tpu:0").device == torch.device("tpu", 0)


def test_a_pinned_loader_feeds_the_device() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    got = [batch[0].to("tpu", non_blocking=True).sum().item() for batch in loader]
    assert got == [6, 22]
    pinned = torch.ones(2).pin_memory()
    assert pinned.tolist() == [1, 1] and pinned.is_pinned() and not torch.ones(2).is_pinned()


def test_conjugates_and_negatives_are_views() -> None:
    theirs = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2]])
    ours = theirs.to("tpu")
    for make in (
        lambda x: x.conj(),
        lambda x: x.conj().clone(),
        lambda x: x.conj() @ x.t(),
        lambda x: x.imag,
        lambda x: x.conj().imag,
        lambda x: x.mH + x,
        lambda x: torch.view_as_real(x)[..., 1],
    ):
        torch.testing.assert_close(make(ours).cpu(), make(theirs))
    for x in (theirs, ours):
        x.real.add_(1)
        x.conj().mul_(2j)
    torch.testing.assert_close(ours.cpu(), theirs)
