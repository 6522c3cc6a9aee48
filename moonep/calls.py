"""The order of a Buffer's calls: each exchange is numbered, opens with a header, and ends the Buffer when it fails."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from moonep import ops
from moonep.autograd import Edge
from moonep.config import BufferConfig
from moonep.errors import BufferClosedError, VerbMismatchError
from moonep.plan import Plan
from moonep.replicas import Replicas, digest
from moonep.transport.base import Agreed, Agreement, Call, Collected, Parcel, Spread, Transport
from moonep.transport.group import Group

__all__ = ["Calls", "Handle"]

_CPU = torch.device("cpu")

_Checked = TypeVar("_Checked")
_Result = TypeVar("_Result")


class Handle(Generic[_Result]):
    """A verb at work. Until `wait`, its inputs must stay as they are."""

    def __init__(self, finish: Callable[[], _Result]):
        self._finish = finish
        self._result: list[_Result] = []

    def wait(self) -> _Result:
        """What the verb gives, once it is done; raises what it met. May be called again."""
        if not self._result:
            self._result.append(self._finish())
        return self._result[0]


class Calls:
    """One Buffer's calls, one after the other.

    Transports move rows in host memory; tensors of a GPU are copied there and back.
    """

    def __init__(self, config: BufferConfig, group: Group, transport: Transport):
        self.config, self.transport = config, transport
        self.closed = ""  # why
        self.plans: weakref.WeakSet[Plan] = weakref.WeakSet()
        self._edges: weakref.WeakKeyDictionary[Plan, Edge] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # re-entered by a signal handler that closes
        self._inside = False  # a verb is at work
        self._group = group
        self._pid = os.getpid()
        self._sequence = 0
        self._worker: ThreadPoolExecutor | None = None  # runs what async_op asks for
        self._outstanding: Future[object] | None = None

    def checked(self, verb: str, check: Callable[[], _Checked]) -> _Checked:
        """What `check` gives. When it finds fault with the arguments, tells all ranks, and all raise."""
        self.check_open(verb)
        try:
            return check()
        except Exception as error:
            # On a thread of its own: torch.func's transforms, which may be what is wrong, stay on the caller's.
            self._start(Call(verb, problem=error), self.transport.agree, async_op=True)()
            raise AssertionError("a call with a problem was agreed to") from error

    def plan(self, topk_idx: torch.Tensor, weights: torch.Tensor | None) -> Plan:
        """The Plan of a routing [T, K]; `weights` rank routes for dropping."""
        call = Call("plan", num_tokens=topk_idx.shape[0], ranked=weights is not None)
        plan = self._run(call, lambda call: self.transport.plan(call, topk_idx, weights))
        plan = dataclasses.replace(plan, plan_id=self._sequence, buffer_number=self._group.number)
        plan = dataclasses.replace(plan, key=ops.key_of(self, plan))
        self.plans.add(plan)
        return plan

    def owns(self, plan: Plan) -> bool:
        """Whether a plan is of this Buffer, as far as torch.compile can tell."""
        return plan.buffer_number == self._group.number

    # ---- what autograd asks for (see autograd.Verbs) ----

    def start_dispatch(
        self,
        plan: Plan,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        needs_grad: bool,
        *,
        graph: bool = True,
        async_op: bool = False,
        zero_copy: bool = False,
    ) -> Callable[[], Spread]:
        call, here = self._call("dispatch", plan, needs_grad), x.device
        call.without_graph |= not graph
        call.zero_copy = zero_copy
        x, topk_weights = x.cpu(), topk_weights.cpu()
        result = self._start(call, lambda call: self.transport.spread(call, plan, x, topk_weights), async_op)
        return lambda: _spread_to(result(), here)

    def start_combine(
        self,
        plan: Plan,
        rows: torch.Tensor,
        row_weights: torch.Tensor | None,
        needs_grad: bool,
        *,
        graph: bool = True,
        async_op: bool = False,
        zero_copy: bool = False,
    ) -> Callable[[], Collected]:
        call, here = self._call("combine", plan, needs_grad), rows.device
        saved = [tensor for tensor in (rows, row_weights) if tensor is not None]
        call.zero_copy = zero_copy
        call.without_graph |= not graph or any(tensor.is_inference() for tensor in saved)  # they could not be saved
        rows, row_weights = rows.cpu(), _to(row_weights, _CPU)
        result = self._start(call, lambda call: self.transport.collect(call, plan, rows, row_weights, None), async_op)
        return lambda: _collected_to(result(), here)

    def run_dispatch_backward(self, plan: Plan, grad_rows: torch.Tensor, grad_weights: torch.Tensor) -> Collected:
        call = self._call("dispatch's backward", plan)
        rows, scalars = grad_rows.contiguous().resolve_neg().cpu(), grad_weights.contiguous().resolve_neg().cpu()
        collected = self._run(call, lambda call: self.transport.collect(call, plan, rows, None, scalars))
        return _collected_to(collected, grad_rows.device)

    def run_combine_backward(
        self, plan: Plan, grad_y: torch.Tensor, row_weights: torch.Tensor | None, rows: torch.Tensor | None
    ) -> Spread:
        call, dense = self._call("combine's backward", plan), grad_y.contiguous().resolve_neg().cpu()
        weights, other = _to(row_weights, _CPU), _to(rows, _CPU)
        spread = self._run(call, lambda call: self.transport.spread_scaled(call, plan, dense, weights, other))
        return _spread_to(spread, grad_y.device)

    def run_replicate(
        self, plan: Plan, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool], needs_grad: bool
    ) -> tuple[list[torch.Tensor], bool]:
        replicas = self._replicas(plan)
        slots = [self._empty_slots(tensor, replicas.num_used) for tensor in tensors]
        parcels = replicas.to_slots(tensors, slots)
        if not parcels:  # as all ranks see: nobody waits for anything
            return slots, needs_grad
        call = self._call("replicate", plan, needs_grad)
        call.digest = digest(tensors, differentiable)
        agreement = self._exchange(call, parcels)
        return slots, agreement.needs_grad

    def run_replicate_backward(
        self, plan: Plan, home_grads: Sequence[torch.Tensor], slot_grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        replicas = self._replicas(plan)
        parcels = replicas.gradients_home(slot_grads)
        if parcels:
            self._exchange(self._call("replicate's backward", plan), parcels)
        return replicas.sum_gradients(home_grads, parcels)

    def _empty_slots(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        shape = (count, *tensor.shape[1:])
        if tensor.device.type != "cpu":
            return tensor.new_empty(shape)
        return self.transport.memory.empty(shape, tensor.dtype)

    def _replicas(self, plan: Plan) -> Replicas:
        return Replicas(plan, self._group.rank, self.config.num_experts)

    def _exchange(self, call: Call, parcels: Sequence[Parcel]) -> Agreement:
        """Carries parcels; pieces of a GPU's memory by way of the host's."""
        through = [parcel._replace(pieces=[piece.cpu() for piece in parcel.pieces]) for parcel in parcels]
        agreement = self._run(call, lambda call: self.transport.exchange(call, through))
        for parcel, arrived in zip(parcels, through, strict=True):
            if self._group.rank in parcel.destinations:
                for piece, there in zip(parcel.pieces, arrived.pieces, strict=True):
                    if piece is not there:
                        piece.copy_(there)
        return agreement

    # ---- edges: what a plan's later verbs hang on; see autograd.py ----

    def edge_of(self, plan: Plan, *, of_replicate: bool = False, is_open: bool = False) -> torch.Tensor:
        left = self._edges.get(plan)
        if left is None or left.is_spent or (of_replicate and not left.of_replicate) or (is_open and not left.is_open):
            return torch.empty(0, requires_grad=True)
        return left.edge

    def keep_edge(self, plan: Plan, edge: Edge | None) -> None:
        if edge is None:
            self._edges.pop(plan, None)
        else:
            self._edges[plan] = edge

    def close_edge(self, plan: Plan) -> None:
        left = self._edges.get(plan)
        if left is not None:
            left.is_open = False

    def _call(self, verb: str, plan: Plan, needs_grad: bool = False) -> Call:
        return Call(
            verb,
            num_tokens=plan.num_tokens,
            plan_id=plan.plan_id,
            needs_grad=needs_grad,
            without_graph=torch.is_inference_mode_enabled(),
        )

    # ---- one after the other ----

    def _start(self, call: Call, move: Callable[[Call], _Result], async_op: bool) -> Callable[[], _Result]:
        """Runs a call, here and now or beside the caller. Returns what gives its result."""
        if not async_op:
            result = self._run(call, move)
            return lambda: result
        self._complete_outstanding()
        self.check_open(call.verb)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="moonep")
        threads = torch.get_num_threads()

        def beside() -> _Result:
            torch.set_num_threads(threads)  # torch counts per thread
            return self._perform(call, move)

        future = self._worker.submit(beside)
        self._outstanding = future  # type: ignore[assignment]
        return future.result

    def _run(self, call: Call, move: Callable[[Call], _Result]) -> _Result:
        self._complete_outstanding()
        return self._perform(call, move)

    def _complete_outstanding(self) -> None:
        """Waits for the call beside, if there is one; what it met is raised by its handle."""
        outstanding, self._outstanding = self._outstanding, None
        if outstanding is not None:
            outstanding.exception()

    def _perform(self, call: Call, move: Callable[[Call], _Result]) -> _Result:
        entered = False
        try:
            with self._lock:
                self.check_open(call.verb)
                if self._inside:
                    raise VerbMismatchError(
                        f"{call.verb}: {self._group.names[self._group.rank]}: another thread is in a verb of this "
                        "Buffer; ranks could not tell whose turn it is"
                    )
                self._inside = entered = True
            call.sequence, call.buffer_number = self._sequence, self._group.number
            result = move(call)
            self._sequence += 1  # only what every rank went through counts
            return result
        except Agreed as agreed:  # every rank raises it, and nothing has moved: the Buffer stays usable
            raise agreed.error from None
        except BaseException as error:
            if entered:
                self.close(f"{type(error).__name__}: {error}")
            raise
        finally:
            if entered:
                with self._lock:
                    self._inside = False
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
            if self._worker is not None:
                self._worker.shutdown(wait=False)
            self._give_back_if_done()

    def _give_back_if_done(self) -> None:
        if self.closed and not self._inside:
            self.transport.close()
            self._group.close()


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _spread_to(spread: Spread, device: torch.device) -> Spread:
    return Spread(spread.rows.to(device), _to(spread.scalars, device), spread.agreement)


def _collected_to(collected: Collected, device: torch.device) -> Collected:
    return Collected(collected.sums.to(device), _to(collected.scalars, device), collected.agreement)
