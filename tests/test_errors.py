"""What a wrong argument or setting means: the same error on every rank, with a text that helps, and a usable Buffer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import moonep
from moonep import machine

TRANSPORTS = ("shm", "collective")
T, K, H, E, S = 4, 2, 8, 16, 6
SETTINGS: dict[str, Any] = {
    "num_experts": E,
    "top_k": K,
    "hidden": H,
    "max_tokens": S,
    "dtype": torch.float32,
    "timeout_secs": 5.0,
}
Said = tuple[str, str]  # the error's kind and text


def said(call: Callable[[], object]) -> Said:
    """What `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def good_idx(rank: int = 0) -> torch.Tensor:
    return (torch.arange(T * K).view(T, K) * 3 + rank) % E


def works(ep: moonep.Buffer) -> None:
    """A whole round trip is right."""
    config = ep.config
    x = torch.randn(T, config.hidden).to(config.dtype)
    plan = ep.plan(torch.arange(T * config.top_k).view(T, config.top_k) % config.num_experts)
    recv = ep.dispatch(x, plan)
    assert torch.allclose(ep.combine(recv.x, plan), x * config.top_k)


def check_said(everyone: list[Said], kind: str, *parts: str) -> None:
    """All ranks said the same, of this kind, with these parts in it."""
    assert len(set(everyone)) == 1, everyone
    assert everyone[0][0] == kind, everyone
    for part in parts:
        assert part in everyone[0][1], (part, everyone)


# ---- arguments ----


def functional(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`call` under a transform of torch.func."""
    gradient: torch.Tensor = torch.func.grad(lambda each: call(each).sum())(tensor)
    return gradient


def dual(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`call` on a tensor with a tangent."""
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """Has all but the numbers."""
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def bad_call(ep: moonep.Buffer, plan: moonep.Plan, name: str) -> object:
    """Makes the call `name`, whose argument is wrong."""
    x, rows, weights = torch.randn(T, H), torch.randn(plan.num_rows, H), torch.rand(T, K)
    row_weights = torch.rand(plan.num_rows)
    idx = good_idx()
    huge, high, low = idx.clone(), idx.int(), idx.int()
    huge[3, 1], high[1, 0], low[2, 1] = 2**40, E, -2
    calls: dict[str, Callable[[], object]] = {
        "id -2": lambda: ep.plan(low),
        "id E": lambda: ep.plan(high),
        "id huge": lambda: ep.plan(huge),
        "idx float": lambda: ep.plan(idx.float()),
        "idx int16": lambda: ep.plan(idx.short()),
        "idx list": lambda: ep.plan(idx.tolist()),
        "idx K": lambda: ep.plan(torch.zeros(T, K + 1, dtype=torch.int64)),
        "idx 1-d": lambda: ep.plan(torch.zeros(K, dtype=torch.int64)),
        "idx T": lambda: ep.plan(torch.zeros(S + 1, K, dtype=torch.int64)),
        "idx device": lambda: ep.plan(idx.to("meta")),
        "tokens list": lambda: ep.plan(idx, num_tokens_per_rank="4"),
        "tokens length": lambda: ep.plan(idx, num_tokens_per_rank=[4] * 9),
        "tokens own": lambda: ep.plan(idx, num_tokens_per_rank=[5] * ep.num_ranks),
        "idx sparse": lambda: ep.plan(idx.to_sparse()),
        "idx vmap": lambda: torch.func.vmap(lambda each: ep.plan(each).dst_row)(idx[None]),
        "idx fake": lambda: ep.plan(fake(idx)),
        "plan weights sparse": lambda: ep.plan(idx, weights.to_sparse()),
        "plan weights fake": lambda: ep.plan(idx, fake(weights)),
        "plan weights shape": lambda: ep.plan(idx, torch.rand(T, K + 1)),
        "plan weights dtype": lambda: ep.plan(idx, idx),
        "x dtype": lambda: ep.dispatch(x.double(), plan),
        "x H": lambda: ep.dispatch(torch.randn(T, H + 1), plan),
        "x T": lambda: ep.dispatch(torch.randn(T + 1, H), plan),
        "x 1-d": lambda: ep.dispatch(torch.randn(H), plan),
        "x device": lambda: ep.dispatch(x.to("meta"), plan),
        "x sparse": lambda: ep.dispatch(x.to_sparse(), plan),
        "x nested": lambda: ep.dispatch(torch.nested.nested_tensor([x]), plan),
        "x grad": lambda: functional(lambda each: ep.dispatch(each, plan).x, x),
        "x vmap": lambda: torch.func.vmap(lambda each: ep.dispatch(each, plan).x)(x[None]),
        "x functionalize": lambda: torch.func.functionalize(lambda each: ep.dispatch(each, plan).x)(x),
        "x fake": lambda: ep.dispatch(fake(x), plan),
        "x dual": lambda: dual(lambda each: ep.dispatch(each, plan).x, x),
        "x None": lambda: ep.dispatch(None, plan),
        "dispatch plan": lambda: ep.dispatch(x, idx),
        "topk_weights dtype": lambda: ep.dispatch(x, plan, idx),
        "topk_weights shape": lambda: ep.dispatch(x, plan, weights[:, :1]),
        "topk_weights device": lambda: ep.dispatch(x, plan, weights.to("meta")),
        "topk_weights sparse": lambda: ep.dispatch(x, plan, weights.to_sparse()),
        "topk_weights grad": lambda: functional(lambda each: ep.dispatch(x, plan, each).x, weights),
        "topk_weights dual": lambda: dual(lambda each: ep.dispatch(x, plan, each).weights, weights),
        "topk_weights list": lambda: ep.dispatch(x, plan, weights.tolist()),
        "expert_out dtype": lambda: ep.combine(rows.half(), plan),
        "expert_out N": lambda: ep.combine(torch.randn(plan.num_rows + 1, H), plan),
        "expert_out H": lambda: ep.combine(torch.randn(plan.num_rows, 1), plan),
        "expert_out device": lambda: ep.combine(rows.to("meta"), plan),
        "expert_out grad": lambda: functional(lambda each: ep.combine(each, plan), rows),
        "expert_out dual": lambda: dual(lambda each: ep.combine(each, plan), rows),
        "expert_out list": lambda: ep.combine([], plan),
        "combine plan": lambda: ep.combine(rows, None),
        "weights dtype": lambda: ep.combine(rows, plan, row_weights.long()),
        "weights shape": lambda: ep.combine(rows, plan, weights),
        "weights sparse": lambda: ep.combine(rows, plan, row_weights.to_sparse()),
        "weights fake": lambda: ep.combine(rows, plan, fake(row_weights)),
        "weights dual": lambda: dual(lambda each: ep.combine(rows, plan, each), row_weights),
        "weights device": lambda: ep.combine(rows, plan, row_weights.to("meta")),
    }
    return calls[name]()


# verb, kind, parts of the text
BAD_ARGUMENTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "id -2": ("plan", "ValueError", ("topk_idx[2, 1]", "-1 (no route)", "[0, 16)", "got -2")),
    "id E": ("plan", "ValueError", ("topk_idx[1, 0]", "[0, 16)", "got 16")),
    "id huge": ("plan", "ValueError", ("topk_idx[3, 1]", "[0, 16)", "got 1099511627776")),
    "idx float": ("plan", "TypeError", ("topk_idx", "int32 or int64", "torch.float32")),
    "idx int16": ("plan", "TypeError", ("topk_idx", "int32 or int64", "torch.int16")),
    "idx list": ("plan", "TypeError", ("topk_idx", "a tensor", "list")),
    "idx K": ("plan", "ValueError", ("topk_idx", "[T, 2]", "[4, 3]")),
    "idx 1-d": ("plan", "ValueError", ("topk_idx", "[T, 2]", "[2]")),
    "idx T": ("plan", "ValueError", ("topk_idx", "max_tokens = 6", "got 7")),
    "idx device": ("plan", "ValueError", ("topk_idx", "cpu", "meta")),
    "tokens list": ("plan", "TypeError", ("num_tokens_per_rank", "a list of ints", "'4'")),
    "tokens length": ("plan", "ValueError", ("num_tokens_per_rank", "one per rank", "got 9")),
    "tokens own": ("plan", "ValueError", ("num_tokens_per_rank[", "the 4 tokens of topk_idx", "got 5")),
    "plan weights shape": ("plan", "ValueError", ("topk_weights", "[4, 2]", "[4, 3]")),
    "plan weights dtype": ("plan", "TypeError", ("topk_weights", "floating", "torch.int64")),
    "x dtype": ("dispatch", "ValueError", ("x: ", "torch.float32", "torch.float64")),
    "x H": ("dispatch", "ValueError", ("x: ", "[4, 8]", "[4, 9]")),
    "x T": ("dispatch", "ValueError", ("x: ", "[4, 8]", "[5, 8]")),
    "x 1-d": ("dispatch", "ValueError", ("x: ", "[4, 8]", "[8]")),
    "x device": ("dispatch", "ValueError", ("x: ", "cpu", "meta")),
    "x None": ("dispatch", "TypeError", ("x: ", "a tensor", "NoneType")),
    "dispatch plan": ("dispatch", "TypeError", ("plan: ", "moonep Plan", "Tensor")),
    "topk_weights dtype": ("dispatch", "TypeError", ("topk_weights", "floating", "torch.int64")),
    "topk_weights shape": ("dispatch", "ValueError", ("topk_weights", "[4, 2]", "[4, 1]")),
    "topk_weights device": ("dispatch", "ValueError", ("topk_weights", "cpu", "meta")),
    "topk_weights list": ("dispatch", "TypeError", ("topk_weights", "a tensor", "list")),
    "expert_out dtype": ("combine", "ValueError", ("expert_out", "torch.float32", "torch.float16")),
    "expert_out N": ("combine", "ValueError", ("expert_out", "rows x hidden", "got [")),
    "expert_out H": ("combine", "ValueError", ("expert_out", "8]", "1]")),
    "expert_out device": ("combine", "ValueError", ("expert_out", "cpu", "meta")),
    "expert_out list": ("combine", "TypeError", ("expert_out", "a tensor", "list")),
    "combine plan": ("combine", "TypeError", ("plan: ", "moonep Plan", "NoneType")),
    "weights dtype": ("combine", "TypeError", ("weights", "floating", "torch.int64")),
    "weights shape": ("combine", "ValueError", ("weights", "expected shape", "[4, 2]")),
    "weights device": ("combine", "ValueError", ("weights", "cpu", "meta")),
    "idx sparse": ("plan", "ValueError", ("topk_idx", "strided", "sparse")),
    "idx vmap": ("plan", "ValueError", ("topk_idx", "memory of its own")),
    "idx fake": ("plan", "ValueError", ("topk_idx", "memory of its own", "FakeTensor")),
    "plan weights sparse": ("plan", "ValueError", ("topk_weights", "strided", "sparse")),
    "plan weights fake": ("plan", "ValueError", ("topk_weights", "memory of its own")),
    "x sparse": ("dispatch", "ValueError", ("x: ", "strided", "sparse")),
    "x nested": ("dispatch", "ValueError", ("x: ", "strided", "nested")),
    "x grad": ("dispatch", "ValueError", ("x: ", "memory of its own")),
    "x vmap": ("dispatch", "ValueError", ("x: ", "memory of its own")),
    "x functionalize": ("dispatch", "ValueError", ("x: ", "memory of its own")),
    "x fake": ("dispatch", "ValueError", ("x: ", "memory of its own")),
    "x dual": ("dispatch", "ValueError", ("x: ", "tangent")),
    "topk_weights sparse": ("dispatch", "ValueError", ("topk_weights", "strided", "sparse")),
    "topk_weights grad": ("dispatch", "ValueError", ("topk_weights", "memory of its own")),
    "topk_weights dual": ("dispatch", "ValueError", ("topk_weights", "tangent")),
    "expert_out grad": ("combine", "ValueError", ("expert_out", "memory of its own")),
    "expert_out dual": ("combine", "ValueError", ("expert_out", "tangent")),
    "weights sparse": ("combine", "ValueError", ("weights", "strided", "sparse")),
    "weights fake": ("combine", "ValueError", ("weights", "memory of its own")),
    "weights dual": ("combine", "ValueError", ("weights", "tangent")),
}


def good_call(ep: moonep.Buffer, plan: moonep.Plan, verb: str) -> object:
    if verb == "plan":
        return ep.plan(good_idx())
    if verb == "dispatch":
        return ep.dispatch(torch.randn(T, H), plan)
    return ep.combine(torch.randn(plan.num_rows, H), plan)


def make_bad_calls(rank: int, transport: str, bad_rank: int, names: list[str]) -> dict[str, Said]:
    found = {}
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        for name in names:
            plan = ep.plan(good_idx(rank))
            if rank == bad_rank:
                found[name] = said(lambda name=name, plan=plan: bad_call(ep, plan, name))
            else:
                verb = BAD_ARGUMENTS[name][0]
                found[name] = said(lambda verb=verb, plan=plan: good_call(ep, plan, verb))
            works(ep)
    return found


def check_bad_calls(pool: Any, transport: str, bad_rank: int, names: list[str]) -> None:
    found = pool.run(make_bad_calls, transport, bad_rank, names)
    for name in names:
        verb, kind, parts = BAD_ARGUMENTS[name]
        check_said([each[name] for each in found], kind, f"{verb}: rank {bad_rank}: ", *parts)


BY_VERB = [[name for name, (verb, *_) in BAD_ARGUMENTS.items() if verb == v] for v in ("plan", "dispatch", "combine")]


@pytest.mark.parametrize("names", BY_VERB, ids=["plan", "dispatch", "combine"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bad_arguments_of_one_rank(pool2: Any, transport: str, names: list[str]) -> None:
    check_bad_calls(pool2, transport, 1, names)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bad_arguments_of_one_rank_in_four(pool4: Any, transport: str) -> None:
    check_bad_calls(pool4, transport, 2, ["id huge", "idx float", "idx T", "x H", "dispatch plan", "weights shape"])


def test_bad_arguments_alone(pool1: Any) -> None:
    check_bad_calls_alone = pool1.run(make_bad_calls, "local", 0, list(BAD_ARGUMENTS))
    for name, (verb, kind, parts) in BAD_ARGUMENTS.items():
        check_said([check_bad_calls_alone[0][name]], kind, f"{verb}: rank 0: ", *parts)


def two_bad_ranks(rank: int, transport: str) -> Said:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        idx = good_idx()
        idx[rank, 0] = E + rank
        found = said(lambda: ep.plan(idx))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_lowest_bad_rank_is_named(pool2: Any, transport: str) -> None:
    check_said(pool2.run(two_bad_ranks, transport), "ValueError", "rank 0", "topk_idx[0, 0]", "got 16")


def long_messages(rank: int, transport: str) -> Said:
    """A text longer than a header is cut, not lost."""
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plan = ep.plan(good_idx())
        x = torch.zeros((1,) * 400) if rank == 1 else torch.randn(T, H)
        found = said(lambda: ep.dispatch(x, plan))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_long_messages(pool2: Any, transport: str) -> None:
    check_said(pool2.run(long_messages, transport), "ValueError", "rank 1", "x: ", "[4, 8]")


# ---- settings ----


def make_one(settings: dict[str, Any]) -> None:
    with moonep.Buffer(**SETTINGS | settings) as ep:
        works(ep)


def differing_settings(rank: int, others: list[dict[str, Any]]) -> list[Said]:
    return [said(lambda other=other: make_one(other if rank == 1 else {})) for other in others]


DIFFERENT: list[tuple[dict[str, Any], str, str]] = [
    ({"num_experts": 17}, "16", "17"),
    ({"top_k": 3}, "2", "3"),
    ({"hidden": 9}, "8", "9"),
    ({"max_tokens": 7}, "6", "7"),
    ({"dtype": torch.bfloat16}, "torch.float32", "torch.bfloat16"),
    ({"transport": "collective"}, "auto", "collective"),
    ({"expert_alignment": 8}, "1", "8"),
    ({"combine_wire": "payload"}, "float32", "payload"),
    ({"timeout_secs": 6.0}, "5.0", "6.0"),
]


def test_settings_that_differ(pool2: Any) -> None:
    found = pool2.run(differing_settings, [other for other, *_ in DIFFERENT])
    for (other, usual, unusual), *everyone in zip(DIFFERENT, *found, strict=True):
        check_said(everyone, "ConfigMismatchError", *other, f"rank 0 {usual}", f"rank 1 {unusual}")


def test_settings_that_differ_in_four(pool4: Any) -> None:
    everyone = [said for (said,) in pool4.run(differing_settings, [{"max_tokens": 7}])]
    check_said(everyone, "ConfigMismatchError", "max_tokens", "rank 0 6, rank 1 7, rank 2 6, rank 3 6")


BAD_SETTINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"num_experts": 0}, "ValueError", "got 0"),
    ({"num_experts": 2**31}, "ValueError", "got 2147483648"),
    ({"num_experts": True}, "TypeError", "got True"),
    ({"top_k": 0}, "ValueError", "got 0"),
    ({"top_k": 17}, "ValueError", "num_experts = 16, got 17"),
    ({"top_k": "2"}, "TypeError", "got '2'"),
    ({"hidden": 0}, "ValueError", "got 0"),
    ({"hidden": 2.5}, "TypeError", "got 2.5"),
    ({"max_tokens": -1}, "ValueError", "got -1"),
    ({"max_tokens": 2**40}, "ValueError", "fits"),
    ({"dtype": torch.int32}, "ValueError", "got torch.int32"),
    ({"dtype": "bfloat16"}, "ValueError", "got bfloat16"),
    ({"policy": "home"}, "TypeError", "got 'home'"),
    ({"transport": "carrier pigeon"}, "ValueError", "'carrier pigeon'"),
    ({"transport": "local"}, "ValueError", "group of 2"),
    ({"transport": "é" * 2000}, "ValueError", "é"),
    ({"expert_alignment": 0}, "ValueError", "got 0"),
    ({"combine_wire": "bfloat16"}, "ValueError", "got 'bfloat16'"),
    ({"timeout_secs": 0}, "ValueError", "got 0"),
    ({"timeout_secs": -1.0}, "ValueError", "got -1.0"),
    ({"timeout_secs": float("nan")}, "ValueError", "got nan"),
    ({"timeout_secs": 0.0005}, "ValueError", "got 0.0005"),
    ({"timeout_secs": float("inf")}, "ValueError", "got inf"),
    ({"timeout_secs": True}, "ValueError", "got True"),
    ({"timeout_secs": "soon"}, "TypeError", "soon"),
    ({"timeout_secs": None}, "TypeError", "None"),
]


def test_bad_settings_of_one_rank(pool2: Any) -> None:
    found = pool2.run(differing_settings, [other for other, *_ in BAD_SETTINGS], timeout_secs=100)
    for (other, kind, part), *everyone in zip(BAD_SETTINGS, *found, strict=True):
        check_said(everyone, kind, "rank 1", *other, part)


# ---- what does not fit ----


def too_large(rank: int, settings: dict[str, Any], available_bytes: int) -> tuple[Said, int]:
    """The refusal, and whether what it says fits is accepted."""
    before, machine.memory_available_bytes = machine.memory_available_bytes, lambda: available_bytes
    try:
        refused = said(lambda: moonep.Buffer(**SETTINGS | settings))
        fits = int(refused[1].rpartition("max_tokens=")[2].split()[0]) if "max_tokens=" in refused[1] else 0
        if fits:
            with moonep.Buffer(**SETTINGS | settings | {"max_tokens": fits}) as ep:
                works(ep)
    finally:
        machine.memory_available_bytes = before
    return refused, fits


def check_too_large(pool: Any, settings: dict[str, Any], available_bytes: int) -> None:
    found = pool.run(too_large, settings, available_bytes)
    check_said([refused for refused, _ in found], "ValueError", "max_tokens", f"{settings['max_tokens']} tokens")
    check_said([refused for refused, _ in found], "ValueError", "bytes", str(available_bytes), "fits")
    assert 0 < found[0][1] < settings["max_tokens"]


def test_rows_that_cannot_fit(pool: Any) -> None:
    check_too_large(pool, {"hidden": H, "max_tokens": 2**24}, 2**28)


def test_staging_that_cannot_fit(pool2: Any) -> None:
    """Rows so narrow that the ids of a plan are the larger part."""
    check_too_large(pool2, {"hidden": H, "dtype": torch.bfloat16, "top_k": 8, "max_tokens": 2**26}, 2**28)


def test_a_setting_that_fits_nobody(pool1: Any) -> None:
    ((refused, fits),) = pool1.run(too_large, {"max_tokens": 8}, 10)
    check_said([refused], "ValueError", "not even one token fits")
    assert fits == 0


def test_rows_beyond_the_numbers_that_rows_have(pool: Any) -> None:
    ranks = len(pool.pids)
    found = pool.run(differing_settings, [{"max_tokens": 2**32, "top_k": 2}] * 2)[0]
    if ranks == 1:
        return  # the bad settings were for rank 1
    assert found[0][0] == "ValueError"
    assert f"{ranks * 2 * 2**32 + E} rows" in found[0][1]
    assert "fits" in found[0][1]


# ---- calls that do not belong together ----


def different_verbs(rank: int, transport: str) -> dict[str, Said]:
    found = {}
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        for mine in ("plan", "dispatch", "combine"):
            for theirs in ("plan", "dispatch", "combine"):
                if mine != theirs:
                    plan = ep.plan(good_idx())
                    verb = mine if rank == 0 else theirs
                    found[f"{mine}, {theirs}"] = said(lambda plan=plan, verb=verb: good_call(ep, plan, verb))
                    works(ep)
        x = torch.randn(T, H, requires_grad=True)
        plan = ep.plan(good_idx())
        recv = ep.dispatch(x, plan)
        if rank == 0:
            found["dispatch's backward, combine"] = said(lambda: recv.x.sum().backward())
        else:
            found["dispatch's backward, combine"] = said(lambda: good_call(ep, plan, "combine"))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_call_different_verbs(pool2: Any, transport: str) -> None:
    found = pool2.run(different_verbs, transport)
    for name in found[0]:
        mine, theirs = name.split(", ")
        everyone = [each[name] for each in found]
        check_said(everyone, "VerbMismatchError", f"rank 0 called {mine}", f"rank 1 called {theirs}")


def bad_argument_and_another_verb(rank: int, transport: str) -> Said:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plan = ep.plan(good_idx())
        found = said(lambda: bad_call(ep, plan, "x H") if rank == 0 else ep.plan(good_idx()))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bad_argument_beside_another_verb(pool2: Any, transport: str) -> None:
    check_said(pool2.run(bad_argument_and_another_verb, transport), "ValueError", "dispatch: rank 0: x: ")


def foreign_plans(rank: int, transport: str) -> list[Said]:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep, moonep.Buffer(transport=transport, **SETTINGS) as other:
        plan, foreign = ep.plan(good_idx()), other.plan(good_idx())
        x, rows = torch.randn(T, H), torch.randn(plan.num_rows, H)
        found = [
            said(lambda: ep.dispatch(x, foreign)),
            said(lambda: ep.dispatch(x, foreign if rank == 1 else plan)),
            said(lambda: ep.combine(rows, foreign if rank == 1 else plan)),
        ]
        # Local, like replicate itself.
        with pytest.raises(moonep.errors.ForeignPlanError, match="another Buffer"):
            ep.replicate(foreign)
        works(ep)
        works(other)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_plans_of_another_buffer(pool2: Any, transport: str) -> None:
    for everyone, rank in zip(zip(*pool2.run(foreign_plans, transport), strict=True), (0, 1, 1), strict=True):
        check_said(list(everyone), "ForeignPlanError", f"rank {rank}", "plan: ", "this Buffer", "another Buffer")


def plans_in_different_order(rank: int, transport: str) -> list[Said]:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plans = [ep.plan(good_idx()), ep.plan(good_idx())]
        mine = plans[rank]
        x, rows = torch.randn(T, H), torch.randn(mine.num_rows, H)
        found = [said(lambda: ep.dispatch(x, mine)), said(lambda: ep.combine(rows, mine))]
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_plans_used_in_different_order(pool2: Any, transport: str) -> None:
    for verb, everyone in zip(
        ("dispatch", "combine"), zip(*pool2.run(plans_in_different_order, transport), strict=True), strict=True
    ):
        check_said(list(everyone), "VerbMismatchError", verb, "different plans", "rank 0 1, rank 1 2")


def buffers_in_different_order(rank: int) -> Said:
    with (
        moonep.Buffer(transport="collective", **SETTINGS) as first,
        moonep.Buffer(transport="collective", **SETTINGS) as second,
    ):
        ep = (first, second)[rank]
        found = said(lambda: ep.plan(good_idx()))
        works(first)
        works(second)
    return found


def test_buffers_used_in_different_order(pool2: Any) -> None:
    check_said(pool2.run(buffers_in_different_order), "VerbMismatchError", "different Buffers", "same order")


def inference_beside_training(rank: int, transport: str) -> list[Said]:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plan = ep.plan(good_idx())
        x = torch.randn(T, H, requires_grad=rank == 0)
        with torch.inference_mode(rank == 1):
            found = [said(lambda: ep.dispatch(x, plan))]
        rows = torch.randn(plan.num_rows, H, requires_grad=rank == 0)
        with torch.inference_mode(rank == 1):
            found.append(said(lambda: ep.combine(rows, plan)))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_inference_mode_beside_training(pool2: Any, transport: str) -> None:
    for verb, everyone in zip(
        ("dispatch", "combine"), zip(*pool2.run(inference_beside_training, transport), strict=True), strict=True
    ):
        parts = "rank 0 needs gradients", "rank 1 is in inference mode", "no_grad"
        check_said(list(everyone), "ValueError", verb, *parts)


def bad_replicate(rank: int) -> None:
    with moonep.Buffer(**SETTINGS) as ep:
        plan = ep.plan(good_idx())
        weights = torch.randn(ep.num_local_experts, 3)
        assert ep.replicate(plan, weights, weights)[0] is weights
        assert ep.replicate(plan) == ()
        with pytest.raises(ValueError, match=rf"tensors\[1\]: expected shape \[{ep.num_local_experts}, ...\]"):
            ep.replicate(plan, weights, weights[1:])
        with pytest.raises(TypeError, match=r"tensors\[0\]: expected a tensor, got int"):
            ep.replicate(plan, 3)
        works(ep)


def test_replicate(pool: Any) -> None:
    pool.run(bad_replicate)


# ---- plans that were tampered with, and calls on one group that do not belong together ----


def tampered_plans(rank: int, transport: str) -> list[Said]:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plan = ep.plan(good_idx())
        x, rows = torch.randn(T, H), torch.randn(plan.num_rows, H)
        copy = dataclasses.replace(plan, num_dropped=1)
        found = [said(lambda: ep.dispatch(x, copy if rank else plan)), said(lambda: ep.combine(rows, copy))]
        plan.group_sizes.mul_(1000)  # the public tensors are the caller's; nothing is steered by them
        plan.group_ends.zero_()
        recv = ep.dispatch(x, plan)
        assert recv.x.shape == (plan.num_rows, H)
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copied_and_changed_plans(pool2: Any, transport: str) -> None:
    for everyone, rank in zip(zip(*pool2.run(tampered_plans, transport), strict=True), (1, 0), strict=True):
        check_said(list(everyone), "ForeignPlanError", f"rank {rank}", "plan: ")


def making_beside_a_verb(rank: int) -> Said:
    with moonep.Buffer(transport="collective", **SETTINGS) as ep:
        if rank == 0:
            return said(lambda: ep.plan(good_idx()))
        return said(lambda: moonep.Buffer(transport="collective", **SETTINGS))


def test_making_a_buffer_beside_a_verb(pool2: Any) -> None:
    verb, making = pool2.run(making_beside_a_verb)
    check_said([verb], "TransportError", "plan: rank 1", "making a Buffer")
    check_said([making], "TransportError", "making a Buffer: rank 0", "a verb")


def inference_tensors_beside_training(rank: int, transport: str) -> Said:
    with moonep.Buffer(transport=transport, **SETTINGS) as ep:
        plan = ep.plan(good_idx())
        with torch.inference_mode(rank == 1):
            rows = torch.randn(plan.num_rows, H)
        weights = torch.rand(plan.num_rows, requires_grad=rank == 0)
        found = said(lambda: ep.combine(rows, plan, weights))
        works(ep)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_inference_tensors_beside_training(pool2: Any, transport: str) -> None:
    found = pool2.run(inference_tensors_beside_training, transport)
    check_said(
        found, "ValueError", "rank 0 needs gradients", "rank 1 is in inference mode, or passed tensors made in it"
    )
