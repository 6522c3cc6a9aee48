"""DeepSpeed's MOELayer, cut where its experts stand.

Its layer is one function; dispatch and combine here call the same parts of it in the same order. Its gating (softmax
and top-k of logits, nothing dropped) finds the places of the rows too and cannot be taken out, so it is in dispatch;
its router hands over logits, [T, E], whose softmax are the weights. Every expert gets as many slots of every rank as
the fullest expert anywhere has rows, and all slots are sent, both ways. Weights stay at home, renormalised to a sum of
1; there the rows are weighted and summed in float32, and rounded once. Tutel, which it can use on GPUs, is off.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.peers import stubs
from benchmarks.peers.common import Handed, PeerPlan, find, local_experts
from moonep import Received
from moonep.bench.config import Case, Peer, Settings

NAME, PACKAGE = "deepspeed", "deepspeed"


def peer() -> Peer | None:
    # Weights of a trace were float16: their sums miss 1 by 2e-4, and renormalising tells.
    return find(NAME, PACKAGE, DeepSpeed, rtol=5e-4, sends_rows=False)


class DeepSpeed:
    def __init__(self, settings: Settings, case: Case):
        stubs.deepspeed_on_cpu()
        import deepspeed
        from deepspeed.moe import sharded_moe

        with stubs.without_deepspeed_allreduce():
            deepspeed.init_distributed("gloo", verbose=False)  # finds the group that is there
        self._moe, self._group = sharded_moe, dist.group.WORLD
        self._top_k = settings.top_k
        # Rows are [source rank, expert, slot].
        self._experts = local_experts(settings, dist.get_rank()).repeat(settings.num_ranks)
        shape = (case.num_tokens, settings.num_experts)
        self._logits = Handed(lambda topk_idx, w: torch.full(shape, -torch.inf).scatter_(1, topk_idx, w.log()))

    def plan(self, topk_idx: torch.Tensor) -> PeerPlan:
        return PeerPlan(topk_idx, self._experts)

    def dispatch(self, x: torch.Tensor, plan: PeerPlan, topk_weights: torch.Tensor) -> Received:
        moe, logits = self._moe, self._logits(plan.topk_idx, topk_weights)
        _, capacity, num_experts, indices, locations, gates, _ = moe.topkgating(
            logits, self._top_k, 1.0, 0, drop_tokens=False, ep_group=self._group, sparse_routes=True
        )
        capacity = int(capacity)
        slots = moe._route_slots(indices, locations, num_experts, capacity)
        rows = moe._AllToAll.apply(self._group, moe._sparse_encode(x, slots, num_experts, capacity))
        plan.group_sizes = torch.full_like(self._experts, capacity)
        plan.state = slots, gates
        return Received(rows.view(-1, x.shape[1]), gates)  # its combine has them

    def combine(self, expert_out: torch.Tensor, plan: PeerPlan, weights: torch.Tensor) -> torch.Tensor:
        slots, gates = plan.state
        rows = self._moe._AllToAll.apply(self._group, expert_out)
        y: torch.Tensor = self._moe._sparse_decode(rows, slots, gates, len(plan.topk_idx))
        return y

    def close(self) -> None:
        pass
