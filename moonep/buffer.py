"""Buffer: lifetime, order of calls, and the verbs."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
import torch.distributed as dist

from moonep import autograd, checks
from moonep.config import BufferConfig
from moonep.errors import BufferClosedError, ForeignPlanError
from moonep.plan import Plan, Received, first_expert
from moonep.policy import Capacity, Home, Policy
from moonep.transport import connect
from moonep.transport.base import Agreed, Call, Collected, Spread, Transport
from moonep.transport.group import Group

__all__ = ["Buffer"]

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT_TIMEOUT_SECS = 60.0

_Checked = TypeVar("_Checked")
_Result = TypeVar("_Result")


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
        policy: where rows may go: `Home()` or `Capacity(factor)`.
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
            self._calls = _Calls(self._group, connect(self.config, self._group))
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

    def plan(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None = None) -> Plan:
        """Decides where every route goes. Collective.

        Args:
            topk_idx: [T, K] int32 or int64, any strides; the experts of each token, -1 for no route.
            topk_weights: [T, K]; `Capacity` drops the routes with the lowest. From all ranks or none.

        Returns:
            The Plan, good for any number of dispatches and combines until the Buffer is closed.
        """

        def check() -> tuple[torch.Tensor, torch.Tensor | None]:
            idx = checks.check_idx(topk_idx, self.config)
            if topk_weights is None:
                return idx, None
            checks.check_weights("topk_weights", topk_weights, tuple(idx.shape), idx.device)
            if not isinstance(self.config.policy, Capacity):
                return idx, None
            return idx, topk_weights.detach().to(torch.float32).cpu().contiguous()

        return self._calls.plan(*self._calls.checked("plan", check))

    def dispatch(self, x: torch.Tensor, plan: Plan, topk_weights: torch.Tensor | None = None) -> Received:
        """Carries tokens to their experts' ranks. Collective and differentiable.

        Args:
            x: [T, H] in the Buffer's dtype; may be a view with any strides.
            plan: of this Buffer.
            topk_weights: [T, K], any floating dtype; None: 1 for every route.

        Returns:
            Received: x [N, H], grouped by expert as the plan says, and weights [N] float32.
        """

        def check() -> tuple[torch.Tensor, torch.Tensor]:
            self._check_plan(plan)
            checks.check_rows("x", x, plan.num_tokens, "the plan's tokens x hidden", self.config)
            shape = (plan.num_tokens, self.config.top_k)
            if topk_weights is None:
                return x.contiguous(), torch.ones(shape, device=x.device)
            checks.check_weights("topk_weights", topk_weights, shape, x.device)
            return x.contiguous(), topk_weights.to(torch.float32).contiguous()

        dense_x, dense_weights = self._calls.checked("dispatch", check)
        return Received(*autograd.dispatch(self._calls, plan, dense_x, dense_weights))

    def combine(self, expert_out: torch.Tensor, plan: Plan, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Brings results home and sums them. Collective and differentiable.

        Sums are made in float32 in a fixed order (k ascending within a rank, ranks ascending within a host, hosts by
        their lowest rank) and rounded once, so runs repeat bit for bit.

        Args:
            expert_out: [N, H] in the Buffer's dtype, rows as `dispatch` gave them. Padding rows are not read.
            plan: of this Buffer.
            weights: [N], as `dispatch` gave them; None: the plain sum.

        Returns:
            [T, H]: for every token the weighted sum of its rows; zeros for a token without routes.
        """

        def check() -> tuple[torch.Tensor, torch.Tensor | None]:
            self._check_plan(plan)
            checks.check_rows("expert_out", expert_out, plan.num_rows, "the plan's rows x hidden", self.config)
            if weights is None:
                return expert_out.contiguous(), None
            checks.check_weights("weights", weights, (plan.num_rows,), expert_out.device)
            return expert_out.contiguous(), weights.to(torch.float32).contiguous()

        dense_rows, dense_weights = self._calls.checked("combine", check)
        return autograd.combine(self._calls, plan, dense_rows, dense_weights)

    def replicate(self, plan: Plan, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The weights of the plan's groups: [G, ...] for every [L, ...]. Under `Home` groups are the home experts.

        Local, because `Home` has no replicas: gives the tensors it was given.
        """
        self._calls.check_open("replicate")
        self._check_plan(plan)
        checks.check_tensors(tensors, self.num_local_experts)
        return tensors

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

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a moonep Plan, got {type(plan).__name__}")
        if plan not in self._calls.plans:  # also not a changed copy of one
            raise ForeignPlanError("plan: expected a plan of this Buffer, got one that another Buffer (or nobody) made")


_CPU = torch.device("cpu")


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


class _Calls:
    """The order of calls: every exchange is numbered, opens with a header, and ends the Buffer when it fails.

    Transports move rows in host memory; tensors of a GPU are copied there and back.
    """

    def __init__(self, group: Group, transport: Transport):
        self.transport = transport
        self.closed = ""  # why
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._edges: weakref.WeakKeyDictionary[Plan, torch.Tensor] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # re-entered by a signal handler that closes
        self._inside = 0  # verbs at work
        self._group = group
        self._pid = os.getpid()
        self._sequence = 0

    def checked(self, verb: str, check: Callable[[], _Checked]) -> _Checked:
        """What `check` gives. When it finds fault with the arguments, tells all ranks, and all raise."""
        self.check_open(verb)
        try:
            return check()
        except Exception as error:
            self._run(Call(verb, problem=error), self.transport.agree)
            raise AssertionError("a call with a problem was agreed to") from error

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        call = Call("plan", num_tokens=topk_idx.shape[0], ranked=weights is not None)
        plan = self._run(call, lambda call: self.transport.plan(call, topk_idx, weights))
        plan = dataclasses.replace(plan, plan_id=self._sequence)
        self.plans.add(plan)
        return plan

    def run_dispatch(self, plan: Plan, x: torch.Tensor, topk_weights: torch.Tensor, needs_grad: bool) -> Spread:
        call = self._call("dispatch", plan, needs_grad)
        spread = self._run(call, lambda call: self.transport.spread(call, plan, x.cpu(), topk_weights.cpu()))
        return Spread(spread.rows.to(x.device), _to(spread.scalars, x.device), spread.agreement)

    def run_combine(
        self, plan: Plan, rows: torch.Tensor, row_weights: torch.Tensor | None, needs_grad: bool
    ) -> Collected:
        call = self._call("combine", plan, needs_grad)
        saved = [tensor for tensor in (rows, row_weights) if tensor is not None]
        call.without_graph |= any(tensor.is_inference() for tensor in saved)  # they could not be saved
        weights = _to(row_weights, _CPU)
        collected = self._run(call, lambda call: self.transport.collect(call, plan, rows.cpu(), weights, None))
        return Collected(collected.sums.to(rows.device), None, collected.agreement)

    def run_dispatch_backward(self, plan: Plan, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> Collected:
        call = self._call("dispatch's backward", plan)
        rows, scalars = grad_rows.contiguous().cpu(), grad_weights.contiguous().cpu()
        collected = self._run(call, lambda call: self.transport.collect(call, plan, rows, None, scalars))
        device = grad_rows.device
        return Collected(collected.sums.to(device), _to(collected.scalars, device), collected.agreement)

    def run_combine_backward(
        self, plan: Plan, grad_y: torch.Tensor, row_weights: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Spread:
        call, dense = self._call("combine's backward", plan), grad_y.contiguous().cpu()
        weights, other = _to(row_weights, _CPU), _to(rows, _CPU)
        spread = self._run(call, lambda call: self.transport.spread_scaled(call, plan, dense, weights, other))
        return Spread(spread.rows.to(grad_y.device), _to(spread.scalars, grad_y.device), spread.agreement)

    def keep_edge(self, plan: Plan, edge: torch.Tensor | None) -> None:
        if edge is None:
            self._edges.pop(plan, None)
        else:
            self._edges[plan] = edge

    def edge_of(self, plan: Plan) -> torch.Tensor:
        edge = self._edges.get(plan)
        return torch.empty(0, requires_grad=True) if edge is None else edge

    def _call(self, verb: str, plan: Plan, needs_grad: bool = False) -> Call:
        return Call(
            verb,
            num_tokens=plan.num_tokens,
            plan_id=plan.plan_id,
            needs_grad=needs_grad,
            without_graph=torch.is_inference_mode_enabled(),
        )

    def _run(self, call: Call, move: Callable[[Call], _Result]) -> _Result:
        with self._lock:
            self.check_open(call.verb)
            self._inside += 1
        call.sequence, call.buffer_number = self._sequence, self._group.number
        try:
            result = move(call)
            self._sequence += 1  # only what every rank went through counts
            return result
        except Agreed as agreed:  # every rank raises it, and nothing has moved: the Buffer stays usable
            raise agreed.error from None
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        finally:
            with self._lock:
                self._inside -= 1
                self._give_back_if_done()

    def check_open(self, verb: str) -> None:
        """Raises BufferClosedError: this Buffer is closed, or belongs to the process that this one was forked from."""
        if self.closed:
            raise BufferClosedError(
                f"{verb}: {self._group.names[self._group.rank]}: the Buffer is closed: {self.closed}"
            )
        if os.getpid() != self._pid:
            raise BufferClosedError(
                f"{verb}: the Buffer belongs to process {self._pid}; a forked child ({os.getpid()}) must make its own"
            )

    def close(self, why: str) -> None:
        """Also from a signal handler or another thread: a verb at work is told, and gives all back as it ends."""
        with self._lock:
            if self.closed or os.getpid() != self._pid:
                return
            self.closed = why
            self.transport.cancel()
            self._give_back_if_done()

    def _give_back_if_done(self) -> None:
        if self.closed and not self._inside:
            self.transport.close()
            self._group.close()
