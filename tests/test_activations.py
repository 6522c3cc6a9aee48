"""The activations of experts: situ_glu's native code against its formula in float64, and all of them in Experts."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import moonep
from moonep import _C
from moonep.nn import Experts, situ_glu
from moonep.nn.activations import _plain_situ_glu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KERNELS = ["generic", "avx2", "avx512"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _C.row_kernels()
    if not _C.use_row_kernels(request.param):
        pytest.skip(f"no {request.param} on this machine")
    yield request.param
    assert _C.use_row_kernels(before)


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    """The formula, in float64, as a product of its parts."""
    gate, up = gate_up.double().chunk(2, -1)
    return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()


def inputs(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """[rows, 2 * width], of sizes from 2^-20 to 2^7."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-20, 8, (rows, 2 * width), generator=generator).float())
    return (torch.randn(rows, 2 * width, generator=generator) * sizes).to(dtype)


def units(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """The distance to the next number of `dtype`."""
    info = torch.finfo(dtype)
    return torch.exp2(values.abs().clamp_min(info.smallest_normal).log2().floor()) * info.eps


@each_dtype
@pytest.mark.parametrize("width", [1, 7, 8, 17, 100])
def test_forward(kernels: str, width: int, dtype: torch.dtype) -> None:
    gate_up = inputs(300, width, dtype)
    out, expected = situ_glu(gate_up), exact(gate_up)
    assert out.dtype == dtype
    off = (out.double() - expected).abs()
    wrong = 12 if dtype == torch.float32 else 0.51
    assert (off <= wrong * units(dtype, expected) + 1e-42).all()


@each_dtype
@pytest.mark.parametrize("width", [1, 8, 19])
def test_backward(kernels: str, width: int, dtype: torch.dtype) -> None:
    gate_up, grad = inputs(300, width, dtype).requires_grad_(), inputs(300, width, dtype, seed=1)[:, :width]
    (found,) = torch.autograd.grad(situ_glu(gate_up), gate_up, grad)
    wide = gate_up.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact(wide), wide, grad.double())
    assert found.dtype == dtype
    off = (found.double() - expected).abs()
    # The gate's slope is a difference where the gate is below 0.
    slack = 1e-6 * torch.cat([grad, grad], 1).double().abs() * 25
    assert (off <= 0.51 * units(dtype, expected) + slack).all()


def test_every_cpu_gives_the_same_bits() -> None:
    gate_up, grad = inputs(50, 33).requires_grad_(), inputs(50, 33, seed=1)[:, :33]
    found, before = [], _C.row_kernels()
    for name in KERNELS:
        if _C.use_row_kernels(name):
            out = situ_glu(gate_up)
            found.append((out, *torch.autograd.grad(out, gate_up, grad)))
    assert _C.use_row_kernels(before)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, found[0], strict=True))


def test_gradients_by_finite_differences(kernels: str) -> None:
    gate_up = (torch.randn(40, 24, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    target = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad((situ_glu(gate_up) * target).sum(), gate_up)
    step = 2**-6
    with torch.no_grad():
        for column in range(24):
            change = torch.zeros(24)
            change[column] = step
            rise = (situ_glu(gate_up + change) - situ_glu(gate_up - change)) * target
            torch.testing.assert_close(found[:, column], rise.sum(1) / (2 * step), rtol=2e-3, atol=2e-3)
    wide = gate_up.detach()[:3].double().requires_grad_()
    assert torch.autograd.gradcheck(situ_glu, wide)


@each_dtype
def test_bounded_whatever_comes(kernels: str, dtype: torch.dtype) -> None:
    inf, big = math.inf, torch.finfo(dtype).max
    some = torch.tensor([0.0, -0.0, 1e-30, 1.0, 40.0, 90.0, 174.0, 176.0, 700.0, big, inf])
    values = torch.cat([some, -some, torch.linspace(-30, 400, 2001)]).to(dtype)
    for up in (25.0, -80.0, 200.0, 250.0, 1000.0, inf, -inf, 0.0):
        pair = torch.cat([values, torch.full_like(values, up)]).requires_grad_()
        out = situ_glu(pair)
        assert out.abs().max() <= 100
        out.sum().backward()
        assert pair.grad is not None
        assert pair.grad.isfinite().all()
    assert situ_glu(torch.tensor([inf, inf], dtype=dtype)).item() == 100
    assert situ_glu(torch.tensor([inf, -inf], dtype=dtype)).item() == -100
    assert situ_glu(torch.tensor([-inf, inf], dtype=dtype)).item() == 0
    ends = torch.tensor([inf, inf], dtype=dtype, requires_grad=True)
    situ_glu(ends).backward()
    assert ends.grad is not None
    assert (ends.grad == 0).all()


@each_dtype
def test_nan_reaches_its_own_place_and_no_other(kernels: str, dtype: torch.dtype) -> None:
    clean = inputs(4, 20, dtype)
    clean_out = situ_glu(clean)
    for column in (0, 5, 19, 20, 25, 39):
        gate_up = clean.clone()
        gate_up[2, column] = math.nan
        gate_up.requires_grad_()
        out = situ_glu(gate_up)
        spoiled = torch.zeros(4, 20, dtype=torch.bool)
        spoiled[2, column % 20] = True
        assert torch.equal(out.isnan(), spoiled)
        assert torch.equal(out[~spoiled], clean_out[~spoiled])
        out.sum().backward()
        assert gate_up.grad is not None
        assert torch.equal(gate_up.grad.isnan(), spoiled.repeat(1, 2))
    with_grad = clean.clone().requires_grad_()
    situ_glu(with_grad).backward(torch.full((4, 20), math.nan, dtype=dtype))
    assert with_grad.grad is not None
    assert with_grad.grad.isnan().all()


def test_shapes_strides_and_threads() -> None:
    gate_up = inputs(4000, 50)
    expected = situ_glu(gate_up)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        given = gate_up.clone().requires_grad_()
        out = situ_glu(given)
        assert torch.equal(out, expected)
        out.sum().backward()  # a gradient of strides 0
        if threads == 1:
            grad = given.grad
    torch.set_num_threads(before)
    assert torch.equal(grad, given.grad)
    assert torch.equal(situ_glu(gate_up.view(40, 100, 100)), expected.view(40, 100, 50))
    assert torch.equal(situ_glu(gate_up.t().contiguous().t()), expected)
    assert torch.equal(situ_glu(gate_up[7]), expected[7])
    assert torch.equal(situ_glu(torch._neg_view(gate_up)), situ_glu(-gate_up))
    for shape in ((0, 8), (3, 0), (0,), (2, 0, 4)):
        empty = torch.zeros(shape, requires_grad=True)
        out = situ_glu(empty)
        assert out.shape == (*shape[:-1], shape[-1] // 2)
        out.sum().backward()
        assert empty.grad is not None


def test_other_devices_and_dtypes() -> None:
    assert situ_glu(torch.empty(3, 4, device="meta", dtype=torch.bfloat16)).shape == (3, 2)
    gate_up = inputs(20, 6)
    assert situ_glu(gate_up.double()).dtype == torch.float64
    for dtype in DTYPES:
        low = gate_up.to(dtype)
        assert _plain_situ_glu(low).dtype == dtype
        torch.testing.assert_close(_plain_situ_glu(low), situ_glu(low))
    with pytest.raises(TypeError, match=r"gate_up: expected a floating dtype, got torch.int64"):
        situ_glu(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"gate_up: expected shape \[..., 2F\], got \[2, 3\]"):
        situ_glu(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"got \[\]"):
        situ_glu(torch.zeros(()))


PLAIN = {
    "swiglu": lambda gate, up: gate * gate.sigmoid() * up,
    "gelu": lambda gate, up: gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up,
    "situ_glu": lambda gate, up: exact(torch.cat([gate, up], -1)),
}


@pytest.mark.parametrize("activation", PLAIN)
def test_in_experts(activation: str) -> None:
    torch.manual_seed(0)
    with moonep.Buffer(num_experts=3, top_k=1, hidden=8, max_tokens=20, dtype=torch.float32) as ep:
        experts = Experts(ep, 12, activation=activation)
        nn.init.normal_(experts.w_gate_up)
        idx = torch.arange(20)[:, None] % 3
        x = torch.randn(20, 8)
        plan = ep.plan(idx)
        recv = ep.dispatch(x, plan)
        y = ep.combine(experts(recv.x, plan), plan, recv.weights)
        y.square().sum().backward()

    w_gate_up, w_down = (w.detach().double().requires_grad_() for w in (experts.w_gate_up, experts.w_down))
    expected = []
    for t in range(20):
        gate, up = (x[t].double() @ w_gate_up[t % 3]).chunk(2)
        expected.append(PLAIN[activation](gate, up) @ w_down[t % 3])
    torch.testing.assert_close(y.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)
    torch.stack(expected).square().sum().backward()
    for found, wide in ((experts.w_gate_up, w_gate_up), (experts.w_down, w_down)):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.double(), wide.grad, rtol=1e-3, atol=1e-3)
