"""moonep.nn under policy Balanced: experts have replicas, and all is as in one process that holds all experts."""

import functools
from typing import Any

import pytest
import torch
from test_nn import (
    TOLERANCE,
    T,
    assert_close,
    assert_goes_on,
    checkpointed,
    dense_step,
    gradients,
    make_buffer,
    make_layer,
    step,
    tokens,
    trained,
    whole,
)

import moonep
from moonep.testing import RankPool

Place = tuple[RankPool, dict[str, Any]]

EXACT = moonep.Balanced(slack=0)


# One rank alone has no transport to choose, and no replicas.
PLACES = [(1, "local"), (2, "shm"), (2, "collective"), (4, "shm"), (4, "collective")]


@pytest.fixture(params=PLACES, ids=[f"{num_ranks}-{transport}" for num_ranks, transport in PLACES])
def place(request: pytest.FixtureRequest) -> Place:
    """Ranks, and the settings of a Buffer."""
    num_ranks, transport = request.param
    return request.getfixturevalue(f"pool{num_ranks}"), {"policy": EXACT, "transport": transport}


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one expert has all rows": ({"top_k": 1}, {"hot": 1, "bias": True}),
    "one rank has all rows": ({"num_experts": 8}, {"hot": 2, "bias": True}),
    "bias": ({}, {"bias": True}),
    "padded": ({"expert_alignment": 4}, {"bias": True}),
    "few slots": ({"num_experts": 8, "policy": moonep.Balanced(slack=0, max_replicas=1)}, {"bias": True}),
    "default slack": ({"policy": moonep.Balanced()}, {"hot": 3}),
    "bfloat16": ({"dtype": torch.bfloat16}, {"bias": True}),
    "float32 masters": ({"dtype": torch.bfloat16}, {"dtype": torch.float32}),
    "odd widths": ({"hidden": 7}, {"width": 3, "bias": True}),
    "ranks without experts": ({"num_experts": 2}, {"bias": True}),
    "many experts": ({"num_experts": 40, "top_k": 16}, {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_one_process(place: Place, name: str) -> None:
    pool, balanced = place
    settings, layer_settings = LAYERS[name]
    settings = balanced | settings
    found = whole(pool.run(step, settings, layer_settings))
    assert_close(found, dense_step(settings, layer_settings), TOLERANCE[settings.get("dtype", torch.float32)])


def spread(rank: int, settings: dict[str, Any], hot: int) -> tuple[list[int], int]:
    """Rows of every rank, and replicas of all."""
    with make_buffer(**settings) as ep:
        plan = ep.plan(make_layer(ep, hot=hot).router(tokens(ep))[0])
        return plan.rank_rows.tolist(), int((plan.replicas >= 0).sum())


def test_ranks_share_what_one_would_have(place: Place) -> None:
    """The layers above have replicas to compute with."""
    pool, balanced = place
    for rows, replicas in pool.run(spread, balanced | {"num_experts": 8}, 2):
        assert max(rows) - min(rows) <= 1
        assert sum(rows) == 2 * T
        assert (replicas > 0) == (pool.num_ranks > 1)


@pytest.mark.parametrize(
    ("reentrant", "early_stop"), [(True, False), (False, False), (False, True)], ids=["reentrant", "not", "early stop"]
)
def test_checkpointing(place: Place, reentrant: bool, early_stop: bool) -> None:
    """Two layers on one Buffer, which recompute in turn: weights are fetched again, and no bit changes."""
    pool, balanced = place
    for last_saves in (True, False):
        for expected, found in pool.run(checkpointed, reentrant, early_stop, last_saves, balanced):
            assert found.keys() == expected.keys()
            for name in expected:
                assert torch.equal(found[name], expected[name]), name


def two_layers(rank: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Three steps, whose gradients add up, each through the first, the second, and the first again."""
    with make_buffer(**settings) as ep:
        layers = torch.nn.ModuleList([make_layer(ep, bias=True, hot=2), make_layer(ep)])
        for seed in (2, 3, 4):
            x = tokens(ep, seed).requires_grad_()
            y = x + layers[0](x)
            y = y + layers[1](y)
            y = y + layers[0](y)
            (y * tokens(ep, 5)).sum().backward()
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad} | gradients(layers)


def joined(of_rank: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    join = {name: torch.stack if ".router." in name else torch.cat for name in of_rank[0]}
    parts = {name: join[name]([found[name] for found in of_rank]) for name in of_rank[0]}
    return {name: part.sum(0) if ".router." in name else part for name, part in parts.items()}


def test_two_layers_on_one_buffer(place: Place) -> None:
    pool, balanced = place
    assert_close(joined(pool.run(two_layers, balanced)), two_layers(0, {"policy": moonep.Home()}), 1e-5)


FROZEN = ["w_gate_up", "w_down", "b_gate_up", "b_down", "all"]


def frozen_step(rank: int, settings: dict[str, Any], frozen: str) -> dict[str, torch.Tensor]:
    with make_buffer(**settings) as ep:
        layer = make_layer(ep, bias=True)
        for name, parameter in layer.experts.named_parameters():
            parameter.requires_grad_(frozen not in (name, "all"))
        x = tokens(ep).requires_grad_()
        y = layer(x)
        (y * tokens(ep, 3)).sum().backward()
        assert x.grad is not None
        return {"y": y.detach(), "x": x.grad} | gradients(layer)


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters(place: Place, frozen: str) -> None:
    pool, balanced = place
    expected = dense_step(balanced, {"bias": True})
    for name in FROZEN[:-1] if frozen == "all" else [frozen]:
        del expected[f"experts.{name}"]
    assert_close(whole(pool.run(frozen_step, balanced, frozen)), expected, 1e-5)


def evaluated(rank: int, settings: dict[str, Any]) -> None:
    """Without gradients, and in inference mode, between steps of training."""
    with make_buffer(**settings) as ep:
        layer, x = make_layer(ep, bias=True), tokens(ep)
        trained = layer(x)
        with torch.no_grad():
            y = layer(x)
        assert not y.requires_grad
        with torch.inference_mode():
            inferred = layer(x)
        assert torch.equal(y, trained)
        assert torch.equal(inferred.clone(), y)
        (trained * tokens(ep, 3)).sum().backward()
        assert gradients(layer).keys() == dict(layer.named_parameters()).keys()


def test_evaluation_and_training_take_turns(place: Place) -> None:
    pool, balanced = place
    pool.run(evaluated, balanced)


def state_shapes(rank: int, settings: dict[str, Any]) -> tuple[int, dict[str, list[int]]]:
    with make_buffer(**settings) as ep:
        layer = make_layer(ep, bias=True)
        layer(tokens(ep)).sum().backward()
        other = make_layer(ep, bias=True, dtype=torch.bfloat16).float()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(tokens(ep)), layer(tokens(ep)))
        return ep.num_local_experts, {name: list(value.shape) for name, value in layer.state_dict().items()}


def test_state_dicts_hold_home_experts_alone(place: Place) -> None:
    pool, balanced = place
    found = pool.run(state_shapes, balanced)
    for local, shapes in found:
        assert shapes.pop("router.gate.weight") == [5, 16]
        assert shapes == {
            "experts.w_gate_up": [local, 16, 16],
            "experts.w_down": [local, 8, 16],
            "experts.b_gate_up": [local, 16],
            "experts.b_down": [local, 16],
        }
    assert sum(local for local, _ in found) == 5


def test_states_between_policies_and_numbers_of_ranks(pool4: Any, pool1: Any, tmp_path: Any) -> None:
    """Saved by four ranks that balance, loaded by one and by four at home: training goes on alike."""
    save = functools.partial(trained, policy=EXACT)
    expected = pool4.run(save, str(tmp_path), "adamw", "save")
    for pool in (pool4, pool1):
        assert_goes_on(pool.run(trained, str(tmp_path), "adamw", "load"), expected)
    assert_goes_on(pool4.run(save, str(tmp_path), "adamw", "load"), expected)
