"""torchtitan's AllToAllTokenDispatcher.

Every routed row is sent on its own; weights stay at home. They are multiplied there in float32 and the products are
rounded to the rows' dtype, in which the sum adds (a deterministic scatter_add): up to K + 1 roundings. Its router hands
over ids, weights, and how many tokens each expert gets, [E].
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.peers.common import Handed, PeerPlan, find, local_experts
from moonep import Received
from moonep.bench.config import Case, Peer, Settings

NAME, PACKAGE = "torchtitan", "torchtitan"


def peer() -> Peer | None:
    return find(NAME, PACKAGE, Torchtitan, rtol=1e-5, sends_rows=True)


class Torchtitan:
    def __init__(self, settings: Settings, case: Case):
        from torch.distributed.device_mesh import DeviceMesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        self._experts = local_experts(settings, dist.get_rank())
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("ep",))
        # Its road over all_to_all_single. The default one, spmd_types, passes lists of tensors: gloo wants those to be
        # of one size.
        set_spmd_backend("partial_dtensor")
        config = AllToAllTokenDispatcher.Config(num_experts=settings.num_experts, top_k=settings.top_k)
        self._dispatcher = AllToAllTokenDispatcher(config)
        self._dispatcher.wire_meshes(ep_mesh=mesh)
        num_experts = settings.num_experts
        self._counts = Handed(lambda topk_idx: torch.bincount(topk_idx.flatten(), minlength=num_experts))

    def plan(self, topk_idx: torch.Tensor) -> PeerPlan:
        return PeerPlan(topk_idx, self._experts)

    def dispatch(self, x: torch.Tensor, plan: PeerPlan, topk_weights: torch.Tensor) -> Received:
        counts = self._counts(plan.topk_idx)
        rows, plan.group_sizes, sent = self._dispatcher.dispatch(x, topk_weights, plan.topk_idx, counts)
        plan.state = sent, x
        return Received(rows, topk_weights)  # its combine has them

    def combine(self, expert_out: torch.Tensor, plan: PeerPlan, weights: torch.Tensor) -> torch.Tensor:
        sent, x = plan.state
        y: torch.Tensor = self._dispatcher.combine(expert_out, sent, x)
        return y

    def close(self) -> None:
        pass
