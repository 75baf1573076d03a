"""5. `fit`, the only training loop: blocks and baselines run through it alike, or comparisons would measure the loop.

It builds one part (a block, or a baseline's network), trains it and writes it; nothing of any other part exists in the
process meanwhile. All randomness of an update derives from (seed, block, purpose, update): a run that was killed goes
on from its last saved update and ends with the same bits.
"""

import math
import shutil
import statistics
import time
import warnings
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
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from diffusionblocks.block import set_checkpointing
from diffusionblocks.checkpoint import RunFolder, State, own_tensors, restore_training_state, training_state
from diffusionblocks.errors import InputError
from diffusionblocks.files import writing
from diffusionblocks.memory import MemoryMeter
from diffusionblocks.objective import reduce
from diffusionblocks.residency import HostMemory

OPTIMIZERS = ("adamw", "adamw8bit", "sgd")
PRECISIONS = ("32-true", "bf16-mixed")
LOGGERS = ("csv", "tensorboard")
Progress = Callable[[str, int, float], None]


@dataclass(frozen=True)
class TrainSettings:
    """The loop. Updates, warm-up and cosine are counted for each block.

    Attributes:
        optimizer: "adamw", "adamw8bit" (its states in 8 bits; CUDA only, with the extra `cuda`) or "sgd", whose
            momentum is beta1 and which keeps no states where that is 0.
        warmup: updates of linear warm-up; the learning rate then falls to 0 along a cosine.
        clip: largest gradient norm; 0 doesn't clip.
        accumulate: batches a update.
        ema: decay of the weights' moving average, which is what is then saved; 0 keeps none.
        checkpoint_every: updates between two saved states, the most that a killed run loses.
        validate_every: updates between two validations; 0 validates at the end only.
        start_from: a run's folder or a safetensors checkpoint whose weights training starts from.
        start_checksum: what tells that checkpoint from others; set by itself.
    """

    updates: int = 400
    batch_size: int = 128
    optimizer: str = "adamw"
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
    start_from: str | None = None
    start_checksum: str | None = None

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
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"unknown optimizer '{self.optimizer}': choose {', '.join(OPTIMIZERS)}")
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


def _nothing(module: nn.Module) -> None:
    pass


def _one_turn(update: int) -> int:
    return 0


def never() -> bool:
    return False


class Stopped(Exception):
    """Training was asked to stop and has saved where it stands: the same call goes on from there.

    Attributes:
        code: exit code of a command that ends so.
    """

    code = 0


@dataclass(frozen=True)
class Job:
    """One part to train.

    Attributes:
        part: the file's name, e.g. "block-1".
        layers: how many layers one forward pass of it runs, for counting layer evaluations.
        build: makes the network, seeded by itself.
        start: fills a network that isn't resumed, e.g. from a trained one.
        losses: (network, batch, step) to one weighted loss per example; its randomness derives from the step.
        idle: the parameters that must not change in a step (the other blocks of a joint network).
        turn: number of the group of parameters that an update trains, where not all are trained at once.
        active: the parameters of a turn. The others get no gradient, and their optimizer states are dropped; None
            trains all.
        validate: figures of the network on held-out data, with fixed noise; the first is the headline.
    """

    part: str
    layers: int
    build: Callable[[], nn.Module]
    batches: Callable[[int], Any]
    losses: Callable[[nn.Module, Any, int], Float[Tensor, " n"]]
    idle: Callable[[nn.Module, int], Iterable[nn.Parameter]] = _no_parameters
    start: Callable[[nn.Module], None] = _nothing
    turn: Callable[[int], int] = _one_turn
    active: Callable[[nn.Module, int], Iterable[nn.Parameter]] | None = None
    validate: Callable[[nn.Module], dict[str, float]] = _no_figures


def fit(
    job: Job,
    settings: TrainSettings,
    folder: RunFolder,
    until: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = never,
    host: HostMemory | None = None,
) -> dict[str, Any] | None:
    """Trains a part up to update `until` (None: to the end), from where its last saved state stands.

    Args:
        stop: asked before every update; True saves the state and raises `Stopped`.
        host: keeps the state of an unfinished part, which is then written at every `checkpoint_every` only, not at
            `until`; None writes it at both and reads it back.

    Returns:
        The figures of a finished part (updates, seconds, seconds_per_step, layer_evaluations, peak_bytes, on CUDA
        device_bytes, validation), or None where it stopped before the end.

    Raises:
        InputError: a loss or a gradient that isn't finite (the last saved state stays), a folder that can't be written,
            or another process that trains the same part.
        Stopped: see `stop`.
    """
    with folder.lock(job.part):
        if (figures := folder.finished(job.part)) is not None:
            if folder.intact(job.part):
                return figures
            how = "written again from its last state" if folder.state_file(job.part).exists() else "trained again"
            warnings.warn(f"{folder.weights_file(job.part)} is damaged: it is {how}", stacklevel=2)
        return _train(job, settings, folder, until, progress, stop, host)


def _train(
    job: Job,
    settings: TrainSettings,
    folder: RunFolder,
    until: int | None,
    progress: Progress | None,
    stop: Callable[[], bool],
    host: HostMemory | None,
) -> dict[str, Any] | None:
    fabric = make_fabric(settings)
    network = job.build()
    set_checkpointing(network, settings.gradient_checkpointing)
    module, optimizer = fabric.setup(network, make_optimizer(network, settings))
    state = (host and host.page_in(folder, job.part)) or folder.load_state(job.part) or State(0, {}, _new_figures())
    if not state.tensors:
        job.start(network)
    average = make_average(network, settings)
    if state.tensors:
        restore_training_state(state.tensors, network, optimizer.optimizer, average)
        state.tensors = {}
    with writing(folder.path / "logs"):
        log = _open_log(folder.path / "logs", job.part, state.update, settings.logger)
    end = settings.updates if until is None else min(until, settings.updates)
    turn: int | None = None
    while state.update < end and not stop():
        update = state.update
        if job.active is not None and turn != job.turn(update):
            turn = job.turn(update)
            activate(job.active(network, turn), network, optimizer.optimizer)
        meter = _meter(job, settings, network, optimizer.optimizer, average, state)
        started = time.perf_counter()
        with meter or nullcontext():
            loss = train_step(fabric, module, optimizer, job, settings, update)
            if average is not None:
                average.update_parameters(network)
        _note(state.figures, time.perf_counter() - started, meter, job.turn(update))
        state.update = update + 1
        figures = {"loss": loss, "learning_rate": settings.rate(update)}
        if settings.validate_every and state.update % settings.validate_every == 0 and state.update < settings.updates:
            figures |= _validate(job, network)
        with writing(folder.path / "logs"):
            log.log_metrics(figures, step=update)
        if state.update % settings.checkpoint_every == 0 or state.update == (end if host is None else settings.updates):
            _save(folder, job, state, network, optimizer, average, log)
        if progress is not None:
            progress(job.part, state.update, loss)
    if state.update < end:
        _save(folder, job, state, network, optimizer, average, log)
        raise Stopped(f"{job.part} stopped after update {state.update} of {settings.updates}")
    if state.update < settings.updates:
        if host is not None:
            _save_log(folder, log)
            state.tensors = training_state(network, optimizer.optimizer, average)
            host.page_out(folder, job.part, state)
        return None
    return _finish(job, settings, folder, network if average is None else average.module, state)


def train_step(
    fabric: Fabric, module: nn.Module, optimizer: Any, job: Job, settings: TrainSettings, update: int
) -> float:
    """One update; returns its mean loss."""
    losses, norm = backpropagate(fabric, module, optimizer, job, settings, update)
    total = sum(loss.item() for loss in losses)
    if not (math.isfinite(total) and norm.isfinite()):
        raise InputError(
            f"{job.part}: the loss is {total} and the gradient norm {norm} at update {update}; the last saved state "
            "stays. Lower learning_rate, raise warmup, or check the data"
        )
    optimizer.step()
    optimizer.zero_grad()
    return total


def backpropagate(
    fabric: Fabric, module: nn.Module, optimizer: Any, job: Job, settings: TrainSettings, update: int
) -> tuple[list[Tensor], Tensor]:
    """Clipped gradients of one update, the loss of each accumulated batch and the norm before clipping.

    It reads no value of a tensor, so that `plan` runs it on tensors that have none. Idle parameters keep no gradient,
    so that AdamW doesn't decay them.
    """
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(update)
    losses = []
    for part in range(settings.accumulate):
        step = update * settings.accumulate + part
        loss = reduce(job.losses(module, job.batches(step), step)) / settings.accumulate
        losses.append(loss.detach())
        fabric.backward(loss)
        del loss
    for parameter in job.idle(module, update):
        parameter.grad = None
    norm = fabric.clip_gradients(module, optimizer, max_norm=settings.clip or math.inf, error_if_nonfinite=False)
    assert norm is not None
    return losses, norm


def activate(active: Iterable[nn.Parameter], network: nn.Module, optimizer: Optimizer) -> None:
    """Leaves gradients and optimizer states to the `active` parameters alone."""
    chosen = set(active)
    for parameter in network.parameters():
        parameter.requires_grad_(parameter in chosen)
        if parameter not in chosen:
            parameter.grad = None
            optimizer.state.pop(parameter, None)


def _new_figures() -> dict[str, Any]:
    return {"seconds": 0.0, "last_steps": [], "peak_bytes": None, "device_bytes": None, "metered": []}


def _meter(
    job: Job, settings: TrainSettings, network: nn.Module, optimizer: Optimizer, average: nn.Module | None, state: State
) -> MemoryMeter | None:
    """A meter for the first update of each turn at which all optimizer states exist: it shows the peak of all.

    That is the second one, or, for a joint network, when each block had its turn; the last one if that never comes.
    """
    if job.turn(state.update) in state.figures["metered"]:
        return None
    stateless = settings.optimizer == "sgd" and settings.beta1 == 0
    waiting = any(p.requires_grad and not optimizer.state.get(p) for p in network.parameters())
    if (waiting or (stateless and state.update == 0)) and state.update < settings.updates - 1:
        return None
    meter = MemoryMeter()
    meter.watch(network, optimizer, average)
    return meter


def _note(figures: dict[str, Any], seconds: float, meter: MemoryMeter | None, turn: int) -> None:
    figures["seconds"] += seconds
    if meter is None:
        figures["last_steps"] = [*figures["last_steps"][-199:], round(seconds, 6)]
        return
    # Its seconds aren't noted as a step's: counting bytes makes it slower.
    figures["metered"].append(turn)
    if figures["peak_bytes"] is None or meter.peak["total"] > figures["peak_bytes"]["total"]:
        figures |= {"peak_bytes": meter.peak, "device_bytes": meter.device_peak}


def _save(
    folder: RunFolder, job: Job, state: State, network: nn.Module, optimizer: Any, average: nn.Module | None, log: Any
) -> None:
    _save_log(folder, log)
    tensors = training_state(network, optimizer.optimizer, average)
    folder.save_state(job.part, State(state.update, tensors, state.figures))


def _save_log(folder: RunFolder, log: Any) -> None:
    with writing(folder.path / "logs"):
        log.save()


def make_fabric(settings: TrainSettings) -> Fabric:
    return Fabric(accelerator="auto", devices=1, precision=settings.precision)  # type: ignore[arg-type]  # a str


def make_optimizer(network: nn.Module, settings: TrainSettings) -> Optimizer:
    """The optimizer; matrices decay, biases, norms and single tokens don't. Fused: no scratch copy of the weights.

    Raises:
        InputError: 8-bit states without CUDA, or without the package.
    """
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    if settings.optimizer == "sgd":
        return SGD(groups, lr=settings.learning_rate, momentum=settings.beta1, fused=True)
    if settings.optimizer == "adamw8bit":
        return eight_bit_adamw(groups, settings.learning_rate, betas)
    return AdamW(groups, lr=settings.learning_rate, betas=betas, fused=True)


def eight_bit_adamw(groups: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float]) -> Optimizer:
    """AdamW with block-wise quantised states (Dettmers et al. 2022)."""
    if not torch.cuda.is_available():
        raise InputError("optimizer adamw8bit needs a CUDA device: choose adamw or sgd")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise InputError("optimizer adamw8bit needs a package: pip install 'diffusionblocks[cuda]'") from error
    optimizer: Optimizer = AdamW8bit(groups, lr=learning_rate, betas=betas)
    return optimizer


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
        "device_bytes": state.figures["device_bytes"],
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
