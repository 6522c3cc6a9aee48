"""Megatron-Core's MoEAlltoAllTokenDispatcher.

Every routed row is sent on its own, with its weight. The weights are multiplied where Megatron's experts do it (in the
activation function): on their rank, in float32, rounded to the rows' dtype; here in place, as an expert could at best.
The sum at home adds in the rows' dtype (scatter_add_), so there are up to K + 1 roundings. Its router hands over a
dense map and dense weights, [T, E]. Fused permutation needs Transformer Engine and a GPU, and is off.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import stubs
from benchmarks.peers.common import Handed, PeerPlan, find, local_experts
from moonep import Received
from moonep.bench.config import Case, Peer, Settings

NAME, PACKAGE = "megatron", "megatron-core"


def peer() -> Peer | None:
    return find(NAME, PACKAGE, Megatron, rtol=1e-5, sends_rows=True)


class Megatron:
    def __init__(self, settings: Settings, case: Case):
        self._experts = local_experts(settings, dist.get_rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no Transformer Engine, Apex, ...
            self._dispatcher = _dispatcher(settings, self._experts.tolist())
        self._current_device = stubs.current_device_is_the_cpu()
        self._current_device.start()
        stubs.old_name_of_a_collective()
        shape = (case.num_tokens, settings.num_experts)
        self._map = Handed(lambda topk_idx: torch.zeros(shape, dtype=torch.bool).scatter_(1, topk_idx, True))
        self._probs = Handed(lambda topk_idx, weights: torch.zeros(shape).scatter_(1, topk_idx, weights))

    def plan(self, topk_idx: torch.Tensor) -> PeerPlan:
        return PeerPlan(topk_idx, self._experts)

    def dispatch(self, x: torch.Tensor, plan: PeerPlan, topk_weights: torch.Tensor) -> Received:
        routing_map, probs = self._map(plan.topk_idx), self._probs(plan.topk_idx, topk_weights)
        rows, weights = self._dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, weights = self._dispatcher.token_dispatch(rows, weights)
        rows, plan.group_sizes, weights = self._dispatcher.dispatch_postprocess(rows, weights)
        return Received(rows, weights)

    def combine(self, expert_out: torch.Tensor, plan: PeerPlan, weights: torch.Tensor) -> torch.Tensor:
        expert_out.mul_(weights.unsqueeze(-1))
        rows = self._dispatcher.token_combine(self._dispatcher.combine_preprocess(expert_out))
        y: torch.Tensor = self._dispatcher.combine_postprocess(rows)
        return y

    def close(self) -> None:
        self._current_device.stop()


def _dispatcher(settings: Settings, experts: list[int]) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    class OnCpu(MoEAlltoAllTokenDispatcher):
        """Sizes are on the host already, and only become plain ints, as gloo wants them."""

        def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
            if point == self.cuda_dtoh_point and self.ep_size > 1:
                self.input_splits, self.output_splits = self.input_splits.tolist(), self.output_splits.tolist()
            return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stubs.NoStream()
    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = dist.group.WORLD
    groups.expt_tp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=settings.hidden,
        ffn_hidden_size=settings.hidden,
        num_attention_heads=1,
        num_moe_experts=settings.num_experts,
        moe_router_topk=settings.top_k,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=False,
        expert_model_parallel_size=settings.num_ranks,
    )
    return OnCpu(len(experts), experts, config, groups)
