"""Training memory counted exactly: the bytes of every live tensor, by kind, at the moment when their sum is largest.

Counted are tensor storages (each once, however many views it has) as torch's dispatcher creates them and Python or
autograd lets them go. Scratch space inside a fused kernel, the allocator's rounding and the interpreter are not.

    parameters   weights and buffers of the network          optimizer    its states, and the EMA's weights
    gradients    of the parameters                           activations  everything else that is alive
"""

import gc
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

KINDS = ("parameters", "gradients", "optimizer", "activations")


def show_bytes(n: int) -> str:
    """A number of bytes for a reader, e.g. 1.25 GiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return f"{n / 2**10:.1f} KiB"


class MemoryMeter(TorchDispatchMode):
    """Context manager around training steps; `peak` holds the bytes by kind at the highest moment.

    Use: `meter.watch(module, optimizer)`, then train inside `with meter:`. Tensors that already live when the context
    is entered are counted too, so a block that should have been freed shows. Enter it after a first step, when the
    optimizer's states exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: dict[str, int] = dict.fromkeys([*KINDS, "total"], 0)
        #: What the CUDA allocator says of the same steps: bytes `allocated` and `reserved`; None without CUDA.
        self.device_peak: dict[str, int] | None = None
        self._live = dict.fromkeys(KINDS, 0)
        self._kind_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._finalizers: list[weakref.finalize[..., Any]] = []
        self._hooks: list[Any] = []
        self._watched: list[tuple[nn.Module, Optimizer, nn.Module | None]] = []

    def watch(self, module: nn.Module, optimizer: Optimizer, average: nn.Module | None = None) -> None:
        """Names the network, its optimizer and its EMA, so that their bytes are counted under their kinds."""
        self._watched.append((module, optimizer, average))

    def __enter__(self) -> "MemoryMeter":
        for module, optimizer, average in self._watched:
            self._count("parameters", [*module.parameters(), *module.buffers()])
            self._count("optimizer", tree_iter(list(optimizer.state.values())))
            if average is not None:
                self._count("optimizer", [*average.parameters(), *average.buffers()])
            for parameter in module.parameters():
                self._count("gradients", [parameter.grad])
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
            self._hooks.append(optimizer.register_step_post_hook(self._on_step))
        self._count("activations", self._leftovers())
        self._raise_peak()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        super().__enter__()
        return self

    def _leftovers(self) -> Iterable[Any]:
        """Every tensor that already lives, whoever holds it."""
        gc.collect()
        return (found for found in gc.get_objects() if issubclass(type(found), Tensor))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if torch.cuda.is_available():
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.device_peak = {"allocated": allocated, "reserved": reserved}
        for hook in self._hooks:
            hook.remove()
        for finalizer in self._finalizers:
            finalizer.detach()
        self._hooks, self._finalizers = [], []
        self._kind_of = WeakIdKeyDictionary()
        self._live = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count("activations", tree_iter(result))
        self._raise_peak()
        return result

    def _is_counted(self, found: Any) -> bool:
        return isinstance(found, Tensor) and found.layout is torch.strided and found.device.type != "meta"

    def _on_gradient(self, parameter: Tensor) -> None:
        self._count("gradients", [parameter.grad], move=True)
        self._raise_peak()

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._count("optimizer", tree_iter(list(optimizer.state.values())), move=True)
        self._raise_peak()

    def _count(self, kind: str, tensors: Iterable[Any], move: bool = False) -> None:
        for tensor in tensors:
            if not self._is_counted(tensor):
                continue
            storage = tensor.untyped_storage()
            entry = self._kind_of.get(storage)
            if entry is None:
                entry = [kind, storage.nbytes()]
                self._kind_of[storage] = entry
                self._live[kind] += entry[1]
                self._finalizers.append(weakref.finalize(storage, self._forget, self._live, entry))
            elif move and entry[0] != kind:
                self._live[entry[0]] -= entry[1]
                self._live[kind] += entry[1]
                entry[0] = kind

    @staticmethod
    def _forget(live: dict[str, int], entry: list[Any]) -> None:
        live[entry[0]] -= entry[1]

    def _raise_peak(self) -> None:
        total = sum(self._live.values())
        # Not only above: a gradient is known as one just after its bytes have raised the peak.
        if total >= self.peak["total"]:
            self.peak = {**self._live, "total": total}
