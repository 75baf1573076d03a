"""5. `fit`, the only training loop: blocks and baselines run through it alike, or comparisons would measure the loop.

It builds one part (a block, or a baseline's network), trains it and writes it; nothing of any other part exists in the
process meanwhile. All randomness of an update derives from (seed, block, purpose, update): a run that was killed goes
on from its last saved update and ends with the same bits.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from lightning.fabric import Fabric
from lightning.fabric.loggers.csv_logs import CSVLogger
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from diffusionblocks.block import set_checkpointing
from diffusionblocks.checkpoint import RunFolder, State, own_tensors, restore_training_state, training_state
from diffusionblocks.errors import InputError
from diffusionblocks.memory import MemoryMeter
from diffusionblocks.objective import reduce

PRECISIONS = ("32-true", "bf16-mixed")
LOGGERS = ("csv", "tensorboard")
Progress = Callable[[str, int, float], None]


@dataclass(frozen=True)
class TrainSettings:
    """The loop. Updates, warm-up and cosine are counted for each block.

    Attributes:
        warmup: updates of linear warm-up; the learning rate then falls to 0 along a cosine.
        clip: largest gradient norm; 0 doesn't clip.
        accumulate: batches a update.
        ema: decay of the weights' moving average, which is what is then saved; 0 keeps none.
        checkpoint_every: updates between two saved states, the most that a killed run loses.
        validate_every: updates between two validations; 0 validates at the end only.
    """

    updates: int = 400
    batch_size: int = 128
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    warmup: int = 20
    clip: float = 1.0
    accumulate: int = 1
    ema: float = 0.0
    precision: str = "32-true"
    gradient_checkpointing: bool = False
    checkpoint_every: int = 50
    validate_every: int = 0
    logger: str = "csv"

    def __post_init__(self) -> None:
        for name, low in (("updates", 1), ("batch_size", 1), ("accumulate", 1), ("checkpoint_every", 1), ("warmup", 0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} {getattr(self, name)} is out of range: choose {low} or more")
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise InputError(f"learning_rate {self.learning_rate} is out of range: choose a number above 0")
        if min(self.weight_decay, self.clip, self.validate_every) < 0:
            raise InputError("weight_decay, clip and validate_every can't be negative: choose 0 to switch them off")
        if not all(0 <= decay < 1 for decay in (self.beta1, self.beta2, self.ema)):
            raise InputError("beta1, beta2 and ema are decays: choose them from 0 up to, but not including, 1")
        if self.precision not in PRECISIONS:
            raise InputError(f"unknown precision '{self.precision}': choose {', '.join(PRECISIONS)}")
        if self.logger not in LOGGERS:
            raise InputError(f"unknown logger '{self.logger}': choose {', '.join(LOGGERS)}")

    def rate(self, update: int) -> float:
        """The learning rate of an update: linear warm-up, then a cosine down to 0."""
        if update < self.warmup:
            return self.learning_rate * (update + 1) / (self.warmup + 1)
        done = (update - self.warmup) / max(1, self.updates - self.warmup)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _no_parameters(module: nn.Module, step: int) -> Iterable[nn.Parameter]:
    return ()


def _no_figures(module: nn.Module) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Job:
    """One part to train.

    Attributes:
        part: the file's name, e.g. "block-1".
        layers: how many layers one forward pass of it runs, for counting layer evaluations.
        build: makes the network, seeded by itself.
        losses: (network, batch, step) to one weighted loss per example; its randomness derives from the step.
        idle: the parameters that must not change in a step (the other blocks of a joint network).
        validate: figures of the network on held-out data, with fixed noise; the first is the headline.
    """

    part: str
    layers: int
    build: Callable[[], nn.Module]
    batches: Callable[[int], Any]
    losses: Callable[[nn.Module, Any, int], Float[Tensor, " n"]]
    idle: Callable[[nn.Module, int], Iterable[nn.Parameter]] = _no_parameters
    validate: Callable[[nn.Module], dict[str, float]] = _no_figures


def fit(
    job: Job, settings: TrainSettings, folder: RunFolder, until: int | None = None, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Trains a part up to update `until` (None: to the end), from where its last saved state stands.

    Returns:
        The figures of a finished part (updates, seconds, seconds_per_step, layer_evaluations, peak_bytes, validation),
        or None where it stopped before the end.

    Raises:
        InputError: a loss or a gradient that isn't finite; the last saved state stays.
    """
    if (figures := folder.finished(job.part)) is not None:
        return figures
    fabric = make_fabric(settings)
    network = job.build()
    set_checkpointing(network, settings.gradient_checkpointing)
    module, optimizer = fabric.setup(network, make_optimizer(network, settings))
    average = make_average(network, settings)
    state = folder.load_state(job.part) or State(0, {}, {"seconds": 0.0, "last_steps": [], "peak_bytes": None})
    if state.tensors:
        restore_training_state(state.tensors, network, optimizer.optimizer, average)
        state.tensors = {}
    log = _open_log(folder.path / "logs", job.part, state.update, settings.logger)
    end = settings.updates if until is None else min(until, settings.updates)
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    for update in range(state.update, end):
        # Once every parameter has its optimizer states one update shows the peak of all. That is the second update,
        # or, for a joint network, when each block had its turn; the last one if that never comes.
        ready = len(optimizer.optimizer.state) == trained or update == settings.updates - 1
        meter = MemoryMeter() if state.figures["peak_bytes"] is None and ready else None
        if meter is not None:
            meter.watch(network, optimizer.optimizer, average)
        started = time.perf_counter()
        with meter or nullcontext():
            loss = train_step(fabric, module, optimizer, job, settings, update)
            if average is not None:
                average.update_parameters(network)
        _note_time(state.figures, time.perf_counter() - started, metered=meter is not None)
        if meter is not None:
            state.figures["peak_bytes"] = meter.peak
        state.update = update + 1
        log.log_metrics({"loss": loss, "learning_rate": settings.rate(update)}, step=update)
        if settings.validate_every and state.update % settings.validate_every == 0 and state.update < settings.updates:
            log.log_metrics(_validate(job, network), step=update)
        if state.update % settings.checkpoint_every == 0 or state.update == end:
            log.save()
            folder.save_state(job.part, State(state.update, training_state(network, optimizer, average), state.figures))
        if progress is not None:
            progress(job.part, state.update, loss)
    if state.update < settings.updates:
        return None
    return _finish(job, settings, folder, network if average is None else average.module, state)


def train_step(
    fabric: Fabric, module: nn.Module, optimizer: Any, job: Job, settings: TrainSettings, update: int
) -> float:
    """One update; returns its mean loss. Idle parameters keep no gradient, so that AdamW doesn't decay them."""
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(update)
    total = 0.0
    for part in range(settings.accumulate):
        step = update * settings.accumulate + part
        loss = reduce(job.losses(module, job.batches(step), step)) / settings.accumulate
        total += loss.item()
        fabric.backward(loss)
    for parameter in job.idle(module, update):
        parameter.grad = None
    norm = fabric.clip_gradients(module, optimizer, max_norm=settings.clip or math.inf, error_if_nonfinite=False)
    if not (math.isfinite(total) and norm is not None and norm.isfinite()):
        raise InputError(
            f"{job.part}: the loss is {total} and the gradient norm {norm} at update {update}; the last saved state "
            "stays. Lower learning_rate, raise warmup, or check the data"
        )
    optimizer.step()
    optimizer.zero_grad()
    return total


def _note_time(figures: dict[str, Any], seconds: float, metered: bool) -> None:
    figures["seconds"] += seconds
    if not metered:  # counting bytes makes a step slower: it says nothing of the others
        figures["last_steps"] = [*figures["last_steps"][-199:], round(seconds, 6)]


def make_fabric(settings: TrainSettings) -> Fabric:
    return Fabric(accelerator="auto", devices=1, precision=settings.precision)  # type: ignore[arg-type]  # a str


def make_optimizer(network: nn.Module, settings: TrainSettings) -> AdamW:
    """AdamW; matrices decay, biases, norms and single tokens don't. Fused: it needs no scratch copy of the weights."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), fused=True)


def make_average(network: nn.Module, settings: TrainSettings) -> AveragedModel | None:
    """The weights' exponential moving average, or None where ema is 0."""
    if not settings.ema:
        return None
    return AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(settings.ema))


def _validate(job: Job, network: nn.Module) -> dict[str, float]:
    network.eval()
    with torch.no_grad():
        figures = job.validate(network)
    network.train()
    return figures


def _finish(
    job: Job, settings: TrainSettings, folder: RunFolder, network: nn.Module, state: State
) -> dict[str, Any] | None:
    steps = settings.updates * settings.accumulate
    figures = {
        "updates": settings.updates,
        "seconds": round(state.figures["seconds"], 3),
        "seconds_per_step": statistics.median(state.figures["last_steps"] or [state.figures["seconds"]]),
        "layer_evaluations": steps * settings.batch_size * job.layers,
        "peak_bytes": state.figures["peak_bytes"],
        "validation": _validate(job, network),
    }
    folder.finish(job.part, own_tensors(network), figures)
    return folder.finished(job.part)


def _open_log(root: Path, part: str, update: int, kind: str) -> Any:
    """A logger for the updates from `update` on; each resumed stretch has a folder of its own."""
    version = f"from-{update:07d}"
    # A stretch that died before its first saved state starts again at the same update.
    shutil.rmtree(root / part / version, ignore_errors=True)
    if kind == "csv":
        return CSVLogger(root_dir=str(root), name=part, version=version)
    try:
        from lightning.fabric.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(root_dir=str(root), name=part, version=version)
    except ModuleNotFoundError as error:
        raise InputError("logger tensorboard needs a package: pip install 'diffusionblocks[logs]'") from error
