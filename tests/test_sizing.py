"""Sizes and crossings foretold by `moonep.sizing`, against what plans and Buffers really have."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moonep.buffer import Buffer
from moonep.plan import Plan, first_expert, plan_plain
from moonep.policy import Balanced, Capacity, Home, Policy, home_rank
from moonep.sizing import loads, memory, wire
from moonep.sizing.hardware import ACCELERATORS, FABRICS, Hardware, from_doctor
from moonep.sizing.models import MODELS, Model
from moonep.sizing.report import Cluster, examine
from moonep.sizing.routing import Lognormal, Recorded, Tokens
from moonep.sizing.setting import Setting
from moonep.sizing.times import SLACKS, Step, Steps
from moonep.testing import RankPool, lognormal_routing, random_routing, topk_weights
from moonep.trace import load_trace

POLICIES: list[Policy] = [
    Home(),
    Capacity(0.7),
    Capacity(1.25),
    Balanced(0.0),
    Balanced(0.05),
    Balanced(0.3),
    Balanced(0.0, 1),
]


def plans_of(tokens: Tokens, policy: Policy, num_experts: int, hosts: list[int], alignment: int = 1) -> list[Plan]:
    """The definition's, of every rank."""
    ids = [torch.from_numpy(each.astype(np.int64)) for each in tokens.topk_idx]
    weights = None if tokens.topk_weights is None else [torch.from_numpy(each) for each in tokens.topk_weights]
    return [
        plan_plain(
            ids,
            rank,
            num_experts=num_experts,
            expert_alignment=alignment,
            policy=policy,
            topk_weights_of_rank=weights,
            host_of_rank=hosts,
        )
        for rank in range(len(ids))
    ]


def random_tokens(num_ranks: int, num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tokens:
    idx = random_routing(num_ranks * num_tokens, num_experts, top_k, seed, holes=0.1)
    weights = topk_weights(num_ranks * num_tokens, top_k, seed)
    shape = (num_ranks, num_tokens, top_k)
    return Tokens(idx.astype(np.int32).reshape(shape), weights.reshape(shape))


def skewed_tokens(num_ranks: int, num_tokens: int, num_experts: int, top_k: int) -> Tokens:
    idx = lognormal_routing(num_ranks * num_tokens, num_experts, top_k, 0.8 * (num_experts / top_k - 1), 1)
    return Tokens(idx.astype(np.int32).reshape(num_ranks, num_tokens, top_k), None)


def cases() -> list[tuple[str, Tokens, int]]:
    trace = Recorded(load_trace("pydoc"), "pydoc")
    return [
        *((f"random {ranks}", random_tokens(ranks, 24, 13, 4), 13) for ranks in (1, 2, 4)),
        *((f"skewed {ranks}", skewed_tokens(ranks, 20, 24, 3), 24) for ranks in (2, 4)),
        ("more ranks than experts", random_tokens(4, 10, 3, 2), 3),
        *((f"recorded {ranks}", trace.tokens(1, ranks, 12), 896) for ranks in (2, 4)),
    ]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("tokens", "num_experts"), [pytest.param(*case[1:], id=case[0]) for case in cases()])
@pytest.mark.parametrize("ranks_per_host", [2, 8])
def test_crossings_are_those_of_the_plans(
    tokens: Tokens, num_experts: int, policy: Policy, ranks_per_host: int
) -> None:
    num_ranks = len(tokens.topk_idx)
    hosts = [rank // ranks_per_host for rank in range(num_ranks)]
    counted = wire.count(tokens, policy, num_experts, hosts)
    plans = plans_of(tokens, policy, num_experts, hosts)
    for rank, plan in enumerate(plans):
        assert counted.per_rank[rank].tolist() == plan.outbox.first.diff().tolist()
        assert counted.per_rank[:, rank].tolist() == plan.inbox.first.diff().tolist()
        routes = np.bincount(plan.dst_rank[plan.dst_rank >= 0].numpy(), minlength=num_ranks)
        assert counted.routes[rank].tolist() == routes.tolist()
        assert counted.load.num_rows[rank] == plan.num_rows
        assert counted.load.replica_experts.tolist() == plan.replicas.tolist()
    assert counted.load.rank_rows.tolist() == plans[0].rank_rows.tolist()
    assert counted.load.num_dropped == sum(plan.num_dropped for plan in plans)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_rows_are_those_of_the_plans(policy: Policy, alignment: int) -> None:
    tokens, num_experts = random_tokens(3, 30, 7, 3), 7
    plans = plans_of(tokens, policy, num_experts, [0, 0, 0], alignment)
    idx = tokens.topk_idx
    totals_E = np.bincount(idx[idx >= 0], minlength=num_experts)
    found = loads.load(totals_E, 3, policy, idx.size, alignment)
    assert found.num_rows.tolist() == [plan.num_rows for plan in plans]
    assert found.rank_rows.tolist() == plans[0].rank_rows.tolist()
    assert found.num_dropped == sum(plan.num_dropped for plan in plans)


def test_a_token_goes_once_to_every_host() -> None:
    # 2 hosts of 2 ranks, an expert each. Rank 0's tokens: to both ranks of the other host; to its neighbour and one
    # abroad; nowhere. Rank 3's: to itself; to 0 and 1; to 1 alone.
    idx = np.full((4, 3, 2), -1, np.int32)
    idx[0] = [[2, 3], [1, 3], [-1, -1]]
    idx[3] = [[3, 3], [0, 1], [1, -1]]
    counted = wire.count(Tokens(idx, None), Home(), 4, [0, 0, 1, 1])
    assert counted.per_rank.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0], [1, 2, 0, 1]]
    # Across, rank 0 sends both tokens to rank 2, which hands both to rank 3; rank 3 sends both to rank 1, which keeps
    # both and hands one to rank 0.
    expected = [[0, 1, 2, 0], [1, 2, 0, 0], [0, 0, 1, 2], [0, 2, 0, 1]]
    assert counted.per_host.tolist() == expected
    links = wire.split(counted.per_host, [0, 0, 1, 1])
    assert (links.across_sent.tolist(), links.across_received.tolist()) == ([2, 0, 0, 2], [0, 2, 2, 0])
    assert (links.inside_sent.tolist(), links.inside_received.tolist()) == ([1, 1, 2, 0], [1, 1, 0, 2])
    links = wire.split(counted.routes, [0, 0, 1, 1])
    assert (links.across_sent.tolist(), links.inside_sent.tolist()) == ([3, 0, 0, 3], [1, 0, 0, 0])


def test_no_way_of_sending_is_worse_than_the_one_before() -> None:
    tokens = skewed_tokens(8, 64, 32, 4)
    hosts = [rank // 4 for rank in range(8)]
    for policy in POLICIES:
        counted = wire.count(tokens, policy, 32, hosts)
        across = [
            int(wire.split(each, hosts).across_sent.sum())
            for each in (counted.routes, counted.per_rank, counted.per_host)
        ]
        assert across == sorted(across, reverse=True)


@pytest.mark.parametrize("policy", [Home(), Balanced(0.0), Balanced(0.05)], ids=str)
def test_some_tokens_stand_for_all(policy: Policy) -> None:
    tokens, hosts = skewed_tokens(4, 400, 24, 3), [0, 0, 1, 1]
    whole = wire.count(tokens, policy, 24, hosts)
    same = wire.count(tokens, policy, 24, hosts, whole=whole.load)
    assert same.per_rank.tolist() == whole.per_rank.tolist()
    some = wire.count(Tokens(tokens.topk_idx[:, ::4], None), policy, 24, hosts, whole=whole.load)
    assert some.tokens_per_rank == 100
    assert some.load.replica_experts.tolist() == whole.load.replica_experts.tolist()
    np.testing.assert_allclose(4 * some.per_rank, whole.per_rank, rtol=0.3, atol=40)
    assert 4 * some.per_rank.sum() == pytest.approx(whole.per_rank.sum(), rel=0.03)


# ---- loads ----


def test_least_factor() -> None:
    totals_E = np.array([10, 20, 30, 40])
    assert loads.least_factor([totals_E], 0, 100) == 1.57  # ceil(1.57 * 25) = 40
    assert loads.dropped_share(totals_E, 1.6, 100) == 0
    assert loads.dropped_share(totals_E, 1.2, 100) == 0.1  # room for 30
    assert loads.least_factor([totals_E], 0.1, 100) == 1.17  # ceil(1.17 * 25) = 30
    assert loads.least_factor([np.array([100, 0])], 0, 100) == 1.99  # ceil(1.99 * 50) = 100
    assert loads.least_factor([np.array([0, 0])], 0, 0) == 0.01


def test_replica_bounds() -> None:
    assert [loads.replicas_worst_input(896, ranks) for ranks in (8, 64)] == [98, 14]  # as the report has it
    assert [loads.replicas_always_enough(896, ranks) for ranks in (1, 8, 64)] == [0, 112, 14]
    for ranks in (8, 64):
        totals_E = np.full(896, 896)
        totals_E[: 896 // ranks] = 0
        found = loads.load(totals_E, ranks, Balanced(0.0), int(totals_E.sum()))
        assert found.most_received == loads.replicas_worst_input(896, ranks)


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_no_rule_takes_fewer_replicas_than_the_bound(slack: float) -> None:
    routing = Lognormal(64, 4, 3.0)
    for draw in range(routing.num_draws):
        totals_E = routing.totals(draw, 8 * 1024)
        policy = Balanced(slack)
        limit = policy.row_limit(int(totals_E.sum()), 8)
        found = loads.load(totals_E, 8, policy, int(totals_E.sum()))
        assert found.rank_rows.max() <= limit
        assert loads.fewest_replicas(totals_E, 8, limit) <= found.num_replicas
        assert 0 < found.most_sent(64) <= found.num_replicas
    assert loads.fewest_replicas(np.array([10, 10, 10, 10]), 2, 20) == 0


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(896, 64), (13, 4), (3, 5)])
def test_homes(num_experts: int, num_ranks: int) -> None:
    homes = loads.home_of_expert(num_experts, num_ranks).tolist()
    assert homes == [home_rank(expert, num_experts, num_ranks) for expert in range(num_experts)]
    firsts = [first_expert(rank, num_experts, num_ranks) for rank in range(num_ranks + 1)]
    assert all(
        homes[begin:end] == [rank] * (end - begin) for rank, (begin, end) in enumerate(itertools.pairwise(firsts))
    )


def test_home_at_worst() -> None:
    assert loads.most_home_rows(8, 100, 16, 896) == 8 * 100 * 16
    assert loads.most_home_rows(896, 100, 16, 896) == 896 * 100  # one expert a rank, once a token


# ---- routings ----


@pytest.mark.parametrize(("num_experts", "top_k"), [(896, 16), (128, 8), (8, 2), (4, 4)])
def test_lognormal_has_the_imbalance_asked_for(num_experts: int, top_k: int) -> None:
    bound = num_experts / top_k - 1
    for asked in {0.0, 0.3 * bound, 0.9 * bound}:
        routing = Lognormal(num_experts, top_k, asked, num_draws=2)
        for draw in range(2):
            totals_E = routing.totals(draw, 100_000)
            assert totals_E.sum() == 100_000 * top_k
            assert totals_E.min() >= 0
            assert routing.maxvio(draw, 100_000) == pytest.approx(asked, rel=0.01, abs=0.01)


def test_lognormal_tokens_choose_as_often_as_expected() -> None:
    routing = Lognormal(64, 4, 2.0)
    idx = routing.tokens(0, 4, 4096).topk_idx
    assert idx.shape == (4, 4096, 4)
    assert all(len(set(token)) == 4 for token in idx[0, :100].tolist())
    shares_E = np.bincount(idx.ravel(), minlength=64) / idx.size
    expected_E = routing.totals(0, 10**6) / (4 * 10**6)
    np.testing.assert_allclose(shares_E, expected_E, atol=0.004)
    np.testing.assert_array_equal(idx, routing.tokens(0, 4, 4096).topk_idx)


def test_lognormal_refuses_what_distinct_experts_cannot_have() -> None:
    with pytest.raises(ValueError, match=r"expected 0 to experts / top-k - 1 = 3, got 3\.5"):
        Lognormal(8, 2, 3.5)


def test_recorded_is_the_trace() -> None:
    trace = load_trace("pydoc")
    routing = Recorded(trace, "pydoc")
    tokens = routing.tokens(2, 3, 1000)
    for rank in range(3):
        expected = trace.slice_for(rank, 3, 1000, step=2)
        np.testing.assert_array_equal(tokens.topk_idx[rank], expected.topk_idx)
        assert tokens.topk_weights is not None
        np.testing.assert_array_equal(tokens.topk_weights[rank], expected.topk_weights)
    np.testing.assert_array_equal(routing.totals(2, 3000), np.bincount(tokens.topk_idx.ravel(), minlength=896))


# ---- bytes ----


def setting_of(policy: Policy, num_ranks: int, num_tokens: int, ranks_per_host: int = 8, **more: Any) -> Setting:
    model = Model("small", 13, 4, 48, 24, 2)
    return Setting(model, num_ranks, ranks_per_host, num_tokens, policy, **more)


def buffer_sizes(rank: int, policy: Policy, num_ranks: int, num_tokens: int, transport: str) -> dict[str, Any]:
    """What a Buffer takes on `rank`, and its plan and rows."""
    setting = setting_of(policy, num_ranks, num_tokens)
    tokens = random_tokens(num_ranks, num_tokens, 13, 4)
    assert tokens.topk_weights is not None
    with Buffer(num_experts=13, top_k=4, hidden=48, max_tokens=num_tokens, policy=policy, transport=transport) as ep:
        for name in ("row_bytes", "sum_bytes", "plan_bytes"):
            assert getattr(ep.config, name) == getattr(setting, name)
        for name in ("staging_bytes", "step_rows", "step_bytes", "rank_bytes"):
            assert getattr(ep.config, name)(num_ranks) == getattr(setting, name)(num_ranks)
        weights = torch.from_numpy(tokens.topk_weights[rank])
        plan = ep.plan(torch.from_numpy(tokens.topk_idx[rank]), weights)
        received = ep.dispatch(torch.ones(num_tokens, 48, dtype=torch.bfloat16), plan, weights)
        staging = getattr(ep._calls.transport, "_staging_bytes", 0)
        tensors = [
            getattr(part, field.name)
            for part in (plan, plan.outbox, plan.inbox)
            for field in dataclasses.fields(part)
            if isinstance(getattr(part, field.name), torch.Tensor) and field.name != "key"
        ]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        layout = sum(each.nbytes for each in plan.layout)
        return {
            "staging_bytes": 2 * staging,
            "rows_in_bytes": received.x.nbytes,
            "plan_bytes": sum(storages.values()) + layout,
            "routes_out": int((plan.dst_rank >= 0).sum()),
            "rank_rows": plan.rank_rows.tolist(),
            "num_used": int((plan.replicas[rank] >= 0).sum()),
        }


@pytest.mark.parametrize("policy", [Home(), Capacity(1.25), Balanced(0.0)], ids=str)
def test_sizes_told_are_the_sizes_taken(pool2: RankPool, policy: Policy) -> None:
    num_tokens = 300
    found = pool2.run(buffer_sizes, policy, 2, num_tokens, "shm")
    setting = setting_of(policy, 2, num_tokens)
    idx = random_tokens(2, num_tokens, 13, 4).topk_idx
    totals_E = np.bincount(idx[idx >= 0], minlength=13)
    told = memory.rank_memory(setting, loads.load(totals_E, 2, policy, setting.num_routes))
    assert told.staging_bytes == found[0]["staging_bytes"] == found[1]["staging_bytes"]
    assert told.rows_in_bytes == told.rows_out_bytes == max(each["rows_in_bytes"] for each in found)
    assert told.replica_bytes == max(each["num_used"] for each in found) * 3 * 48 * 24 * 2
    for rank, each in enumerate(found):
        exact = memory.plan_tensor_bytes(setting, each["routes_out"], each["rank_rows"][rank])
        local = 7 - rank  # 13 experts at home on 2 ranks, and as many slots; told for the rank with 7
        assert each["plan_bytes"] == exact - (7 - local) * (3 * 8 + 2 * 4)
    assert told.plan_bytes >= max(each["plan_bytes"] for each in found)


def test_memory_by_hand() -> None:
    # 4 ranks: 4 experts at home at most, each 3 * 48 * 24 parameters, in 2 layers; 10 tokens of 4 routes a rank.
    setting = setting_of(Home(), 4, 10, training=True, optimizer_bytes=12, ranks_per_host=2)
    told = memory.rank_memory(setting, loads.load(np.full(13, 12), 4, Home(), 160))
    params = 4 * 3 * 48 * 24 * 2
    assert (told.home_bytes, told.home_grad_bytes, told.optimizer_bytes) == (2 * params, 2 * params, 12 * params)
    assert (told.replica_bytes, told.replica_grad_bytes, told.staging_bytes) == (0, 0, 0)
    assert told.rows_in_bytes == told.rows_out_bytes == 48 * 96 * 2  # 4 * 12 rows of 96 bytes, of both layers
    assert told.inner_bytes == 3 * 48 * 24 * 2 * 2
    assert told.messages_bytes == (10 * 3 + 48) * 4 * 48  # sums are float32
    again = memory.rank_memory(
        dataclasses.replace(setting, recompute=True), loads.load(np.full(13, 12), 4, Home(), 160)
    )
    assert again.rows_in_bytes == 48 * 96
    inference = dataclasses.replace(setting, training=False)
    told = memory.rank_memory(inference, loads.load(np.full(13, 12), 4, Home(), 160))
    assert (told.home_grad_bytes, told.optimizer_bytes, told.rows_in_bytes) == (0, 0, 48 * 96)


def test_nearest_settings_are_at_the_edge() -> None:
    routing = Lognormal(13, 4, 0.5, num_draws=2)
    setting = setting_of(Home(), 2, 1000, ranks_per_host=1)

    def wanted(**changes: int) -> int:
        return memory.worst_memory(dataclasses.replace(setting, **changes), routing).total_bytes

    room = wanted() // 2
    most = memory.most_tokens_that_fit(setting, routing, room)
    assert wanted(max_tokens=most) <= room < wanted(max_tokens=most + 1)
    assert memory.most_tokens_that_fit(setting, routing, 10) == 0

    setting = dataclasses.replace(setting, num_ranks=2, ranks_per_host=2, max_tokens=1)
    room = wanted(num_ranks=2) * 2 // 3
    fewest = memory.ranks_that_fit(setting, routing, room)
    assert fewest % 2 == 0
    assert wanted(num_ranks=fewest) <= room < wanted(num_ranks=fewest - 2)
    assert memory.ranks_that_fit(setting, routing, 10) == 0


# ---- constants and times ----


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters of all routed experts, which are nearly all of the model: see the models' names and reports.
    [
        ("kimi-k3", 2722.7),  # of 2.8T
        ("kimi-k2", 1014.7),  # of 1.04T
        ("deepseek-v3", 653.9),  # of 671B
        ("qwen3-235b-a22b", 227.1),  # of 235B
        ("mixtral-8x7b", 45.1),  # of 46.7B
        ("gpt-oss-120b", 114.7),  # of 116.8B
    ],
)
def test_models_have_the_parameters_that_they_are_known_for(name: str, billions: float) -> None:
    model = MODELS[name]
    assert model.layers * model.num_experts * model.expert_params / 1e9 == pytest.approx(billions, abs=0.06)
    assert model.source


def test_phases_by_hand() -> None:
    # 2 hosts of 2 ranks, 4 experts. Every rank sends its 10 tokens to the next rank; those of 1 and 3 cross hosts.
    idx = np.array([[[(rank + 1) % 4]] * 10 for rank in range(4)], np.int32)
    model = Model("small", 4, 1, 100, 50, 1)
    setting = Setting(model, 4, 2, 10, Home())
    hardware = Hardware("toy", 2, 10**9, 1e6, 1e5, 1e7, "none")
    found = loads.load(np.full(4, 10), 4, Home(), 40)
    step = Step(setting, Tokens(idx, None), found, hardware, 1e4)
    phases = step.phases(10)
    assert phases.dispatch_secs == pytest.approx(10 * 200 / 1e4)  # bfloat16 rows over the slower way
    assert phases.combine_secs == pytest.approx(10 * 400 / 1e4)  # float32 sums
    assert phases.plan_secs == pytest.approx(2 * 4 * 4 / 1e4 + 10 * 4 / 1e4)
    assert phases.experts_secs == pytest.approx(max(10 * 6 * 100 * 50 / 1e7, 3 * 100 * 50 * 2 / 1e6))
    assert phases.replicate_secs == 0
    assert step.phases(20).dispatch_secs == pytest.approx(2 * phases.dispatch_secs)
    training = Step(dataclasses.replace(setting, training=True), Tokens(idx, None), found, hardware, 1e4).phases(10)
    assert training.dispatch_secs == 2 * phases.dispatch_secs
    assert training.experts_secs == 3 * phases.experts_secs


def test_balancing_pays_from_some_token_count_on() -> None:
    routing = Lognormal(64, 4, 5.0)
    setting = Setting(Model("small", 64, 4, 512, 256, 1), 8, 8, 1024, Home())
    steps = Steps(setting, routing, ACCELERATORS["h200"], FABRICS["400g"])
    threshold = steps.break_even_tokens(Balanced())
    assert threshold is not None
    assert steps.secs(Balanced(), threshold) < steps.secs(Home(), threshold)
    assert steps.secs(Balanced(), threshold - 1) >= steps.secs(Home(), threshold - 1)
    best = steps.best_slack()
    assert all(steps.secs(Balanced(best)) <= steps.secs(Balanced(slack)) for slack in SLACKS)
    even = Steps(setting, Lognormal(64, 4, 0.0), ACCELERATORS["h200"], FABRICS["400g"])
    assert even.break_even_tokens(Balanced(0.5)) is None  # no replica, no gain


def test_doctor_report_as_hardware() -> None:
    report = {
        "copies": {"stream_all_cores_gb_per_s": 20.0},
        "machine": {"cpu": "a processor", "memory_available_bytes": 64 * 10**9},
    }
    hardware = from_doctor(report, 4)
    assert (hardware.inside_bytes_per_sec, hardware.memory_bytes_per_sec) == (5e9, 1e10)
    assert (hardware.memory_bytes, hardware.flops_per_sec) == (16 * 10**9, None)
    for wrong in ({}, {"copies": None, "machine": {}}, {"copies": {}, "machine": {}}):
        with pytest.raises(ValueError, match=r"report|doctor"):
            from_doctor(wrong, 4)


# ---- docs/capacity.md ----

# experts, top-k, hidden, width, layers, bias: written out again, so that a slip in one place shows.
SHAPES = {
    "kimi-k3": (896, 16, 3584, 3072, 92, 0),
    "kimi-k2": (384, 8, 7168, 2048, 60, 0),
    "deepseek-v3": (256, 8, 7168, 2048, 58, 0),
    "qwen3-235b-a22b": (128, 8, 4096, 1536, 94, 0),
    "mixtral-8x7b": (8, 2, 4096, 14336, 32, 0),
    "gpt-oss-120b": (128, 4, 2880, 2880, 36, 1),
}


def documented() -> list[dict[str, str]]:
    lines = (Path(__file__).parents[1] / "docs" / "capacity.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| model |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[begin:] if line.startswith("|")]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_documented_bytes_by_hand() -> None:
    rows = documented()
    assert [(row["model"], row["R"]) for row in rows] == list(itertools.product(SHAPES, ["8", "64", "128"]))
    for row in rows:
        experts, top_k, hidden, width, layers, bias = SHAPES[row["model"]]
        ranks, tokens = int(row["R"]), 4096
        expert_bytes = 2 * (3 * hidden * width + bias * (2 * width + hidden))
        local = -(-experts // ranks)
        assert row["expert MB"] == f"{expert_bytes / 1e6:.1f}"
        assert row["experts at home"] == str(local)
        assert row["GiB at home"] == f"{expert_bytes * local * layers / 2**30:.2f}"
        assert row["rows, even"] == f"{tokens * top_k:,}"
        most_rows = -(-tokens * top_k * 105 // 100)
        assert row["N, Balanced"] == f"{most_rows:,}"
        assert row["GiB of rows"] == f"{2 * most_rows * hidden * 2 / 2**30:.3f}"
        sent_bytes = int(row["MB sent"]) * 1e6
        assert 0 < sent_bytes <= tokens * min(top_k, ranks - 1) * hidden * 2 * 1.01
        assert int(row["rows, Home"].replace(",", "")) <= -(-ranks * tokens * min(top_k, local))


def test_a_documented_row_is_what_is_computed() -> None:
    row = next(row for row in documented() if (row["model"], row["R"]) == ("mixtral-8x7b", "8"))
    setting = Setting(MODELS["mixtral-8x7b"], 8, 8, 4096, Home())
    routing = Lognormal(8, 2, 1.0)
    report = examine(setting, [Home(), Balanced()], [routing], Cluster(None, None, None), 0.01)
    home, balanced = report.routings[0].policies
    sent = next(each for each in home.traffic if each.way == "rank")
    assert row["MB sent"] == f"{(sent.inside_bytes + sent.across_bytes) / 1e6:.0f}"
    assert row["rows, Home"] == f"{home.rows_mean:,.0f}"
    assert row["replicas"] == f"{balanced.replicas_mean:.1f}"
    assert row["factor for 1%"] == f"{report.routings[0].least_factor:.2f}"
