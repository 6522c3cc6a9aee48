"""How rows cross ranks: one module per transport, chosen when a Buffer is made."""

from __future__ import annotations

from dataclasses import asdict

from moonep import machine
from moonep.checks import check_config, check_fits
from moonep.config import BufferConfig
from moonep.errors import ConfigMismatchError
from moonep.transport.base import Transport
from moonep.transport.collective import CollectiveTransport
from moonep.transport.group import Group
from moonep.transport.local import LocalTransport
from moonep.transport.shm import connect_shm

__all__ = ["connect"]

_MAKING = "making a Buffer"


def connect(config: BufferConfig, group: Group) -> Transport:
    """The transport for `config`, after all ranks agreed on the settings. Collective.

    Raises the same error on every rank: ValueError or TypeError for settings that cannot work (the lowest such
    rank's), ConfigMismatchError for settings that differ, before anything is allocated.
    """
    group.meet()
    _raise_first_problem(group, lambda: check_config(config, group.num_ranks))
    _check_same_settings(config, group)
    _raise_first_problem(
        group, lambda: check_fits(config, group.num_ranks, group.ranks_here, machine.memory_available_bytes())
    )
    if group.num_ranks == 1:
        return LocalTransport(config, group)
    if config.transport in ("auto", "shm"):
        transport, refused = connect_shm(config, group, config.staging_bytes(group.num_ranks))
        if transport is not None:
            return transport
        if config.transport == "shm":
            raise ValueError(f"transport: 'shm' cannot be used: {refused}; 'auto' or 'collective' can")
    return CollectiveTransport(config, group)


def _raise_first_problem(group: Group, check: object) -> None:
    problem: Exception | None = None
    try:
        check()  # type: ignore[operator]
    except Exception as error:
        problem = error
    mine = {"kind": type(problem).__name__ if problem else "", "text": str(problem or "")}
    for name, record in zip(group.names, group.gather_records(mine, _MAKING), strict=True):
        if record["kind"]:
            kind = TypeError if record["kind"] == "TypeError" else ValueError
            raise kind(f"{_MAKING}: {name}: {record['text']}")


def _check_same_settings(config: BufferConfig, group: Group) -> None:
    settings = {name: str(value) for name, value in asdict(config).items() if name != "timeout_secs"} | {
        "policy": repr(config.policy),
        "timeout_secs": str(float(config.timeout_secs)),
    }
    records = group.gather_records(settings, _MAKING)
    for field in settings:
        values = [record[field] for record in records]
        if len(set(values)) > 1:
            said = ", ".join(f"{name} {value}" for name, value in zip(group.names, values, strict=True))
            raise ConfigMismatchError(f"{_MAKING}: ranks differ in {field}: {said}")
