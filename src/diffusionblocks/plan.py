"""Memory before training: the real update on tensors without content, counted as `MemoryMeter` counts a real one.

Weights, batch, gradients and optimizer states are fake tensors: they have a shape, a type and a lifetime but no bytes.
So a network of tens of billions of parameters is planned in seconds on a small machine, and nothing is estimated: what
the dispatcher would create is what is counted. Deep stacks are counted on two shallow ones: at corresponding moments
(within the forward or backward pass of the first two or last two layers) the bytes of equal layers grow by the same
amount with every layer.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from diffusionblocks.block import LayerStack, Streams, set_checkpointing
from diffusionblocks.config import NoiseSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.base import Family
from diffusionblocks.memory import KINDS, MemoryMeter, show_bytes
from diffusionblocks.partition import Draw, split_layers
from diffusionblocks.run import baseline, shaped_family
from diffusionblocks.train import Job, TrainSettings, activate, backpropagate, make_fabric, make_optimizer

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
METHODS = tuple(
    f"{method}{suffix}" for method in ("end_to_end", "block_coordinate", "blocks") for suffix in ("", "_checkpointed")
)
# Layers of the shallow stacks: the first two and the last two, and one more between them.
SHALLOW = 4
Sizes = tuple[int, ...]  # layers of each group; the layers of a group are alike
Bytes = dict[str, int]
Moment = tuple[int, str, int, int]  # batch, phase, group, and place in the group, from its start or (below 0) its end


@dataclass(frozen=True)
class Row:
    """One way to train a recipe.

    Attributes:
        peak_bytes: parameters, gradients, optimizer, activations and their total at the highest moment of an update.
        of_which: `shell`: weights, gradients and states of what stands outside the layers (stem, embeddings, head).
            `logits`: the most that activations as wide as the head take at any moment. `noisy_stream`: by how much the
            most activations exceed those of the plain network of the same layers.
    """

    method: str
    blocks: int
    peak_bytes: dict[str, int]
    of_which: dict[str, int] = field(default_factory=dict)


def plan(recipe: Recipe, blocks: Sequence[int] | None = None, methods: Sequence[str] = METHODS) -> list[Row]:
    """Peak memory of every way to train a recipe, on this machine's default device.

    Args:
        blocks: numbers of blocks to plan; None takes the divisors of the number of layers and the recipe's own.
        methods: which of `METHODS`.

    Raises:
        InputError: no method or an unknown one, or a number of blocks that the layers can't be cut into.
    """
    if not methods:
        raise InputError(f"there is nothing to plan: choose methods of {', '.join(METHODS)}")
    for method in methods:
        if method not in METHODS:
            raise InputError(f"unknown method '{method}': choose {', '.join(METHODS)}")
    layers = recipe.network.layers
    if blocks is None:
        blocks = sorted({count for count in range(1, layers + 1) if layers % count == 0} | {recipe.blocks})
    planners = {
        checkpointing: _Planner(recipe, replace(recipe.training, gradient_checkpointing=checkpointing))
        for checkpointing in (False, True)
    }
    rows = []
    for method in sorted(set(methods), key=METHODS.index):
        planner = planners[method.endswith("_checkpointed")]
        for count in [1] if method.startswith("end_to_end") else blocks:
            split = split_layers(layers, count, recipe.layer_split if count == recipe.blocks else None)
            if method.startswith("end_to_end"):
                rows.append(_row(method, 1, planner.count("end_to_end", (layers,))))
            elif method.startswith("blocks"):
                rows.append(planner.blocks_row(method, split))
            elif count > 1:
                rows.append(_row(method, count, planner.largest_turn(split)))
    return rows


@dataclass(frozen=True)
class _Planner:
    """Plans one recipe with one setting of the loop; the same shallow stacks serve many rows."""

    recipe: Recipe
    settings: TrainSettings
    _known: dict[tuple[str, Sizes, int], dict[Moment, Bytes]] = field(default_factory=dict)

    def blocks_row(self, method: str, split: tuple[tuple[int, ...], ...]) -> Row:
        sizes = tuple(map(len, split))
        if self.recipe.shell == "joint":
            # All blocks are resident, one is trained: counted as they are, not on shallow stacks.
            found = _highest(self._moments("joint", sizes))
        else:
            found = self.count("blocks", (max(sizes),))
        row = _row(method, len(sizes), found)
        alone = self.count("end_to_end", (max(sizes),))
        row.of_which["noisy_stream"] = found["most"] - alone["most"]
        return row

    def largest_turn(self, split: tuple[tuple[int, ...], ...]) -> Bytes:
        """Block-coordinate descent at its highest: in the first block's turn every layer keeps its activations, a
        larger block has more states, and the last one has the head's."""
        found = []
        for number in {0, _largest(split), len(split) - 1}:
            active = len(split[number])
            below = sum(map(len, split[:number]))
            above = sum(map(len, split)) - below - active
            # Layers below the active block are a group without activations, those above one without gradients.
            sizes = tuple(size for size in (below, active, above) if size)
            found.append(self.count("block_coordinate", sizes, turn=int(below > 0)))
        return max(found, key=lambda turn: turn["total"])

    def count(self, kind: str, sizes: Sizes, turn: int = 0) -> Bytes:
        """Peak bytes by kind for groups of so many layers, in the turn of one; deep groups from shallow ones."""
        base = tuple(size if size <= SHALLOW + 1 else SHALLOW for size in sizes)
        at_base = self._moments(kind, base, turn)
        moments = {moment: dict(found) for moment, found in at_base.items()}
        for group, size in enumerate(sizes):
            if size == base[group]:
                continue
            deeper = self._moments(kind, (*base[:group], SHALLOW + 1, *base[group + 1 :]), turn)
            for moment, found in moments.items():
                for name in found:
                    found[name] += (size - SHALLOW) * (deeper[moment][name] - at_base[moment][name])
        return _highest(moments)

    def _moments(self, kind: str, sizes: Sizes, turn: int = 0) -> dict[Moment, Bytes]:
        """Peak bytes by kind within each moment of an update whose optimizer states exist."""
        if (kind, sizes, turn) not in self._known:
            network = replace(self.recipe.network, layers=sum(sizes))
            # Which noise levels a block owns takes no memory: any law will do.
            recipe = replace(self.recipe, network=network, blocks=len(sizes), layer_split=sizes, noise=NoiseSettings())
            family = shaped_family(recipe)
            job = _job(kind, family, self.settings)
            self._known[kind, sizes, turn] = _simulate(job, self.settings, sizes, turn, family.read_out)
        return self._known[kind, sizes, turn]


def _largest(split: tuple[tuple[int, ...], ...]) -> int:
    return max(range(len(split)), key=lambda block: len(split[block]))


def _highest(moments: dict[Moment, Bytes]) -> Bytes:
    """The moment of the highest total; its logits count as activations. `most` is the most activations of any."""
    highest = dict(max(moments.values(), key=lambda found: found["total"]))
    highest["activations"] += highest["logits"]
    highest["most"] = max(found["activations"] + found["logits"] for found in moments.values())
    return highest


def _row(method: str, blocks: int, found: Bytes) -> Row:
    of_which = {"shell": found["shell"], "logits": found["widest"]}
    return Row(method, blocks, {name: found[name] for name in (*KINDS, "total")}, of_which)


def _job(kind: str, family: Family, settings: TrainSettings) -> Job:
    """What is trained: a baseline, the family's largest block, or all blocks around a joint shell."""

    def batches(step: int) -> Any:
        return family.batch_like(settings.batch_size)

    if kind in ("end_to_end", "block_coordinate"):
        (job,) = baseline(kind).jobs(family, lambda block: batches, settings)
        return job
    number = _largest(family.partition.layers)

    def losses(module: nn.Module, batch: Any, step: int) -> Tensor:
        return family.losses(module, batch, Draw(number, torch.ones(settings.batch_size)), None)

    build = family.build_joint if kind == "joint" else lambda: family.build_block(number)
    return Job(kind, len(family.partition.layers[number]), build, batches, losses)


def _simulate(job: Job, settings: TrainSettings, sizes: Sizes, turn: int, read_out: int) -> dict[Moment, Bytes]:
    # Tables that the family holds are real: they become fake where they are read.
    with FakeTensorMode(allow_non_fake_inputs=True):
        fabric = make_fabric(settings)
        with fabric.device:
            network = job.build()
        _take_content(network)
        set_checkpointing(network, settings.gradient_checkpointing)
        average = _average(job, settings)
        inner = _optimizer(network, settings)
        module, optimizer = fabric.setup(network, inner, move_to_device=False)
        if job.active is not None:
            activate(job.active(network, turn), network, inner)
        _make_states(network, inner)
        meter = _PlanMeter(read_out)
        meter.watch(network, inner, average)
        meter.follow(network, sizes)
        told = replace(job, batches=lambda step: meter.next_batch(job.batches(step)))
        with meter:
            backpropagate(fabric, module, optimizer, told, settings, update=0)
            optimizer.step()
            optimizer.zero_grad()
        shell = _shell_bytes(network, inner)
    return {moment: {**found, "shell": shell, "widest": meter.widest} for moment, found in meter.moments.items()}


class _PlanMeter(MemoryMeter):
    """Counts fake tensors alone, whatever else the process holds, and keeps the peak of each moment."""

    def __init__(self, read_out: int) -> None:
        super().__init__()
        self._read_out = read_out
        self._live["logits"] = 0
        self._now: Moment = (0, "start", 0, 0)
        self.moments: dict[Moment, Bytes] = {}
        self.widest = 0

    def follow(self, network: nn.Module, sizes: Sizes) -> None:
        """Marks the passes through each layer as moments."""
        layers = [layer for stack in _stacks(network) for layer in stack.layers.values()]
        ends = list(accumulate(sizes))
        for number, layer in enumerate(layers):
            group = sum(number >= end for end in ends)
            place = number - (ends[group] - sizes[group])
            # From the end, but for the first two: the same name in a deeper stack.
            self._mark(layer, group, place if place < SHALLOW // 2 else place - sizes[group])

    def next_batch(self, batch: Any) -> Any:
        """Passes a batch on; the moments of accumulated batches differ, for the first one's gradients stay."""
        self._now = (self._now[0] + 1, "start", 0, 0)
        return batch

    def _mark(self, layer: nn.Module, group: int, place: int) -> None:
        def enter(*_: Any) -> None:
            batch, phase = self._now[:2]
            # In the backward pass a layer is entered to recompute it.
            self._now = (batch, phase if phase == "backward" else "forward", group, place)

        def enter_backward(_: Tensor) -> None:
            self._now = (self._now[0], "backward", group, place)

        def leave(module: nn.Module, inputs: Any, outputs: Streams) -> None:
            for output in outputs:
                if output is not None and output.requires_grad:
                    output.register_hook(enter_backward)
            if self._now[1] == "forward":
                self._now = (self._now[0], "read-out", 0, 0)

        self._hooks += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]

    def _leftovers(self) -> Iterable[Any]:
        return ()

    def _is_counted(self, found: Any) -> bool:
        return isinstance(found, FakeTensor)

    def _count(self, kind: str, tensors: Iterable[Any], move: bool = False) -> None:
        if kind != "activations":
            super()._count(kind, tensors, move)
            return
        for tensor in filter(self._is_counted, tensors):
            shape = tensor.shape
            wide = len(shape) > 1 and shape[-1] == self._read_out
            super()._count("logits" if wide else kind, [tensor])

    def _raise_peak(self) -> None:
        self.widest = max(self.widest, self._live["logits"])
        total = sum(self._live.values())
        if self._now not in self.moments or total >= self.moments[self._now]["total"]:
            self.moments[self._now] = {**self._live, "total": total}


def _average(job: Job, settings: TrainSettings) -> nn.Module | None:
    """What `make_average` would hold; it copies the network, and tensors without content can't be copied."""
    if not settings.ema:
        return None
    copy = job.build()
    _take_content(copy)
    copy.register_buffer("n_averaged", torch.zeros((), dtype=torch.long))
    return copy


def _take_content(network: nn.Module) -> None:
    """Replaces real buffers (tables that the family holds) by fake ones."""
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not isinstance(buffer, FakeTensor):
                empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
                module.register_buffer(name, empty, persistent=False)


def _make_states(network: nn.Module, optimizer: Optimizer) -> None:
    """One step on gradients without content leaves the optimizer's states behind."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _shell_bytes(network: nn.Module, optimizer: Optimizer) -> int:
    """Weights, gradients and optimizer states outside the layers."""
    inside = {parameter for stack in _stacks(network) for parameter in stack.parameters()}
    outside = [parameter for parameter in network.parameters() if parameter not in inside]
    states = [value for parameter in outside for value in optimizer.state.get(parameter, {}).values()]
    return sum(2 * parameter.nbytes for parameter in outside) + sum(s.nbytes for s in states if s is not None)


def _stacks(network: nn.Module) -> list[LayerStack]:
    return [module for module in network.modules() if isinstance(module, LayerStack)]


def _optimizer(network: nn.Module, settings: TrainSettings) -> Optimizer:
    return (
        _EightBitStates(network.parameters())
        if settings.optimizer == "adamw8bit"
        else make_optimizer(network, settings)
    )


class _EightBitStates(Optimizer):
    """Stands in for bitsandbytes' AdamW8bit, which needs CUDA: the same states, no arithmetic.

    Two moments of a byte a coordinate and a float32 scale for each 256 of them; tensors under 4096 coordinates keep
    float32 moments.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the base class overloads it
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                small = parameter.numel() < 4096
                for name in ("state1", "state2"):
                    self.state[parameter][name] = torch.empty_like(
                        parameter, dtype=torch.float32 if small else torch.uint8
                    )
                    if not small:
                        self.state[parameter][f"absmax_{name}"] = torch.empty(-(-parameter.numel() // 256))


def recommend(rows: Sequence[Row], budget: int) -> dict[str, Any]:
    """The cheapest way in compute that fits into `budget` bytes, then with the fewest blocks.

    A layer costs three passes an update (forward, and twice that backward), four with checkpointing. Block-coordinate
    descent is shown for comparison and not recommended: each update trains one block and still runs all layers.

    Returns:
        method, blocks, peak_bytes and a sentence `why`; method None where nothing fits.
    """
    candidates = [row for row in rows if not row.method.startswith("block_coordinate")] or list(rows)
    fitting = [row for row in candidates if row.peak_bytes["total"] <= budget]
    if not fitting:
        least = min(candidates, key=lambda row: row.peak_bytes["total"])
        why = (
            f"nothing fits into {show_bytes(budget)}: the least is {least.method.replace('_', ' ')} "
            f"with {least.blocks} block(s), {show_bytes(least.peak_bytes['total'])}; "
            "a smaller batch_size or precision bf16-mixed lowers activations"
        )
        return {"method": None, "blocks": None, "peak_bytes": least.peak_bytes, "why": why}
    best = min(fitting, key=_price)
    why = f"the cheapest that fits into {show_bytes(budget)}"
    if best.method == "end_to_end":
        why += ": nothing has to be cut"
    elif any(row.method == "end_to_end_checkpointed" for row in fitting):
        why += "; checkpointing end to end fits as well, and would do for a third more computation"
    elif {"end_to_end", "end_to_end_checkpointed"} <= {row.method for row in rows}:
        why += "; end to end doesn't, with checkpointing or without"
    return {"method": best.method, "blocks": best.blocks, "peak_bytes": best.peak_bytes, "why": why}


def _price(row: Row) -> tuple[bool, bool, int]:
    return row.method.endswith("_checkpointed"), row.method.startswith("blocks"), row.blocks


def machine_memory() -> int:
    """Bytes of this machine's default device: the first GPU's, or main memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_bytes(text: str) -> int:
    """'8GiB', '500MB' or '1000000' in bytes; `InputError` for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        assert match is not None
        return int(float(match[1]) * UNITS[match[2].upper()])
    except (AssertionError, KeyError, ValueError):
        raise InputError(f"budget '{text}' isn't a size: write a number and a unit, e.g. 8GiB or 500MB") from None
