"""The tensors of a module, and of its training, by name: each once, read and written one at a time."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def targets_of(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tensor once: a joint shell, which every block reaches, under its first name."""
    names: dict[Tensor, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor.detach() for tensor, name in names.items()}


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's tensors as they are saved: each once, under its first name."""
    return {name: tensor.contiguous() for name, tensor in targets_of(module).items()}


def kind_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def load_own_tensors(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """The inverse of `own_tensors`, as strict as `load_state_dict`; asks for one tensor at a time."""
    targets = {prefix + name: tensor for name, tensor in targets_of(module).items()}
    if targets.keys() != {name for name in tensors if name.startswith(prefix)}:
        raise ValueError("the names of the tensors aren't those of the module")
    copy_into(targets, tensors)


def copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        # copy_ would stretch it.
        if target.shape != sources[name].shape:
            raise ValueError(f"'{name}' is {kind_of(sources[name])}, not {kind_of(target)}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(sources[name])


def training_state(module: nn.Module, optimizer: Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    """Weights, optimizer states and EMA as one flat table of tensors."""
    tensors = {f"module/{name}": tensor for name, tensor in own_tensors(module).items()}
    for index, parameter in enumerate(_trained(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            # An optimizer with 8-bit states counts its steps with a Python int.
            tensors[f"optimizer/{index}/{key}"] = torch.as_tensor(value).detach().contiguous()
    if average is not None:
        tensors.update({f"average/{name}": tensor for name, tensor in own_tensors(average).items()})
    return tensors


def restore_training_state(
    tensors: Mapping[str, Tensor], module: nn.Module, optimizer: Optimizer, average: nn.Module | None
) -> None:
    """The inverse of `training_state`; holds one tensor at a time beside what it fills."""
    load_own_tensors(module, tensors, "module/")
    if average is not None:
        load_own_tensors(average, tensors, "average/")
    parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for name in tensors:
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            index, key = rest.split("/")
            group, parameter = parameters[int(index)]
            optimizer.state[parameter][key] = _optimizer_value(tensors[name], parameter, group)


def _optimizer_value(tensor: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor | int:
    if tensor.ndim == 0 and tensor.dtype == torch.int64:
        return int(tensor)
    # torch counts steps on the CPU unless the step runs as one kernel.
    beside = tensor.ndim or group.get("fused") or group.get("capturable")
    return tensor.to(parameter.device if beside else "cpu", copy=True)


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
