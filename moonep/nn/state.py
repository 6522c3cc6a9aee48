"""Saving and loading across numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moonep.nn.experts import Experts

__all__ = ["ModelState"]


class ModelState:
    """A model with `Experts`, and its optimizers, as torch.distributed.checkpoint saves and loads them.

        dcp.save({"train": ModelState(model, optimizer)}, checkpoint_id=directory)
        dcp.load({"train": ModelState(model, optimizer)}, checkpoint_id=directory)   # on any number of ranks

    Every expert has entries of its own, named by its id: the tensor "experts.w_down" [L, ...] of this rank becomes
    {"0": [...], "1": [...]}, likewise what an optimizer keeps of it. They are views, so loading writes into the model.
    Everything else is as torch.distributed.checkpoint.state_dict gives it; FSDP may shard what is not an expert.

    Entries rather than shards of one tensor [E, ...]: DTensor cuts 5 experts for 4 ranks into 2, 2, 1, 0 where homes
    are 2, 1, 1, 1, and ShardedTensor, which could, is deprecated. An entry costs its rank about a millisecond.

    Args:
        model: may be wrapped, say in DDP.
        optimizers: one, several, or none: then the model alone is saved or loaded, also from where both are.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer):
        self._model, self._optimizers = model, optimizers
        self._experts = dict(_expert_parameters(model))

    def state_dict(self) -> dict[str, Any]:
        """{"model": ..., "optimizers": ...}, nested, with an entry per home expert. Initialises the optimizers."""
        return self._split(self._whole())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, here or elsewhere: it must hold all of this rank's home experts.

        Raises:
            KeyError: an entry is missing.
            ValueError: an expert has another shape.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        whole = self._whole()
        self._join(whole, state_dict)
        set_model_state_dict(self._model, whole["model"])
        if self._optimizers:
            set_optimizer_state_dict(self._model, self._optimizers, whole["optimizers"])

    def _whole(self) -> dict[str, Any]:
        # Takes a second to import.
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        whole: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        if self._optimizers:
            whole["optimizers"] = get_optimizer_state_dict(self._model, self._optimizers)
        return whole

    def _split(self, state: dict[str, Any], experts: range | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in state.items():
            inside = self._experts.get(name, experts)
            if isinstance(value, dict):
                found[name] = self._split(value, inside)
            elif not _is_by_expert(value, inside):
                found[name] = value
            elif inside:  # a rank without experts has no entry at all
                found[name] = {str(e): part for e, part in zip(inside, value.detach().unbind(), strict=True)}
        return found

    def _join(self, state: dict[str, Any], split: dict[str, Any], experts: range | None = None) -> None:
        """Writes `split` into `state`, which is as `_split` was given it; experts in place."""
        for name, value in state.items():
            inside = self._experts.get(name, experts)
            if isinstance(value, dict):
                self._join(value, split.get(name, {}), inside)  # empty ones get lost in files
            elif not _is_by_expert(value, inside):
                state[name] = split[name]
            elif inside:
                for expert, part in zip(inside, value.detach().unbind(), strict=True):
                    loaded = split[name][str(expert)]
                    if loaded.shape != part.shape:
                        raise ValueError(
                            f"{name}.{expert}: expected shape {list(part.shape)}, got {list(loaded.shape)}"
                        )
                    part.copy_(loaded)


def _is_by_expert(value: object, experts: range | None) -> bool:
    """Whether this is a tensor [L, ...] of experts; an optimizer's "step" is not."""
    return (
        experts is not None and isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == len(experts)
    )


# What wrappers put into names, and torch.distributed.checkpoint takes out again.
_WRAPPERS = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


def _expert_parameters(model: nn.Module) -> Iterator[tuple[str, range]]:
    """The names of all parameters of Experts in torch.distributed.checkpoint, with the ids of the home experts."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            first = module.ep.first_local_expert
            for name, _ in module.named_parameters():
                plain = _plain_name(model, f"{path}.{name}" if path else name)
                yield plain, range(first, first + module.ep.num_local_experts)


def _plain_name(model: nn.Module, path: str) -> str:
    kept = []
    inside: Any = model
    for part in path.split("."):
        if part not in _WRAPPERS and not isinstance(inside, nn.parallel.DistributedDataParallel):
            kept.append(part)
        inside = getattr(inside, part)
    return ".".join(kept)
