"""Layers: routers, what keeps experts evenly used, the experts of one rank, and whole MoE layers around them.

    ep = moonep.Buffer(num_experts=896, top_k=16, hidden=3584, max_tokens=4096)
    router = moonep.nn.TopKRouter(3584, 896, 16, balancing=moonep.nn.QuantileBalancing(896, 16))
    layer = moonep.nn.MoE(ep, router, moonep.nn.Experts(ep, width=2048))
    y = layer(x)

`import moonep` does not load this package: `import moonep.nn` does.
"""

from moonep.nn.activations import situ_glu
from moonep.nn.balancing import AuxiliaryLoss, Balancing, QuantileBalancing, SignBalancing
from moonep.nn.experts import Experts
from moonep.nn.latent import LatentMoE, LatentMoEConfig
from moonep.nn.moe import MoE
from moonep.nn.router import TopKRouter
from moonep.nn.state import ModelState

__all__ = [
    "AuxiliaryLoss",
    "Balancing",
    "Experts",
    "LatentMoE",
    "LatentMoEConfig",
    "MoE",
    "ModelState",
    "QuantileBalancing",
    "SignBalancing",
    "TopKRouter",
    "situ_glu",
]
