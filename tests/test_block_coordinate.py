"""Block-coordinate AdamW: one block's gradients and states at a time, the same network as end to end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diffusionblocks import train
from diffusionblocks.baselines.block_coordinate import VISIT, block_parameters
from diffusionblocks.checkpoint import own_tensors
from diffusionblocks.compare import compare, method_run
from diffusionblocks.config import Recipe
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import Job, activate, make_fabric, make_optimizer, train_step


def job_of(recipe: Recipe) -> tuple[Run, Job]:
    run = method_run(recipe, "block_coordinate")
    (job,) = run.jobs()
    return run, job


def test_blocks_share_out_all_parameters(tiny: Recipe) -> None:
    run, job = job_of(tiny)
    network = job.build()
    groups = [list(block_parameters(network, layers)) for layers in run.family.partition.layers]
    owned = [parameter for group in groups for parameter in group]
    assert len(owned) == len(set(owned)) == len(list(network.parameters()))
    names = {parameter: name for name, parameter in network.named_parameters()}
    first, middle, last = ({names[parameter] for parameter in group} for group in groups)
    assert {"cls", "patches.project.weight", "stack.layers.0.norm1.weight"} <= first
    assert all(name.startswith("stack.layers.1.") for name in middle)
    assert {"norm.weight", "head.weight", "stack.layers.2.norm1.weight"} <= last


def test_one_block_takes_everything(tiny: Recipe) -> None:
    run, job = job_of(replace(tiny, blocks=1))
    network = job.build()
    assert set(block_parameters(network, run.family.partition.layers[0])) == set(network.parameters())


def with_a_head(network: nn.Module) -> nn.Module:
    """A head that starts at 0 sends no gradient down."""
    nn.init.constant_(network.get_submodule("head").weight, 0.1)
    network.get_submodule("head").weight.data[0] = 0
    return network


def test_only_the_block_whose_turn_it_is_moves_and_has_states(tiny: Recipe) -> None:
    run, job = job_of(tiny)
    fabric = make_fabric(run.settings)
    network = with_a_head(job.build())
    module, optimizer = fabric.setup(network, make_optimizer(network, run.settings))
    assert job.active is not None
    for update in range(6):
        turn = job.turn(update)
        if update == 0 or turn != job.turn(update - 1):
            activate(job.active(network, turn), network, optimizer.optimizer)
        before = {name: tensor.clone() for name, tensor in own_tensors(network).items()}
        train_step(fabric, module, optimizer, job, run.settings, update)
        active = set(job.active(network, turn))
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, before[name]) != (parameter in active), name
            assert parameter.grad is None
            assert (parameter in optimizer.optimizer.state) == (parameter in active)
    assert [job.turn(update) for update in range(6)] == [0, 0, 1, 1, 2, 2]


def test_turns_last_a_visit_where_the_run_is_long(tiny: Recipe) -> None:
    _, job = job_of(replace(tiny, training=replace(tiny.training, updates=1000)))
    assert [job.turn(update) for update in (0, VISIT - 1, VISIT, 3 * VISIT)] == [0, 0, 1, 0]


def test_first_turn_is_the_end_to_end_gradient(tiny: Recipe) -> None:
    """Before anything has moved, the active block's gradient is backpropagation's."""
    run, job = job_of(tiny)
    (whole,) = method_run(tiny, "end_to_end").jobs()
    network, other = with_a_head(job.build()), with_a_head(whole.build())
    assert job.active is not None
    activate(job.active(network, 1), network, make_optimizer(network, run.settings))
    job.losses(network, job.batches(0), 0).mean().backward()
    whole.losses(other, whole.batches(0), 0).mean().backward()
    theirs = dict(other.named_parameters())
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, theirs[name].grad)
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("until", [1, 2, 3, 5])
def test_stopped_and_resumed_gives_the_same_bytes(tiny: Recipe, tmp_path: Path, until: int) -> None:
    run = method_run(tiny, "block_coordinate")
    run_job(BlockJob(run.recipe, "network", str(tmp_path / "at-once"), "block_coordinate"))
    for end in (until, None):
        run_job(BlockJob(run.recipe, "network", str(tmp_path / "resumed"), "block_coordinate", end))
    at_once, resumed = (tmp_path / name / "network.safetensors" for name in ("at-once", "resumed"))
    assert at_once.read_bytes() == resumed.read_bytes()


def test_one_block_is_end_to_end(tiny: Recipe, tmp_path: Path) -> None:
    recipe = replace(tiny, blocks=1)
    for method in ("block_coordinate", "end_to_end"):
        run_job(BlockJob(recipe, "network", str(tmp_path / method), method))
    ours, theirs = (load_file(tmp_path / name / "network.safetensors") for name in ("block_coordinate", "end_to_end"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_memory_lies_between_end_to_end_and_the_blocks(tiny: Recipe, tmp_path: Path) -> None:
    recipe = replace(tiny, training=replace(tiny.training, updates=12))
    rows = compare(recipe, ["end_to_end", "block_coordinate", "blocks"], tmp_path, run_job)["rows"]
    whole, coordinate, blocks = (row["peak_bytes"] for row in rows)
    assert coordinate["parameters"] == whole["parameters"] > blocks["parameters"]
    assert coordinate["optimizer"] < 0.6 * whole["optimizer"]
    assert coordinate["total"] < whole["total"]


def test_every_turn_is_metered(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metered: list[int] = []
    original = train._note
    monkeypatch.setattr(
        train, "_note", lambda *args: (metered.append(args[3]) if args[2] is not None else None, original(*args))
    )
    recipe = replace(tiny, training=replace(tiny.training, updates=12))
    run_job(BlockJob(recipe, "network", str(tmp_path), "block_coordinate"))
    assert metered == [0, 1, 2]
