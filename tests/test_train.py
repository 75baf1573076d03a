"""The loop: schedule, gradient, average, idle blocks, faults in the numbers, and a resumed run's bits."""

import csv
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from diffusionblocks import train
from diffusionblocks.checkpoint import RunFolder
from diffusionblocks.config import Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.executors.local import run_in_order
from diffusionblocks.families.base import Blocks
from diffusionblocks.report import loss_curve
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import Job, TrainSettings, fit, make_fabric, make_optimizer, train_step

pytestmark = pytest.mark.usefixtures("little_to_sweep")


@dataclass
class Numbers:
    x: Tensor
    y: Tensor


EXAMPLES = torch.randn(96, 4, generator=torch.Generator().manual_seed(7))


def line() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(3, 1)


def squared(module: nn.Module, batch: Numbers, step: int) -> Tensor:
    return (module(batch.x)[:, 0] - batch.y).square()


def line_job(size: int, losses: Callable[[nn.Module, Numbers, int], Tensor] = squared) -> Job:
    """Linear regression on consecutive batches of `size` of the same 96 examples."""

    def batch(step: int) -> Numbers:
        rows = EXAMPLES[torch.arange(step * size, (step + 1) * size) % len(EXAMPLES)]
        return Numbers(rows[:, :3], rows[:, 3])

    return Job(part="line", layers=1, build=line, batches=batch, losses=losses)


def with_training(recipe: Recipe, **changes: Any) -> Recipe:
    return replace(recipe, training=replace(recipe.training, **changes))


def weights(folder: Path, part: str) -> bytes:
    return (folder / f"{part}.safetensors").read_bytes()


def descent(job: Job, settings: TrainSettings) -> dict[str, Tensor]:
    """One train_step with plain gradient descent at rate 1: what it subtracted is the gradient that it used."""
    fabric = make_fabric(settings)
    network = job.build()
    module, optimizer = fabric.setup(network, SGD(network.parameters(), lr=1.0))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train_step(fabric, module, optimizer, job, settings, 0)
    return {name: before[name] - p.detach() for name, p in network.named_parameters()}


def gradient(rows: Tensor, loss: Callable[[Tensor], Tensor] = lambda errors: errors.square().mean()) -> Tensor:
    """Of the regression, by autograd without the loop: weight, then bias."""
    network = line()
    loss(network(rows[:, :3])[:, 0] - rows[:, 3]).backward()
    assert network.weight.grad is not None
    assert network.bias.grad is not None
    return torch.cat([network.weight.grad.flatten(), network.bias.grad])


def flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


# Schedule


def test_rate_warms_up_in_a_line_and_falls_along_a_cosine() -> None:
    settings = TrainSettings(updates=120, warmup=20, learning_rate=0.4)
    rates = [settings.rate(update) for update in range(121)]
    assert rates[:20] == pytest.approx([0.4 * (update + 1) / 21 for update in range(20)])
    assert rates[20] == 0.4 == max(rates)
    assert rates[70] == pytest.approx(0.2)  # half way down
    assert rates[45] == pytest.approx(0.4 * (1 + math.sqrt(0.5)) / 2)
    assert all(later < earlier for earlier, later in pairwise(rates[20:]))
    assert rates[119] < 0.4 * 1e-3
    assert rates[120] == pytest.approx(0, abs=1e-12)


def test_no_warmup_starts_at_the_top() -> None:
    assert TrainSettings(updates=5, warmup=0, learning_rate=0.4).rate(0) == 0.4


def test_every_block_goes_through_the_whole_schedule(tiny: Recipe, tmp_path: Path) -> None:
    for part in ("block-0", "block-1"):
        run_job(BlockJob(tiny, part, str(tmp_path)))
        with open(tmp_path / "logs" / part / "from-0000000" / "metrics.csv", newline="") as rows:
            logged = [float(row["learning_rate"]) for row in csv.DictReader(rows)]
        assert logged == pytest.approx([tiny.training.rate(update) for update in range(6)])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"updates": 0}, "updates"),
        ({"batch_size": 0}, "batch_size"),
        ({"accumulate": 0}, "accumulate"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"warmup": -1}, "warmup"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"clip": -1.0}, "clip"),
        ({"ema": 1.0}, "ema"),
        ({"beta1": 1.0}, "beta1"),
        ({"precision": "8"}, "precision"),
        ({"logger": "paper"}, "logger"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        TrainSettings(**changes)


# One step


def test_step_uses_the_mean_gradient_of_its_batch() -> None:
    used = descent(line_job(16), TrainSettings(learning_rate=1.0, warmup=0, clip=0.0))
    torch.testing.assert_close(flat(used), gradient(EXAMPLES[:16]))


def test_two_accumulated_halves_are_one_batch() -> None:
    halves = descent(line_job(8), TrainSettings(learning_rate=1.0, warmup=0, clip=0.0, accumulate=2))
    torch.testing.assert_close(flat(halves), gradient(EXAMPLES[:16]))
    assert not torch.allclose(flat(halves), gradient(EXAMPLES[:8]), rtol=1e-2)


def test_accumulated_training_ends_where_whole_batches_do(tmp_path: Path) -> None:
    settings = TrainSettings(updates=5, warmup=1, learning_rate=0.1)
    fit(line_job(16), settings, RunFolder(tmp_path / "whole", {}))
    fit(line_job(8), replace(settings, accumulate=2), RunFolder(tmp_path / "halves", {}))
    whole, halves = (load_file(tmp_path / name / "line.safetensors") for name in ("whole", "halves"))
    torch.testing.assert_close(halves, whole)
    assert loss_curve(tmp_path / "halves", "line")[1] == pytest.approx(loss_curve(tmp_path / "whole", "line")[1])


def test_clip_shortens_the_gradient_and_zero_does_not() -> None:
    raw = gradient(EXAMPLES[:16])
    assert raw.norm() > 0.5
    clipped = flat(descent(line_job(16), TrainSettings(learning_rate=1.0, warmup=0, clip=0.25)))
    torch.testing.assert_close(clipped, raw * 0.25 / raw.norm(), rtol=1e-4, atol=1e-6)
    free = flat(descent(line_job(16), TrainSettings(learning_rate=1.0, warmup=0, clip=0.0)))
    torch.testing.assert_close(free, raw)
    wide = flat(descent(line_job(16), TrainSettings(learning_rate=1.0, warmup=0, clip=1e3)))
    torch.testing.assert_close(wide, raw)


def test_only_matrices_decay(tiny: Recipe) -> None:
    """With a gradient of 0 AdamW changes nothing but by decay."""
    settings = TrainSettings(learning_rate=0.1, warmup=0, weight_decay=0.5)
    network = Run.of(tiny).family.build_block(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1.0)
    fabric = make_fabric(settings)
    module, optimizer = fabric.setup(network, make_optimizer(network, settings))
    zero = Job("zero", 1, lambda: network, lambda step: None, lambda m, b, s: 0 * sum_of(m).expand(4))
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train_step(fabric, module, optimizer, zero, settings, 0)
    kinds = set()
    for name, parameter in network.named_parameters():
        kinds.add(parameter.ndim)
        expected = before[name] * (0.95 if parameter.ndim == 2 else 1)
        torch.testing.assert_close(parameter.detach(), expected, msg=lambda text, name=name: f"{name}: {text}")
    assert kinds == {1, 2, 3}


def sum_of(module: nn.Module) -> Tensor:
    return torch.stack([parameter.sum() for parameter in module.parameters()]).sum()


def test_losses_must_be_per_example(tmp_path: Path) -> None:
    job = line_job(8, lambda module, batch, step: squared(module, batch, step).mean())
    # A TypeError of beartype under test, a ValueError of `reduce` without it.
    with pytest.raises(Exception, match="shape"):
        fit(job, TrainSettings(updates=2), RunFolder(tmp_path, {}))


# The average


def test_average_of_the_weights_is_what_is_saved(tmp_path: Path) -> None:
    built: list[nn.Module] = []
    seen: list[dict[str, Tensor]] = []

    def build() -> nn.Module:
        built.append(line())
        return built[-1]

    def record(part: str, update: int, loss: float) -> None:
        seen.append({name: p.detach().clone() for name, p in built[0].named_parameters()})

    settings = TrainSettings(updates=7, warmup=0, learning_rate=0.3, ema=0.8)
    fit(replace(line_job(16), build=build), settings, RunFolder(tmp_path, {}), progress=record)
    average = seen[0]
    for step in seen[1:]:
        average = {name: 0.8 * average[name] + 0.2 * step[name] for name in average}
    saved = load_file(tmp_path / "line.safetensors")
    torch.testing.assert_close(saved, average)
    assert not torch.allclose(saved["weight"], seen[-1]["weight"], rtol=1e-2)


def test_without_an_average_the_last_weights_are_saved(tmp_path: Path) -> None:
    network = line()
    fit(replace(line_job(16), build=lambda: network), TrainSettings(updates=3), RunFolder(tmp_path, {}))
    assert torch.equal(load_file(tmp_path / "line.safetensors")["weight"], network.weight)


# Numbers that aren't finite


def nan_loss(module: nn.Module, batch: Numbers, step: int) -> Tensor:
    return squared(module, batch, step) * (float("nan") if step == 4 else 1)


def nan_gradient(module: nn.Module, batch: Numbers, step: int) -> Tensor:
    losses = squared(module, batch, step)
    # sqrt at 0: the value is 0, its slope infinite, times 0.
    return losses + (0 * module.weight).sum().sqrt() if step == 4 else losses


@pytest.mark.parametrize("broken", [nan_loss, nan_gradient])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_what_is_not_finite_stops_the_run_and_keeps_its_state(tmp_path: Path, broken: Any, clip: float) -> None:
    settings = TrainSettings(updates=6, warmup=0, checkpoint_every=2, clip=clip)
    folder = RunFolder(tmp_path / "broken", {})
    with pytest.raises(InputError, match=r"^line: .*at update 4; the last saved state stays") as caught:
        fit(line_job(16, broken), settings, folder)
    assert "\n" not in str(caught.value)
    state = folder.load_state("line")
    assert state is not None
    assert state.update == 4
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    assert folder.finished("line") is None
    # The data mended, it goes on to the same weights.
    fit(line_job(16), settings, folder)
    fit(line_job(16), settings, RunFolder(tmp_path / "sound", {}))
    assert weights(tmp_path / "broken", "line") == weights(tmp_path / "sound", "line")


# One block at a time


def test_no_parameter_of_another_block_exists(tiny: Recipe, tmp_path: Path) -> None:
    def parameters() -> list[nn.Parameter]:
        return [found for found in gc.get_objects() if issubclass(type(found), nn.Parameter)]

    # Held, so that no parameter of the blocks gets the number of one that was let go.
    held = parameters()
    others = {id(parameter) for parameter in held}
    counts: dict[str, set[int]] = {}

    def spied(block_job: BlockJob) -> dict[str, Any] | None:
        run = Run.of(block_job.recipe)
        job = {job.part: job for job in run.jobs()}[block_job.part]

        def losses(module: nn.Module, batch: Any, step: int) -> Tensor:
            alive = {id(parameter) for parameter in parameters()} - others
            assert alive == {id(parameter) for parameter in module.parameters()}
            counts.setdefault(job.part, set()).add(len(alive))
            return job.losses(module, batch, step)

        return fit(replace(job, losses=losses), run.settings, run.folder(block_job.folder))

    run_in_order([BlockJob(tiny, f"block-{number}", str(tmp_path)) for number in range(3)], spied)
    expected = len(list(Run.of(tiny).family.build_block(1).parameters()))
    assert counts == {f"block-{number}": {expected} for number in range(3)}


# A joint network


def joint(tiny: Recipe, **training: Any) -> Recipe:
    settings = {"weight_decay": 0.5, "learning_rate": 0.05, "warmup": 0, **training}
    return with_training(replace(tiny, shell="joint"), **settings)


def states_of(optimizer: AdamW, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [value.clone() for p in parameters for value in optimizer.state.get(p, {}).values()]


def stacks_changed(job: Job, settings: TrainSettings, updates: int) -> list[tuple[set[int], set[int], bool]]:
    """For each update: which stacks' weights changed, which stacks' optimizer states did, and whether the shell did."""
    fabric = make_fabric(settings)
    network = job.build()
    assert isinstance(network, Blocks)
    module, optimizer = fabric.setup(network, make_optimizer(network, settings))
    parts = {number: list(block.stack.parameters()) for number, block in enumerate(network.blocks)}
    parts[-1] = list(network.shell.parameters())
    found = []
    for update in range(updates):
        before = {number: [p.detach().clone() for p in part] for number, part in parts.items()}
        states = {number: states_of(optimizer.optimizer, part) for number, part in parts.items()}
        train_step(fabric, module, optimizer, job, settings, update)
        moved = {n for n, part in parts.items() if not all(map(torch.equal, before[n], part))}
        after = {number: states_of(optimizer.optimizer, part) for number, part in parts.items()}
        stirred = {
            n for n in parts if len(after[n]) != len(states[n]) or not all(map(torch.equal, states[n], after[n]))
        }
        found.append((moved - {-1}, stirred - {-1}, -1 in moved and -1 in stirred))
    return found


def keep_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """zero_grad(set_to_none=False): gradients become 0 and stay."""
    original = AdamW.zero_grad
    monkeypatch.setattr(AdamW, "zero_grad", lambda self, set_to_none=True: original(self, set_to_none=False))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_idle_blocks_and_their_states_keep_their_bits(
    tiny: Recipe, monkeypatch: pytest.MonkeyPatch, set_to_none: bool, accumulate: int
) -> None:
    if not set_to_none:
        keep_zeros(monkeypatch)
    run = Run.of(joint(tiny, accumulate=accumulate))
    (job,) = run.jobs()
    steps = stacks_changed(job, run.settings, 9)
    for moved, stirred, shell in steps:
        assert len(moved) == 1
        assert moved == stirred
        assert shell
    # Each block was trained, and each rested after it had momentum.
    turns = [min(moved) for moved, _, _ in steps]
    assert set(turns) == {0, 1, 2}
    assert all(set(turns[turns.index(block) + 1 :]) - {block} for block in range(3))


def test_without_idle_zero_gradients_would_move_resting_blocks(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The danger that `idle` removes is real: decay and momentum act on a gradient of 0."""
    keep_zeros(monkeypatch)
    run = Run.of(joint(tiny))
    (job,) = run.jobs()
    steps = stacks_changed(replace(job, idle=train._no_parameters), run.settings, 9)
    assert max(len(moved) for moved, _, _ in steps) > 1


def test_joint_run_gives_each_block_its_updates(tiny: Recipe, tmp_path: Path) -> None:
    figures = run_job(BlockJob(joint(tiny), "joint", str(tmp_path)))
    assert figures is not None
    assert figures["updates"] == 18


# Stopped and resumed

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "ema": {"ema": 0.9},
    "checkpointing": {"gradient_checkpointing": True},
    "all": {"accumulate": 2, "ema": 0.9, "gradient_checkpointing": True},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("changes", [pytest.param(value, id=name) for name, value in CHANGES.items()])
def test_stopped_at_any_update_it_ends_with_the_same_bits(
    tiny: Recipe, tmp_path: Path, changes: dict[str, Any]
) -> None:
    recipe = with_training(tiny, **changes)
    whole = run_job(BlockJob(recipe, "block-1", str(tmp_path / "whole")))
    assert whole is not None
    expected, curve = weights(tmp_path / "whole", "block-1"), loss_curve(tmp_path / "whole", "block-1")
    assert curve[0] == list(range(6))
    # All combined, from each update; each alone, in one chain of stops.
    for stops in [[1, 2, 3, 4, 5], *([until] for until in range(1, 6) if changes == CHANGES["all"])]:
        folder = tmp_path / "-".join(map(str, stops))
        for until in stops:
            assert run_job(BlockJob(recipe, "block-1", str(folder), until=until)) is None
        figures = run_job(BlockJob(recipe, "block-1", str(folder)))
        assert figures is not None
        assert weights(folder, "block-1") == expected
        assert loss_curve(folder, "block-1") == curve
        assert figures["peak_bytes"].keys() == whole["peak_bytes"].keys()
        assert figures["peak_bytes"]["parameters"] == whole["peak_bytes"]["parameters"]
        assert figures["validation"] == whole["validation"]


def test_a_joint_run_stopped_at_any_update_ends_with_the_same_bits(tiny: Recipe, tmp_path: Path) -> None:
    recipe = joint(tiny, updates=2, ema=0.5)
    run_job(BlockJob(recipe, "joint", str(tmp_path / "whole")))
    for until in range(1, 6):
        folder = tmp_path / str(until)
        assert run_job(BlockJob(recipe, "joint", str(folder), until=until)) is None
        run_job(BlockJob(recipe, "joint", str(folder)))
        assert weights(folder, "joint") == weights(tmp_path / "whole", "joint")


def test_gradient_checkpointing_changes_no_bit(tiny: Recipe, tmp_path: Path) -> None:
    deeper = replace(tiny, network=replace(tiny.network, layers=6))
    for on in (False, True):
        run_job(BlockJob(with_training(deeper, gradient_checkpointing=on), "block-1", str(tmp_path / str(on))))
    assert weights(tmp_path / "False", "block-1") == weights(tmp_path / "True", "block-1")


def test_until_0_trains_nothing(tiny: Recipe, tmp_path: Path) -> None:
    assert run_job(BlockJob(tiny, "block-0", str(tmp_path), until=0)) is None
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_single_update_has_all_figures(tiny: Recipe, tmp_path: Path) -> None:
    figures = run_job(BlockJob(with_training(tiny, updates=1), "block-0", str(tmp_path)))
    assert figures is not None
    assert figures["peak_bytes"]["total"] > figures["peak_bytes"]["parameters"] > 0
    assert figures["seconds_per_step"] > 0


def test_seconds_add_up_over_stretches(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(train.time, "perf_counter", lambda: float(next(clock)))
    for until in (1, 4):
        run_job(BlockJob(tiny, "block-0", str(tmp_path), until=until))
        state = RunFolder(tmp_path, Run.of(tiny).manifest).load_state("block-0")
        assert state is not None
        assert state.figures["seconds"] == until
    figures = run_job(BlockJob(tiny, "block-0", str(tmp_path)))
    assert figures is not None
    assert figures["seconds"] == 6
    assert figures["seconds_per_step"] == 1
    assert figures["updates"] == 6


def test_a_finished_part_is_not_trained_again(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_job(BlockJob(tiny, "block-0", str(tmp_path)))
    monkeypatch.setattr(train, "train_step", lambda *_: pytest.fail("it trained again"))
    assert run_job(BlockJob(tiny, "block-0", str(tmp_path))) == first
    assert not (tmp_path / "block-0.state.safetensors").exists()


def test_validation_on_the_way_changes_no_bit_and_is_logged(tiny: Recipe, tmp_path: Path) -> None:
    run_job(BlockJob(tiny, "block-0", str(tmp_path / "without")))
    run_job(BlockJob(with_training(tiny, validate_every=2), "block-0", str(tmp_path / "with")))
    assert weights(tmp_path / "without", "block-0") == weights(tmp_path / "with", "block-0")
    assert loss_curve(tmp_path / "without", "block-0") == loss_curve(tmp_path / "with", "block-0")
    with open(tmp_path / "with" / "logs" / "block-0" / "from-0000000" / "metrics.csv", newline="") as rows:
        validated = [int(row["step"]) for row in csv.DictReader(rows) if row.get("loss_at_sigma_max")]
    assert validated == [1, 3]
