"""Buffer: lifetime, order of calls, and the verbs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist

from moonep import autograd, checks, ops
from moonep.calls import Calls, Handle
from moonep.config import BufferConfig
from moonep.errors import ForeignPlanError, StaleViewError
from moonep.plan import Plan, Received, first_expert
from moonep.policy import Capacity, Home, Policy
from moonep.transport import connect
from moonep.transport.group import Group

__all__ = ["Buffer"]

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT_TIMEOUT_SECS = 60.0


class Buffer:
    """Carries the tokens of one MoE layer shape to the experts of a group of ranks, and their results home.

    Making one is collective, and so are `plan`, `dispatch` and `combine`: all ranks of the group call them in the
    same order. A bad argument on one rank raises on all of them and leaves the Buffer usable; a lost or late peer
    closes it. Several Buffers may be alive. One Buffer serves any number of layers of the same shape.

    Args:
        group: a torch.distributed group, also a subgroup; None: the default group, or one process alone when
            torch.distributed is not initialised.
        num_experts: E, in all ranks together. Homes are contiguous blocks; the first E mod R ranks hold one more.
        top_k: K, experts per token.
        hidden: H, the width of a row.
        max_tokens: S, the most tokens that a rank may pass in one call.
        dtype: of the rows: bfloat16, float16 or float32.
        policy: where rows may go: `Home()`, `Capacity(factor)` or `Balanced(slack)`.
        transport: "auto", "local" (one rank), "shm" (ranks of one machine) or "collective" (any group).
        expert_alignment: every expert's rows are padded to a multiple of this many.
        combine_wire: how a rank's sum for a token crosses to its home: "float32", or "payload": rounded to `dtype`
            first, half the bytes for the 16-bit ones. Either way results are the same on every transport.
        timeout_secs: how long to wait for a peer, in seconds.

    Raises:
        ValueError, TypeError: a setting that cannot work, or does not fit this machine's memory.
        ConfigMismatchError: ranks passed different settings.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        policy: Policy = Home(),  # noqa: B008 (frozen)
        transport: str = "auto",
        expert_alignment: int = 1,
        combine_wire: str = "float32",
        timeout_secs: float = _DEFAULT_TIMEOUT_SECS,
    ):
        self.config = BufferConfig(
            num_experts,
            top_k,
            hidden,
            max_tokens,
            dtype,
            policy,
            transport,
            expert_alignment,
            combine_wire,
            timeout_secs,
        )
        # Settings are checked by all ranks together, so for that, too, there must be a time limit.
        limit_secs = timeout_secs if checks.is_time_limit(timeout_secs) else _DEFAULT_TIMEOUT_SECS
        self._group = Group(Group.resolve(group), limit_secs)
        try:
            self._calls = Calls(self.config, self._group, connect(self.config, self._group))
        except BaseException:
            self._group.close()
            raise

    # ---- what it is ----

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        """R, the ranks of the group."""
        return self._group.num_ranks

    @property
    def first_local_expert(self) -> int:
        """The first expert at home here."""
        return first_expert(self.rank, self.config.num_experts, self.num_ranks)

    @property
    def num_local_experts(self) -> int:
        """L, how many experts are at home here."""
        return first_expert(self.rank + 1, self.config.num_experts, self.num_ranks) - self.first_local_expert

    @property
    def transport(self) -> str:
        """The transport in use: "local", "shm" or "collective"."""
        return self._calls.transport.name

    def __repr__(self) -> str:
        state = f", closed: {self._calls.closed}" if self._calls.closed else ""
        return f"Buffer(rank {self.rank} of {self.num_ranks}, {self.transport}, {self.config}{state})"

    # ---- the verbs ----

    def plan(
        self,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_tokens_per_rank: Sequence[int] | None = None,
    ) -> Plan:
        """Decides where every route goes. Collective.

        Args:
            topk_idx: [T, K] int32 or int64, any strides; the experts of each token, -1 for no route.
            topk_weights: [T, K]; `Capacity` drops the routes with the lowest. From all ranks or none.
            num_tokens_per_rank: T of every rank, where the caller knows them. On CPUs they cross with the counts
                anyway, so this rank's own is checked and nothing else gained.

        Returns:
            The Plan, good for any number of dispatches and combines until the Buffer is closed.
        """

        if torch.compiler.is_compiling():
            made: Plan = _uncompiled("plan")(self, topk_idx, topk_weights, num_tokens_per_rank=num_tokens_per_rank)
            return made

        def check() -> tuple[torch.Tensor, torch.Tensor | None]:
            idx = checks.check_idx(topk_idx, self.config)
            if num_tokens_per_rank is not None:
                checks.check_num_tokens(num_tokens_per_rank, idx.shape[0], self.rank, self.num_ranks)
            if topk_weights is None:
                return idx, None
            checks.check_weights("topk_weights", topk_weights, tuple(idx.shape), idx.device)
            if not isinstance(self.config.policy, Capacity):
                return idx, None
            return idx, topk_weights.detach().to(torch.float32).cpu().contiguous().resolve_neg()

        idx, weights = self._calls.checked("plan", check)
        return self._calls.plan(idx, weights)

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        plan: Plan,
        topk_weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: Literal[False] = False,
    ) -> Received: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        plan: Plan,
        topk_weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: Literal[True],
    ) -> Handle[Received]: ...

    def dispatch(
        self,
        x: torch.Tensor,
        plan: Plan,
        topk_weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: bool = False,
    ) -> Received | Handle[Received]:
        """Carries tokens to their experts' ranks. Collective and differentiable.

        Args:
            x: [T, H] in the Buffer's dtype; may be a view with any strides.
            plan: of this Buffer.
            topk_weights: [T, K], any floating dtype; None: 1 for every route.
            zero_copy: rows in memory of the transport, where it has some (shm): the next dispatch with zero_copy
                overwrites them. From then on Received.x, the verbs and a backward that saved them raise
                StaleViewError (autograd: its own error). The same on all ranks.
            async_op: give a handle at once, whose `wait()` gives the result. One operation is outstanding per
                Buffer: any other verb completes it first. Until then its inputs must stay as they are.

        Returns:
            Received: x [N, H], grouped by expert as the plan says, and weights [N] float32.
        """

        if torch.compiler.is_compiling():
            if zero_copy or async_op or not self._calls.owns(plan):
                received: Received = _uncompiled("dispatch")(
                    self, x, plan, topk_weights, zero_copy=zero_copy, async_op=async_op
                )
                return received
            return Received(*ops.dispatch(plan, x, topk_weights))

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            self._check_plan(plan)
            dense = checks.check_dispatch(x, topk_weights, plan.num_tokens, self.config)
            self._check_valid("x", x)
            return dense

        dense_x, dense_weights = self._calls.checked("dispatch", check)
        finish = autograd.dispatch(self._calls, plan, dense_x, dense_weights, async_op=async_op, zero_copy=zero_copy)

        def received_rows() -> Received:
            rows, row_weights = finish()
            return _Lent(rows, row_weights, self) if zero_copy else Received(rows, row_weights)

        return Handle(received_rows) if async_op else received_rows()

    @overload
    def combine(
        self,
        expert_out: torch.Tensor,
        plan: Plan,
        weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        expert_out: torch.Tensor,
        plan: Plan,
        weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: Literal[True],
    ) -> Handle[torch.Tensor]: ...

    def combine(
        self,
        expert_out: torch.Tensor,
        plan: Plan,
        weights: torch.Tensor | None = None,
        *,
        zero_copy: bool = False,
        async_op: bool = False,
    ) -> torch.Tensor | Handle[torch.Tensor]:
        """Brings results home and sums them. Collective and differentiable.

        Sums are made in float32 in a fixed order (k ascending within a rank, ranks ascending within a host, hosts by
        their lowest rank) and rounded once, so runs repeat bit for bit.

        Args:
            expert_out: [N, H] in the Buffer's dtype, rows as `dispatch` gave them. Padding rows are not read.
            plan: of this Buffer.
            weights: [N], as `dispatch` gave them; None: the plain sum, of rows of the plan's last dispatch.
            zero_copy: when `expert_out` of all ranks is what `dispatch` with zero_copy gave (changed in place, as by
                experts that write there), homes read it where it is. The same on all ranks.
            async_op: give a handle at once, as in `dispatch`.

        Returns:
            [T, H]: for every token the weighted sum of its rows; zeros for a token without routes.
        """

        if torch.compiler.is_compiling():
            if zero_copy or async_op or not self._calls.owns(plan):
                y: torch.Tensor = _uncompiled("combine")(
                    self, expert_out, plan, weights, zero_copy=zero_copy, async_op=async_op
                )
                return y
            return ops.combine(plan, expert_out, weights)

        def check() -> tuple[torch.Tensor, torch.Tensor | None]:
            self._check_plan(plan)
            dense = checks.check_combine(expert_out, weights, plan.num_rows, self.config)
            self._check_valid("expert_out", expert_out)
            return dense

        dense_rows, dense_weights = self._calls.checked("combine", check)
        finish = autograd.combine(self._calls, plan, dense_rows, dense_weights, async_op=async_op, zero_copy=zero_copy)
        return Handle(finish) if async_op else finish()

    def replicate(self, plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The weights of the plan's groups: [G, ...] for every [L, ...]. Collective and differentiable.

        Home experts first, then what this step's replicas need; idle slots hold anything. Gradients of all instances
        of an expert are added at its home in float32 (the home's, then those of its replicas by rank), rounded once.

        Under `Home` and `Capacity` there are no slots, G is L, and this gives the tensors that it was given. Under
        `Balanced` it copies them (see `replicate_apart`). In a step without any replica, nothing crosses.

        Args:
            plan: of this Buffer.
            tensors: [L, ...], of any dtype, the experts at home here; the same number, dtypes, shapes beyond L and
                `requires_grad` on all ranks.
        """
        pairs = self.replicate_apart(plan, *tensors)
        if not plan.replicas.shape[1]:
            return tuple(home for home, _ in pairs)
        wholes = []
        for home, slots in pairs:
            idle = home.new_empty(plan.num_groups - len(home) - len(slots), *home.shape[1:])
            wholes.append(torch.cat([home, slots, idle]))
        return tuple(wholes)

    def replicate_apart(self, plan: Plan, *tensors: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """As `replicate`, without a copy of what is at home: for every [L, ...], itself and the slots in use [U, ...].

        The weights of group g are in the first for g < L, in the second for g - L < U; the other groups are idle. Both
        must be used as they come from here: only so gradients of all instances of an expert meet.
        """

        def check() -> None:
            self._check_plan(plan)
            checks.check_tensors(tensors, self.num_local_experts)

        if torch.compiler.is_compiling() and (plan.replicas.shape[1] or not self._calls.owns(plan)):
            pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...] = _uncompiled("replicate_apart")(self, plan, *tensors)
            return pairs
        if not torch.compiler.is_compiling():
            self._calls.checked("replicate", check)
        if not plan.replicas.shape[1]:
            return tuple((tensor, tensor[:0]) for tensor in tensors)
        return tuple(zip(*autograd.replicate(self._calls, plan, tensors), strict=True))

    # ---- lifetime ----

    def close(self) -> None:
        """Gives everything back. Local, never waits, may be called again; later verbs raise BufferClosedError.

        Peers that are still in a verb of this Buffer raise TransportError, unless this rank has done its part.
        """
        self._calls.close("close() was called")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copied module shares the Buffer: it holds no parameters, and making one would be collective."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a moonep.Buffer cannot be pickled: it belongs to its process and its group; leave it out of the module's "
            "state (__getstate__) and make a new one after loading"
        )

    def _check_valid(self, name: str, rows: torch.Tensor) -> None:
        if self._calls.transport.is_stale(rows):
            raise StaleViewError(
                f"{name}: these rows of a dispatch with zero_copy were overwritten by the next; clone() what must last"
            )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a moonep Plan, got {type(plan).__name__}")
        if plan not in self._calls.plans:  # also not a changed copy of one
            raise ForeignPlanError("plan: expected a plan of this Buffer, got one that another Buffer (or nobody) made")


class _Lent(Received):
    """Received in memory of the transport."""

    def __init__(self, x: torch.Tensor, weights: torch.Tensor, ep: Buffer):
        object.__setattr__(self, "_rows", x)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "_ep", ep)

    @property
    def x(self) -> torch.Tensor:
        """The rows, while they are valid."""
        rows: torch.Tensor = self._rows  # type: ignore[attr-defined]
        self._ep._check_valid("Received.x", rows)  # type: ignore[attr-defined]
        return rows


_UNCOMPILED: dict[str, Any] = {}


def _uncompiled(verb: str) -> Any:
    """A verb of Buffer into which torch.compile does not look. Made when it is there already: it is slow to load."""
    if verb not in _UNCOMPILED:
        _UNCOMPILED[verb] = torch.compiler.disable(getattr(Buffer, verb))  # type: ignore[no-untyped-call]
    return _UNCOMPILED[verb]
