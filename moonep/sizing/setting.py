"""What is planned for: a model on ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moonep.policy import Policy
from moonep.sizes import Sizes
from moonep.sizing.models import DTYPE_BYTES, Model

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting(Sizes):
    """One layer shape and policy on so many ranks. Sizes are those of a Buffer with the same settings."""

    model: Model
    num_ranks: int
    ranks_per_host: int
    max_tokens: int  # T of every rank
    policy: Policy
    dtype: str = "bfloat16"  # of the rows
    weight_dtype: str = "bfloat16"
    expert_alignment: int = 1
    combine_wire: str = "float32"
    training: bool = False
    recompute: bool = False  # rows are made again in backward: those of one layer are held, not of all
    optimizer_bytes: int = 0  # of state for a parameter

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        """E."""
        return self.model.num_experts

    @property
    def top_k(self) -> int:  # type: ignore[override]
        """K."""
        return self.model.top_k

    @property
    def hidden(self) -> int:  # type: ignore[override]
        """H."""
        return self.model.hidden

    @property
    def element_bytes(self) -> int:
        """One element of a row."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """One parameter."""
        return DTYPE_BYTES[self.weight_dtype]

    @property
    def transport(self) -> str:  # type: ignore[override]
        """What `auto` takes: shared memory on one host, else messages."""
        return "auto" if self.num_hosts == 1 else "collective"

    @property
    def num_hosts(self) -> int:
        """Hosts that the ranks fill, the last one perhaps in part."""
        return -(-self.num_ranks // self.ranks_per_host)

    @property
    def host_of_rank(self) -> list[int]:
        """[R]: consecutive ranks share a host."""
        return [rank // self.ranks_per_host for rank in range(self.num_ranks)]

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return self.model.expert_params * self.weight_bytes

    @property
    def num_routes(self) -> int:
        """Routes of all ranks in a step."""
        return self.num_ranks * self.max_tokens * self.top_k

    def with_policy(self, policy: Policy) -> Setting:
        """The same with another policy."""
        return replace(self, policy=policy)
