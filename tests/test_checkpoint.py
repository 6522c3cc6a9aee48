"""torch.utils.checkpoint around a layer: backward runs its verbs again, in step on all ranks."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moonep

T, K, H = 12, 2, 8


def transports(num_ranks: int) -> tuple[str, ...]:
    return ("local",) if num_ranks == 1 else ("shm", "collective")


def experts(rows: torch.Tensor, plan: moonep.Plan, matrices: torch.Tensor) -> torch.Tensor:
    """In a loop, so that a rank without rows saves nothing here."""
    sizes = torch.diff(plan.group_ends, prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    parts = [part @ matrices[g] for g, part in enumerate(rows.split(sizes)) if len(part)]
    return torch.cat(parts) if parts else rows


def check_layer(rank: int, transport: str, num_experts: int, reentrant: bool, weighted: bool) -> None:
    with moonep.Buffer(
        num_experts=num_experts,
        top_k=min(K, num_experts),
        hidden=H,
        max_tokens=T,
        dtype=torch.float32,
        transport=transport,
        timeout_secs=20,
    ) as ep:
        generator = torch.Generator().manual_seed(rank)
        tokens = 0 if rank == 1 else T
        idx = torch.randint(num_experts, (tokens, ep.config.top_k), generator=generator)
        x = torch.randn(tokens, H, generator=generator).requires_grad_()
        weights = torch.rand(tokens, ep.config.top_k, generator=generator).requires_grad_()
        matrices = torch.randn(ep.num_local_experts, H, H, generator=generator).requires_grad_()

        def layer(x: torch.Tensor, weights: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            plan = ep.plan(idx)
            recv = ep.dispatch(x, plan, weights if weighted else None)
            return ep.combine(experts(recv.x, plan, matrices), plan, recv.weights if weighted else None)

        def two_layers(x: torch.Tensor, weights: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
            return layer(layer(x, weights, matrices).tanh(), weights, matrices)

        leaves = [x, weights, matrices]
        found = []
        for run in (two_layers, lambda *inputs: checkpoint(two_layers, *inputs, use_reentrant=reentrant)):
            for leaf in leaves:
                leaf.grad = None
            y = run(*leaves)
            y.square().sum().backward()
            grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            found.append([y.detach(), *grads])
        for plain, recomputed in zip(*found, strict=True):
            assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("num_experts", [1, 6])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers(ranks: int, reentrant: bool, weighted: bool, num_experts: int, request: pytest.FixtureRequest) -> None:
    """With one expert in all, most ranks have none, and save fewer tensors than the others."""
    pool = request.getfixturevalue(f"pool{ranks}")
    for transport in transports(ranks):
        pool.run(check_layer, transport, num_experts, reentrant, weighted)
