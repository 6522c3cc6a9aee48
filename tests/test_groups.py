"""Groups that are not the whole world, and expert parallelism inside data parallelism."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moonep
from moonep import reference
from moonep.transport.group import Group

TRANSPORTS = ("shm", "collective")
T, K, H, E = 10, 2, 12, 6


def make_buffer(group: Any, transport: str, **settings: Any) -> moonep.Buffer:
    usual = {"num_experts": E, "top_k": K, "hidden": H, "max_tokens": T, "dtype": torch.float32, "timeout_secs": 20.0}
    return moonep.Buffer(group, transport=transport, **usual | settings)


def made_groups(lists: list[list[int]], rank: int) -> Any:
    """The group of `lists` that has this rank. Collective over the world."""
    groups = [dist.new_group(ranks) for ranks in lists]
    (mine,) = [group for group, ranks in zip(groups, lists, strict=True) if rank in ranks]
    return mine


def step_equals_reference(ep: moonep.Buffer, group: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.rand(T, E, generator=generator).topk(K, dim=1).indices
    x = torch.randn(T, H, generator=generator).requires_grad_()
    weights = torch.rand(T, K, generator=generator)
    grad_y = torch.randn(T, H, generator=generator)
    plan = ep.plan(idx)
    recv = ep.dispatch(x, plan, weights)
    y = ep.combine(recv.x.tanh(), plan, recv.weights)
    y.backward(grad_y)
    grad, x.grad = x.grad, None
    ref_plan = reference.plan(idx, num_experts=E, group=group)
    ref_recv = reference.dispatch(x, ref_plan, weights)
    ref_y = reference.combine(ref_recv.x.tanh(), ref_plan, ref_recv.weights)
    ref_y.backward(grad_y)
    assert torch.equal(plan.dst_rank, ref_plan.dst_rank)
    assert torch.equal(recv.x, ref_recv.x)
    assert torch.equal(y, ref_y)
    assert torch.equal(grad, x.grad)


# ---- what ranks tell each other ----


def long_records(rank: int) -> None:
    """Ranks say more than fits, in characters of 1, 6 and 12 bytes: what is sent has one size nevertheless."""
    group = Group(dist.group.WORLD, 20.0)
    for keys in (("text",), tuple("abcdefghijkl")):
        for character in ("x", "\n", "é", "\0", "😀", "\ud800"):
            mine = dict.fromkeys(keys, character * (5000 if rank == 0 else 2))
            long, short = group.gather_records(mine, "a test")
            assert short == dict.fromkeys(keys, character * 2)
            for text in long.values():
                assert text == character * len(text)
                assert len(text) > 4096 // len(keys) // 12 // 2
    group.close()


def test_long_records(pool2: Any) -> None:
    pool2.run(long_records)


# ---- subgroups ----


def two_groups(rank: int, transport: str, lists: list[list[int]]) -> tuple[int, int]:
    """Both used at once, at their own pace, with another number of steps each, beside a Buffer of the world."""
    group = made_groups(lists, rank)
    first = rank in lists[0]
    with make_buffer(group, transport) as ep, make_buffer(None, transport) as world:
        assert (ep.rank, ep.num_ranks) == (dist.get_rank(group), 2)
        assert (world.rank, world.num_ranks) == (rank, 4)
        for turn in range(3):
            for step in range(5 if first else 2):
                step_equals_reference(ep, group, 100 * turn + 10 * step + rank)
            step_equals_reference(world, None, turn + 7 * rank)
    return ep.rank, ep.first_local_expert


@pytest.mark.parametrize("lists", [[[0, 1], [2, 3]], [[3, 1], [2, 0]], [[0, 3], [1, 2]]], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_groups_at_once(pool4: Any, transport: str, lists: list[list[int]]) -> None:
    found = pool4.run(two_groups, transport, lists)
    for ranks in lists:
        assert sorted(found[rank] for rank in ranks) == [(0, 0), (1, E // 2)]


def error_in_a_group(rank: int, transport: str) -> str:
    """Messages say the group's rank and the world's; the other group hears nothing."""
    lists = [[3, 1], [0, 2]]
    group = made_groups(lists, rank)
    with make_buffer(group, transport) as ep:
        idx = torch.zeros(T, K, dtype=torch.int64)
        if rank == 3:
            idx[4, 1] = -7
        try:
            ep.plan(idx)
            found = "no error"
        except ValueError as error:
            found = str(error)
        step_equals_reference(ep, group, rank)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_have_the_global_rank(pool4: Any, transport: str) -> None:
    found = pool4.run(error_in_a_group, transport)
    assert found[0] == found[2] == "no error"
    assert found[1] == found[3]
    assert "rank 1 (global rank 3)" in found[1]
    assert "topk_idx[4, 1]" in found[1]


def difference_in_a_group(rank: int) -> str:
    group = made_groups([[0, 1], [2, 3]], rank)
    try:
        make_buffer(group, "auto", max_tokens=T + (rank == 2)).close()
    except moonep.errors.ConfigMismatchError as error:
        return str(error)
    return ""


def test_settings_are_compared_within_a_group(pool4: Any) -> None:
    found = pool4.run(difference_in_a_group)
    assert found[0] == found[1] == ""
    assert "rank 0 (global rank 2) 11, rank 1 (global rank 3) 10" in found[2]
    assert found[2] == found[3]


def alone_in_a_group(rank: int) -> None:
    group = made_groups([[0], [1]], rank)
    with make_buffer(group, "auto") as ep:
        assert (ep.transport, ep.rank, ep.num_ranks) == ("local", 0, 1)
        step_equals_reference(ep, group, rank)


def test_groups_of_one(pool2: Any) -> None:
    pool2.run(alone_in_a_group)


def outside_of_the_group(rank: int) -> str:
    group = dist.new_group([0])
    try:
        make_buffer(group, "auto").close()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_rank_outside_of_the_group(pool2: Any) -> None:
    inside, outside = pool2.run(outside_of_the_group)
    assert inside == ""
    assert "group" in outside


def no_group(rank: int) -> None:
    with make_buffer(None, "auto") as ep:
        assert ep.num_ranks == dist.get_world_size()
        step_equals_reference(ep, None, rank)


def test_no_group_is_the_default_group(pool: Any) -> None:
    pool.run(no_group)


def test_no_group_at_all_is_one_process() -> None:
    assert not dist.is_initialized()
    with make_buffer(None, "auto") as ep:
        assert (ep.transport, ep.rank, ep.num_ranks) == ("local", 0, 1)
        step_equals_reference(ep, None, 3)


# ---- expert parallel inside data parallel ----


def route(router: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts [T, K]."""
    weights, idx = router(x).softmax(dim=1).topk(K, dim=1)
    return weights, idx


class Model(nn.Module):
    """dense, router, experts, dense: with all experts when there is no Buffer, else with those at home."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(H, H), nn.Tanh())
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.Parameter(torch.randn(E, H, H) / H**0.5)
        self.head = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One process holding all."""
        x = self.dense(x)
        weights, idx = route(self.router, x)
        outs = torch.stack([F.gelu(x @ weight) for weight in self.experts], dim=1)
        picked = outs.gather(1, idx[:, :, None].expand(-1, -1, H))
        return self.head(x + (picked * weights[:, :, None]).sum(1))


def experts_here(rows: torch.Tensor, plan: moonep.Plan, experts_L: torch.Tensor) -> torch.Tensor:
    parts = rows.tensor_split(plan.group_ends[:-1].tolist()) if plan.num_groups else [rows]
    return torch.cat([F.gelu(part @ weight) for part, weight in zip(parts, experts_L, strict=False)])


def moe(ep: moonep.Buffer, router: nn.Module, experts_L: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    weights, idx = route(router, x)
    plan = ep.plan(idx)
    recv = ep.dispatch(x, plan, weights)
    return x + ep.combine(experts_here(recv.x, plan, experts_L), plan, recv.weights)


def all_tokens(num_ranks: int) -> torch.Tensor:
    return torch.randn(num_ranks, T, H, generator=torch.Generator().manual_seed(5))


def whole_model(num_ranks: int) -> tuple[Model, torch.Tensor]:
    """One process with all tokens: the model with its gradients, and its outputs [R, T, H]."""
    torch.manual_seed(1)
    model = Model()
    outputs = model(all_tokens(num_ranks).flatten(0, 1)).view(num_ranks, T, H)
    outputs.square().sum().backward()
    return model, outputs.detach()


def same(what: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4), f"{what}: {(got - expected).abs().max()}"


def expert_inside_data_parallel(rank: int, transport: str, expert_groups: list[list[int]]) -> None:
    """Dense gradients are summed over the world, an expert's over its owners; no other factor is needed."""
    num_ranks = dist.get_world_size()
    whole, outputs = whole_model(num_ranks)
    torch.manual_seed(1)
    model = Model()
    group = made_groups(expert_groups, rank)
    place = dist.get_rank(group)
    owners = made_groups([list(ranks) for ranks in zip(*map(sorted, expert_groups), strict=True)], rank)
    with make_buffer(group, transport) as ep:
        assert ep.rank == place
        home = slice(ep.first_local_expert, ep.first_local_expert + ep.num_local_experts)
        experts_L = model.experts.detach()[home].clone().requires_grad_()
        y = model.head(moe(ep, model.router, experts_L, model.dense(all_tokens(num_ranks)[rank])))
        y.square().sum().backward()
    same("outputs", y, outputs[rank])
    dist.all_reduce(experts_L.grad, group=owners)
    same("experts", experts_L.grad, whole.experts.grad[home])
    for name in ("dense.0", "router", "head"):
        grad = model.get_submodule(name).weight.grad
        dist.all_reduce(grad)
        same(name, grad, whole.get_submodule(name).weight.grad)


@pytest.mark.parametrize("expert_groups", [[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[0, 1, 2, 3]]], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_expert_inside_data_parallel(pool4: Any, transport: str, expert_groups: list[list[int]]) -> None:
    pool4.run(expert_inside_data_parallel, transport, expert_groups)


class ExpertsAndBuffer:
    """Kept out of DDP's sight: each rank's experts are its own."""

    def __init__(self, ep: moonep.Buffer, experts_L: torch.Tensor):
        self.ep, self.experts_L = ep, experts_L


class DenseAround(nn.Module):
    """The dense parts of a Model, with the experts in the middle."""

    def __init__(self, model: Model, here: ExpertsAndBuffer):
        super().__init__()
        self.dense, self.router, self.head = model.dense, model.router, model.head
        self.here = here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(moe(self.here.ep, self.router, self.here.experts_L, self.dense(x)))


def dense_in_ddp(rank: int, transport: str) -> None:
    """DDP takes means over ranks: a loss times their number makes them sums."""
    num_ranks = dist.get_world_size()
    whole, outputs = whole_model(num_ranks)
    torch.manual_seed(1)
    model = Model()
    with make_buffer(None, transport) as ep:
        home = slice(ep.first_local_expert, ep.first_local_expert + ep.num_local_experts)
        here = ExpertsAndBuffer(ep, model.experts.detach()[home].clone().requires_grad_())
        # Small buckets: DDP's exchanges run among the Buffer's.
        wrapped = DistributedDataParallel(DenseAround(model, here), bucket_cap_mb=0.0001)
        for _ in range(3):
            wrapped.zero_grad()
            here.experts_L.grad = None
            y = wrapped(all_tokens(num_ranks)[rank])
            (num_ranks * y.square().sum()).backward()
            same("outputs", y, outputs[rank])
            same("experts", here.experts_L.grad / num_ranks, whole.experts.grad[home])
            for name in ("dense.0", "router", "head"):
                same(name, model.get_submodule(name).weight.grad, whole.get_submodule(name).weight.grad)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dense_part_in_ddp(pool2: Any, transport: str) -> None:
    pool2.run(dense_in_ddp, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dense_part_in_ddp_at_four(pool4: Any, transport: str) -> None:
    pool4.run(dense_in_ddp, transport)
