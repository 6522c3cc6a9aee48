"""Layers: the experts of one rank, and the whole MoE layer around a router.

    ep = moonep.Buffer(num_experts=896, top_k=16, hidden=3584, max_tokens=4096)
    layer = moonep.nn.MoE(ep, router, moonep.nn.Experts(ep, width=2048))
    y = layer(x)

`import moonep` does not load this package: `import moonep.nn` does.
"""

from moonep.nn.experts import Experts
from moonep.nn.moe import MoE
from moonep.nn.state import ModelState

__all__ = ["Experts", "MoE", "ModelState"]
