"""The bytes that follow from settings, wherever these stand: in a Buffer, or in a plan of what to rent.

No torch here, so that sizes are known at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from moonep.policy import Balanced, Capacity, Policy

__all__ = ["ALIGN_BYTES", "Sizes", "align"]

ALIGN_BYTES = 64  # where memory that ranks exchange holds several things, each starts at a multiple of this
_FLOAT32_BYTES = 4
_INT32_BYTES = 4


def align(num_bytes: int) -> int:
    """Up to the next multiple of ALIGN_BYTES."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Sizes(ABC):
    """Every size that follows from the settings, which a subclass holds."""

    num_experts: int  # E
    top_k: int  # K
    hidden: int  # H
    max_tokens: int  # S
    policy: Policy
    transport: str
    expert_alignment: int
    combine_wire: str

    @property
    @abstractmethod
    def element_bytes(self) -> int:
        """One element of a row."""

    @property
    def row_bytes(self) -> int:
        """One row in the payload dtype."""
        return self.hidden * self.element_bytes

    @property
    def sum_bytes(self) -> int:
        """One partial sum as it crosses ranks."""
        return self.hidden * (self.element_bytes if self.payload_wire else _FLOAT32_BYTES)

    @property
    def payload_wire(self) -> bool:
        """Whether partial sums are rounded to the payload dtype before they cross."""
        return self.combine_wire == "payload"

    @property
    def token_scalars_bytes(self) -> int:
        """One float32 per route of a token."""
        return self.top_k * _FLOAT32_BYTES

    @property
    def counts_bytes(self) -> int:
        """One count per expert, as planning exchanges it."""
        return self.num_experts * _INT32_BYTES

    @property
    def ids_bytes(self) -> int:
        """The ids of `max_tokens` tokens, as planning exchanges them."""
        return self.max_tokens * self.top_k * _INT32_BYTES

    @property
    def weights_bytes(self) -> int:
        """The weights that planning exchanges, where the policy ranks routes by them."""
        return self.max_tokens * self.token_scalars_bytes if isinstance(self.policy, Capacity) else 0

    @property
    def plan_bytes(self) -> int:
        """All that a rank tells the others in planning: counts, ids, weights, one behind the other."""
        return self.counts_bytes + self.ids_bytes + self.weights_bytes

    def staging_bytes(self, num_ranks: int) -> int:
        """One of a rank's two staging halves in shared memory.

        Tokens pass through it in chunks, so it does not grow with `max_tokens` times `hidden`; it is as large as
        still fits the caches, and never less than one token of each kind or the ids of a whole plan.
        """
        one_token = num_ranks * (max(self.row_bytes, self.sum_bytes) + self.token_scalars_bytes + 2 * ALIGN_BYTES)
        return max(num_ranks * 2**20, one_token, self.plan_bytes)

    def step_rows(self, num_ranks: int) -> int:
        """The rows that a rank receives in a full step: under Home when the load is even, otherwise always."""
        if isinstance(self.policy, Capacity):
            tokens = num_ranks * self.max_tokens
            return -(-self.num_experts // num_ranks) * self.policy.rows_per_expert(
                tokens, self.top_k, self.num_experts, self.expert_alignment
            )
        if isinstance(self.policy, Balanced):
            return self.policy.rows_per_rank(
                num_ranks * self.max_tokens, self.top_k, self.num_experts, num_ranks, self.expert_alignment
            )
        return self.max_tokens * self.top_k

    def step_bytes(self, num_ranks: int) -> int:
        """What a full step holds at once on a rank: the rows received, and the experts' results."""
        return 2 * self.step_rows(num_ranks) * self.row_bytes

    def shared_bytes(self, num_ranks: int) -> int:
        """A rank's staging for two phases; 0 where there are no peers to share it with."""
        shares = num_ranks > 1 and self.transport in ("auto", "shm")
        return 2 * self.staging_bytes(num_ranks) if shares else 0

    def rank_bytes(self, num_ranks: int) -> int:
        """All that a rank needs: staging, and a step."""
        return self.shared_bytes(num_ranks) + self.step_bytes(num_ranks)
