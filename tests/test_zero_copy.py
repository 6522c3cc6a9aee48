"""`zero_copy=True`: rows in memory of the transport, read where they are, and refused once overwritten."""

from typing import Any

import pytest
import torch

import moonep
from moonep.errors import StaleViewError

T, E, K, H = 40, 12, 4, 136


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


def make_buffer(transport: str, **settings: Any) -> moonep.Buffer:
    shape: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": 200}
    return moonep.Buffer(transport=transport, timeout_secs=20, **(shape | settings))


def inputs(rank: int, tokens: int = T, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    idx = torch.randint(-1, E, (tokens, K), generator=generator)
    return idx, torch.randn(tokens, H, generator=generator).to(dtype), torch.rand(tokens, K, generator=generator)


def same_as_copied(rank: int, transport: str, settings: dict[str, Any]) -> None:
    dtype = settings.get("dtype", torch.bfloat16)
    with make_buffer(transport, **settings) as ep:
        for tokens in (T, T - rank, 0, 1, 200, T):  # larger ones want new memory
            idx, x, weights = inputs(rank, tokens, dtype)
            plan = ep.plan(idx)
            for given in (weights, None):
                expected = ep.dispatch(x, plan, given)
                y = ep.combine(expected.x * 2, plan, expected.weights)
                recv = ep.dispatch(x, plan, given, zero_copy=True)
                assert torch.equal(recv.x, expected.x)
                assert torch.equal(recv.weights, expected.weights)
                recv.x.mul_(2)  # as experts do that write where they read
                assert torch.equal(ep.combine(recv.x, plan, recv.weights, zero_copy=True), y)
                assert torch.equal(ep.combine(recv.x.clone(), plan, recv.weights, zero_copy=True), y)
                # Not all ranks' rows are in that memory.
                rows = recv.x if rank == 0 else recv.x.clone()
                assert torch.equal(ep.combine(rows, plan, recv.weights, zero_copy=True), y)
                assert torch.equal(ep.combine(recv.x, plan, recv.weights), y)
                plain = ep.combine(recv.x, plan)
                assert torch.equal(ep.combine(recv.x, plan, zero_copy=True), plain)
                handle = ep.dispatch(x, plan, given, zero_copy=True, async_op=True)
                assert torch.equal(handle.wait().x, expected.x)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.float32, "expert_alignment": 8},
        {"dtype": torch.float16, "combine_wire": "payload", "policy": moonep.Balanced(slack=0)},
        {"policy": moonep.Capacity(1.0), "hidden": 136},
    ],
    ids=["bfloat16", "aligned", "balanced", "capacity"],
)
def test_same_as_copied(pool: Any, settings: dict[str, Any]) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(same_as_copied, transport, settings)


def stale_views(rank: int) -> None:
    with make_buffer("shm") as ep:
        idx, x, weights = inputs(rank)
        plan = ep.plan(idx)
        first = ep.dispatch(x, plan, weights, zero_copy=True)
        rows = first.x
        second = ep.dispatch(x, plan, weights, zero_copy=True)
        assert second.x.data_ptr() == rows.data_ptr()
        with pytest.raises(StaleViewError, match=r"Received\.x: .*overwritten"):
            first.x  # noqa: B018
        with pytest.raises(StaleViewError, match="combine: rank 0: expert_out"):
            ep.combine(rows, plan, first.weights, zero_copy=True)
        with pytest.raises(StaleViewError, match=r"rank 1: expert_out: .*overwritten"):
            ep.combine(rows if rank == 1 else second.x, plan, first.weights)
        y = ep.combine(second.x, plan, second.weights, zero_copy=True)
        expected = ep.dispatch(x, plan, weights)
        assert torch.equal(y, ep.combine(expected.x, plan, expected.weights))
        # New, larger memory: what was lent of the old stays readable, and is refused.
        more_idx, more_x, _ = inputs(rank, 200)
        more = ep.dispatch(more_x, ep.plan(more_idx), zero_copy=True)
        with pytest.raises(StaleViewError):
            second.x  # noqa: B018
        kept = more.x
    kept.sum()  # outlives the Buffer


def test_stale_views(pool2: Any) -> None:
    pool2.run(stale_views)


def saved_for_backward(rank: int) -> None:
    with make_buffer("shm") as ep:
        idx, x, weights = inputs(rank)
        x.requires_grad_()
        plan = ep.plan(idx)
        recv = ep.dispatch(x, plan, weights, zero_copy=True)
        y = ep.combine(recv.x.square(), plan, recv.weights)
        y.sum().backward()
        expected, x.grad = x.grad, None
        again = ep.dispatch(x, plan, weights)
        ep.combine(again.x.square(), plan, again.weights).sum().backward()
        assert expected is not None
        assert x.grad is not None
        assert torch.equal(expected, x.grad)

        recv = ep.dispatch(x, plan, weights, zero_copy=True)
        loss = recv.x.square().sum()  # saves the rows
        ep.dispatch(x, plan, weights, zero_copy=True)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def test_saved_for_backward(pool2: Any) -> None:
    pool2.run(saved_for_backward)


def only_one_rank(rank: int, transport: str) -> None:
    with make_buffer(transport) as ep:
        idx, x, weights = inputs(rank)
        plan = ep.plan(idx)
        with pytest.raises(ValueError, match=r"dispatch: zero_copy: expected on all ranks or none, .* rank 1 only"):
            ep.dispatch(x, plan, weights, zero_copy=rank == 1)
        recv = ep.dispatch(x, plan, weights, zero_copy=True)
        with pytest.raises(ValueError, match="combine: zero_copy"):
            ep.combine(recv.x, plan, recv.weights, zero_copy=rank == 1)
        assert torch.equal(recv.x, ep.dispatch(x, plan, weights).x)


@pytest.mark.parametrize("transport", transports(2))
def test_only_one_rank(pool2: Any, transport: str) -> None:
    pool2.run(only_one_rank, transport)
