"""What the options of `moonep plan` mean."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from moonep.policy import Balanced, Capacity, Home, Policy
from moonep.sizing.hardware import ACCELERATORS, FABRICS, Hardware, from_doctor
from moonep.sizing.models import MODELS, Model
from moonep.sizing.report import Cluster, Report, examine
from moonep.sizing.routing import Lognormal, Recorded, Routing
from moonep.sizing.setting import Setting
from moonep.trace import Trace, load_trace

__all__ = ["Asked", "ask"]

_DEFAULT_MODEL, _DEFAULT_MAXVIO, _DEFAULT_RANKS_PER_HOST = "kimi-k3", 1.0, 8
_MOST_ROUTES = 2**31 - 1  # of all ranks in a step, as row numbers go


@dataclass(frozen=True)
class Asked:
    """A question, complete."""

    setting: Setting
    policies: list[Policy]
    routings: list[Routing]
    cluster: Cluster
    drop_share: float

    def report(self) -> Report:
        """The answer."""
        return examine(self.setting, self.policies, self.routings, self.cluster, self.drop_share)


def ask(
    *,
    model: str | None,
    experts: int | None,
    topk: int | None,
    hidden: int | None,
    width: int | None,
    layers: int | None,
    tokens: int,
    ranks: int,
    ranks_per_host: int | None,
    dtype: str,
    weight_dtype: str,
    combine_wire: str,
    alignment: int,
    policies: tuple[str, ...],
    factor: float,
    slack: float,
    max_replicas: int | None,
    maxvio: tuple[float, ...],
    trace: str | None,
    drop: float,
    training: bool,
    recompute: bool,
    optimizer_bytes: int,
    memory_gib: float | None,
    machine: str | None,
    doctor: str | None,
    fabric: str,
    tflops: float | None,
) -> Asked:
    """The question that the command line's options ask.

    Raises:
        ValueError: options that contradict each other, or a file that is not what it should be.
        OSError: a file that cannot be read.
    """
    if trace is not None and maxvio:
        raise ValueError("--trace and --maxvio: routing comes from one or the other")
    if (recompute or optimizer_bytes) and not training:
        raise ValueError("--recompute and --optimizer-bytes are for --training")
    if machine is not None and doctor is not None:
        raise ValueError("--machine and --doctor: rates come from one or the other")
    recorded = None if trace is None else load_trace(trace)
    shape = _model(model, experts, topk, hidden, width, layers, recorded)
    hardware = _hardware(machine, doctor, ranks_per_host or min(ranks, _DEFAULT_RANKS_PER_HOST), tflops)
    per_host = ranks_per_host or (hardware.ranks_per_host if hardware else _DEFAULT_RANKS_PER_HOST)
    known: dict[str, Policy] = {
        "home": Home(),
        "capacity": Capacity(factor),
        "balanced": Balanced(slack, max_replicas),
    }
    for name in policies:
        if name not in known:
            raise ValueError(f"--policy: expected some of {', '.join(known)}, got {name!r}")
    if ranks * tokens * shape.top_k + shape.num_experts * alignment > _MOST_ROUTES:
        raise ValueError(
            f"--tokens: {tokens} tokens x top-{shape.top_k} x {ranks} ranks make more rows than a step can have "
            f"({_MOST_ROUTES})"
        )
    setting = Setting(
        model=shape,
        num_ranks=ranks,
        ranks_per_host=per_host,
        max_tokens=tokens,
        policy=known[policies[0]],
        dtype=dtype,
        weight_dtype=weight_dtype,
        expert_alignment=alignment,
        combine_wire=combine_wire,
        training=training,
        recompute=recompute,
        optimizer_bytes=optimizer_bytes,
    )
    routings: list[Routing]
    if recorded is not None and trace is not None:
        routings = [Recorded(recorded, Path(trace).stem)]
    else:
        asked = maxvio or (min(_DEFAULT_MAXVIO, shape.num_experts / shape.top_k - 1),)
        effort = 1 / len(asked)  # so that a list takes no longer than one
        routings = [Lognormal(shape.num_experts, shape.top_k, each, effort=effort) for each in asked]
    memory_bytes = None if hardware is None else hardware.memory_bytes
    if memory_gib is not None:
        memory_bytes = int(memory_gib * 2**30)
    across = None if hardware is None else FABRICS[fabric]
    return Asked(
        setting,
        [known[name] for name in dict.fromkeys(policies)],
        routings,
        Cluster(hardware, across, memory_bytes),
        drop,
    )


def _model(
    name: str | None,
    experts: int | None,
    topk: int | None,
    hidden: int | None,
    width: int | None,
    layers: int | None,
    trace: Trace | None,
) -> Model:
    """A published shape, with what is given put in its place."""
    base = MODELS[name or _DEFAULT_MODEL]
    if trace is not None:
        if (experts or trace.num_experts, topk or trace.top_k) != (trace.num_experts, trace.top_k):
            raise ValueError(
                f"--trace: it has {trace.num_experts} experts and top-{trace.top_k}; leave --experts and --topk out"
            )
        if name is not None and (base.num_experts, base.top_k) != (trace.num_experts, trace.top_k):
            raise ValueError(
                f"--trace: it has {trace.num_experts} experts and top-{trace.top_k}, but {name} has "
                f"{base.num_experts} and top-{base.top_k}"
            )
        experts, topk = trace.num_experts, trace.top_k
    given = {"num_experts": experts, "top_k": topk, "hidden": hidden, "width": width, "layers": layers}
    changes = {field: value for field, value in given.items() if value is not None and value != getattr(base, field)}
    if not changes:
        return base
    model = replace(base, **changes, name=f"as {base.name}, changed", source="")  # type: ignore[arg-type]
    if model.top_k > model.num_experts:
        raise ValueError(f"--topk: expected at most the {model.num_experts} experts, got {model.top_k}")
    return model


def _hardware(machine: str | None, doctor: str | None, ranks_per_host: int, tflops: float | None) -> Hardware | None:
    if doctor is not None:
        try:
            hardware = from_doctor(json.loads(Path(doctor).read_text(encoding="utf-8")), ranks_per_host)
        except ValueError as error:
            raise ValueError(f"--doctor: {doctor}: {error}") from None
    elif machine is not None:
        hardware = ACCELERATORS[machine]
    elif tflops is not None:
        raise ValueError("--tflops: goes with --machine or --doctor")
    else:
        return None
    return hardware if tflops is None else replace(hardware, flops_per_sec=tflops * 1e12)
