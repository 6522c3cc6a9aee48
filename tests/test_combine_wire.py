"""combine_wire="payload": every rank's sum is rounded to the rows' dtype before it crosses, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moonep
from moonep import reference

E, K, T = 24, 6, 70


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same_as_reference(rank: int, transport: str, dtype_name: str, hidden: int) -> int:
    """Both wires against the reference, forward and backward; how many outputs the wires differ in."""
    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(rank)
    idx = torch.randint(-1, E, (T - 9 * rank, K), generator=generator)
    x0 = torch.randn(len(idx), hidden, generator=generator).to(dtype)
    w0 = torch.rand(len(idx), K, generator=generator)
    grad_y = torch.randn(len(idx), hidden, generator=generator).to(dtype)
    outputs = {}
    for wire in ("float32", "payload"):
        with moonep.Buffer(
            num_experts=E,
            top_k=K,
            hidden=hidden,
            max_tokens=T,
            dtype=dtype,
            transport=transport,
            combine_wire=wire,
            timeout_secs=30,
        ) as ep:
            x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
            plan = ep.plan(idx)
            recv = ep.dispatch(x, plan, w)
            y = ep.combine(recv.x, plan, recv.weights)
            y.backward(grad_y)
        x_ref, w_ref = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        plan_ref = reference.plan(idx, num_experts=E, combine_wire=wire)
        recv_ref = reference.dispatch(x_ref, plan_ref, w_ref)
        y_ref = reference.combine(recv_ref.x, plan_ref, recv_ref.weights)
        y_ref.backward(grad_y)
        assert x.grad is not None
        assert x_ref.grad is not None
        assert torch.equal(bits(y), bits(y_ref)), wire
        assert torch.equal(bits(x.grad), bits(x_ref.grad)), wire
        torch.testing.assert_close(w.grad, w_ref.grad, rtol=1e-3, atol=1e-2)
        outputs[wire] = y.detach()
    # The rounding is of one summand per rank: a few units in the last place of the largest.
    largest = (x0.float().abs() * w0.sum(1, keepdim=True)).clamp(min=1)
    error = (outputs["payload"].float() - outputs["float32"].float()).abs()
    assert bool((error <= 4 * torch.finfo(dtype).eps * largest).all())
    return int((bits(outputs["payload"]) != bits(outputs["float32"])).sum())


@pytest.mark.parametrize("hidden", [7, 200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_payload_wire_is_the_reference(pool: Any, dtype: str, hidden: int) -> None:
    for transport in ("local",) if len(pool.pids) == 1 else ("shm", "collective"):
        different = sum(pool.run(same_as_reference, transport, dtype, hidden))
        # Alone, and in float32, there is nothing to round; else some roundings must show, or nothing was rounded.
        assert (different > 0) == (dtype != "float32" and len(pool.pids) > 1)


def refused(rank: int) -> str:
    try:
        moonep.Buffer(
            num_experts=E, top_k=K, hidden=8, max_tokens=T, combine_wire="float16" if rank else "float32"
        ).close()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_another_wire_is_refused(pool2: Any) -> None:
    for said in pool2.run(refused):
        assert "rank 1: combine_wire: expected one of float32, payload, got 'float16'" in said
