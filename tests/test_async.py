"""`async_op=True`: a verb beside the caller."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import moonep
from moonep.errors import BufferClosedError

T, E, K, H = 24, 10, 3, 40


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


def make_buffer(transport: str, **settings: Any) -> moonep.Buffer:
    shape: dict[str, Any] = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "dtype": torch.float32}
    return moonep.Buffer(transport=transport, **(shape | {"timeout_secs": 20} | settings))


def inputs(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    idx = torch.randint(-1, E, (T - rank, K), generator=generator)
    return idx, torch.randn(T - rank, H, generator=generator), torch.rand(T - rank, K, generator=generator)


def layer(ep: moonep.Buffer, rank: int, async_op: bool) -> list[torch.Tensor]:
    """Output and gradients of a layer whose experts are tanh."""
    idx, x, weights = inputs(rank)
    x.requires_grad_()
    weights.requires_grad_()
    plan = ep.plan(idx)
    if async_op:
        recv = ep.dispatch(x, plan, weights, async_op=True).wait()
        y = ep.combine(recv.x.tanh(), plan, recv.weights, async_op=True).wait()
    else:
        recv = ep.dispatch(x, plan, weights)
        y = ep.combine(recv.x.tanh(), plan, recv.weights)
    y.square().sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return [recv.x.detach(), recv.weights.detach(), y.detach(), x.grad, weights.grad]


def same_as_waiting(rank: int, transport: str) -> None:
    with make_buffer(transport) as ep:
        for a, b in zip(layer(ep, rank, False), layer(ep, rank, True), strict=True):
            assert torch.equal(a, b)


def test_same_as_waiting(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(same_as_waiting, transport)


def call_returns_at_once(rank: int, transport: str) -> None:
    """The other rank calls only after it has heard from this one, which it does behind the call."""
    signals = dist.new_group(backend="gloo")
    idx, x, weights = inputs(rank)
    word = torch.zeros(1)
    with make_buffer(transport) as ep:
        plan = ep.plan(idx)
        expected = ep.dispatch(x, plan, weights).x
        if rank == 0:
            handle = ep.dispatch(x, plan, weights, async_op=True)
            dist.broadcast(word, 0, group=signals)
            recv = handle.wait()
        else:
            dist.broadcast(word, 0, group=signals)
            recv = ep.dispatch(x, plan, weights)
        assert torch.equal(recv.x, expected)
    dist.destroy_process_group(signals)


@pytest.mark.parametrize("transport", transports(2))
def test_the_call_returns_at_once(pool2: Any, transport: str) -> None:
    pool2.run(call_returns_at_once, transport)


def next_verb_completes(rank: int, transport: str) -> None:
    """Handles may be waited for in any order, or not at all."""
    with make_buffer(transport) as ep:
        idx, x, weights = inputs(rank)
        plan, other = ep.plan(idx), ep.plan(inputs(rank)[0].flip(1))
        expected = [ep.dispatch(x, each, weights) for each in (plan, other)]
        first = ep.dispatch(x, plan, weights, async_op=True)
        second = ep.dispatch(x, other, weights, async_op=True)
        ep.dispatch(x, plan, async_op=True)
        third = ep.combine(expected[0].x, plan, expected[0].weights, async_op=True)
        y = ep.combine(expected[0].x, plan, expected[0].weights)
        assert torch.equal(third.wait(), y)
        assert torch.equal(second.wait().x, expected[1].x)
        assert torch.equal(first.wait().x, expected[0].x)
        assert first.wait() is first.wait()
        assert torch.equal(first.wait().weights, expected[0].weights)


def test_the_next_verb_completes_it(pool: Any) -> None:
    for transport in transports(pool.num_ranks):
        pool.run(next_verb_completes, transport)


def bad_argument(rank: int, transport: str) -> None:
    """Raised by the call where it was made, by wait() elsewhere; the Buffer stays usable."""
    with make_buffer(transport) as ep:
        idx, x, weights = inputs(rank)
        plan = ep.plan(idx)
        if rank == 1:
            with pytest.raises(ValueError, match=r"rank 1: x: expected shape"):
                ep.dispatch(x[:, 1:], plan, weights, async_op=True)
        else:
            handle = ep.dispatch(x, plan, weights, async_op=True)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"rank 1: x: expected shape"):
                    handle.wait()
        recv = ep.dispatch(x, plan, weights, async_op=True).wait()
        assert torch.equal(recv.x, ep.dispatch(x, plan, weights).x)


@pytest.mark.parametrize("transport", transports(2))
def test_bad_argument(pool2: Any, transport: str) -> None:
    pool2.run(bad_argument, transport)


def close_while_at_work(rank: int, transport: str) -> None:
    signals = dist.new_group(backend="gloo")
    ep = make_buffer(transport, timeout_secs=3)
    idx, x, weights = inputs(rank)
    plan = ep.plan(idx)
    if rank == 0:
        handle = ep.dispatch(x, plan, weights, async_op=True)
        ep.close()
        with pytest.raises(moonep.errors.MoonEPError):  # the peer never comes
            handle.wait()
        with pytest.raises(BufferClosedError):
            ep.dispatch(x, plan, weights, async_op=True)
    dist.barrier(group=signals)
    ep.close()
    dist.destroy_process_group(signals)


def test_close_while_at_work(pool2: Any) -> None:
    pool2.run(close_while_at_work, "shm")


def test_rows_changed_before_wait() -> None:
    """Autograd could not tell, so this is refused."""
    with make_buffer("local") as ep:
        idx, x, weights = inputs(0)
        plan = ep.plan(idx)
        recv = ep.dispatch(x, plan, weights.requires_grad_())
        handle = ep.combine(recv.x, plan, recv.weights, async_op=True)
        with torch.no_grad():
            recv.x.mul_(2)
        with pytest.raises(RuntimeError, match="expert_out: expected to stay as it was until wait"):
            handle.wait()


def test_threads_of_the_caller() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with make_buffer("local") as ep:
            idx, x, weights = inputs(0)
            plan = ep.plan(idx)
            seen = []
            spread = ep._calls.transport.spread

            def look(*arguments: Any) -> Any:
                seen.append(torch.get_num_threads())
                return spread(*arguments)

            ep._calls.transport.spread = look  # type: ignore[method-assign]
            ep.dispatch(x, plan, weights, async_op=True).wait()
        assert seen == [3]
    finally:
        torch.set_num_threads(before)


def test_grad_mode_is_that_of_the_call() -> None:
    with make_buffer("local") as ep:
        idx, x, weights = inputs(0)
        plan = ep.plan(idx)
        x.requires_grad_()
        with torch.no_grad():
            quiet = ep.dispatch(x, plan, weights, async_op=True)
        assert not quiet.wait().x.requires_grad
        handle = ep.dispatch(x, plan, weights, async_op=True)
        with torch.no_grad():
            assert handle.wait().x.requires_grad
