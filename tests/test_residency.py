"""Idle blocks: paged to disk or host memory with the same bits, a usable model at any time, starts from checkpoints."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusionblocks import train
from diffusionblocks.baselines.end_to_end import jobs as plain_jobs
from diffusionblocks.checkpoint import State, own_tensors
from diffusionblocks.cli import main
from diffusionblocks.compare import method_run
from diffusionblocks.config import Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.evaluate import chain_report
from diffusionblocks.executors.local import run_in_order, run_in_rotation
from diffusionblocks.partition import plan_walk
from diffusionblocks.report import loss_curve
from diffusionblocks.residency import HostMemory
from diffusionblocks.run import BlockJob, Run, run_job, start_block

PARTS = ("block-0", "block-1", "block-2")


def jobs(recipe: Recipe, folder: Path) -> list[BlockJob]:
    return [BlockJob(recipe, part, str(folder)) for part in PARTS]


def weights(folder: Path) -> list[bytes]:
    return [(folder / f"{part}.safetensors").read_bytes() for part in PARTS]


@pytest.fixture
def in_order(tiny: Recipe, tmp_path: Path) -> Path:
    run_in_order(jobs(tiny, tmp_path / "in-order"), run_job)
    return tmp_path / "in-order"


# Rotation


@pytest.mark.parametrize("visit", [1, 3, 4, 6])
@pytest.mark.parametrize("place", ["disk", "host"])
def test_rotation_gives_the_bits_of_training_in_order(
    tiny: Recipe, in_order: Path, tmp_path: Path, place: str, visit: int
) -> None:
    host = HostMemory() if place == "host" else None
    run_in_rotation(jobs(tiny, tmp_path / "turns"), partial(run_job, host=host), visit)
    assert weights(tmp_path / "turns") == weights(in_order)


@pytest.mark.parametrize("place", ["disk", "host"])
def test_loss_curves_have_no_gap(tiny: Recipe, in_order: Path, tmp_path: Path, place: str) -> None:
    host = HostMemory() if place == "host" else None
    run_in_rotation(jobs(tiny, tmp_path / "turns"), partial(run_job, host=host), 3)
    for part in PARTS:
        assert loss_curve(tmp_path / "turns", part) == loss_curve(in_order, part)


def test_host_memory_keeps_the_ema_too(tiny: Recipe, tmp_path: Path) -> None:
    averaged = replace(tiny, training=replace(tiny.training, ema=0.9))
    run_in_order(jobs(averaged, tmp_path / "in-order"), run_job)
    run_in_rotation(jobs(averaged, tmp_path / "turns"), partial(run_job, host=HostMemory()), 2)
    assert weights(tmp_path / "turns") == weights(tmp_path / "in-order")


def test_visits_between_two_checkpoints_write_nothing_with_host_memory(tiny: Recipe, tmp_path: Path) -> None:
    host, run = HostMemory(), Run.of(tiny)
    folder = run.folder(tmp_path)
    run_job(BlockJob(tiny, "block-0", str(tmp_path), until=1), host=host)
    assert folder.load_state("block-0") is None
    run_job(BlockJob(tiny, "block-0", str(tmp_path), until=3), host=host)
    state = folder.load_state("block-0")
    assert state is not None
    assert state.update == 2


def test_host_memory_is_saved_when_asked(tiny: Recipe, in_order: Path, tmp_path: Path) -> None:
    host, run = HostMemory(), Run.of(tiny)
    out = tmp_path / "stopped"
    for part in PARTS:
        run_job(BlockJob(tiny, part, str(out), until=3), host=host)
    host.save()
    states = [run.folder(out).load_state(part) for part in PARTS]
    assert [state.update for state in states if state is not None] == [3, 3, 3]
    run_in_order(jobs(tiny, out), run_job)
    assert weights(out) == weights(in_order)


def test_two_folders_do_not_share_host_memory(tiny: Recipe, tmp_path: Path) -> None:
    host, run = HostMemory(), Run.of(tiny)
    first, second = run.folder(tmp_path / "a"), run.folder(tmp_path / "b")
    host.page_out(first, "block-0", State(1, {"x": torch.zeros(1)}, {}))
    assert host.page_in(second, "block-0") is None
    found = host.page_in(first, "block-0")
    assert found is not None
    assert found.update == 1
    assert host.page_in(first, "block-0") is None


@pytest.mark.parametrize("settings", [{}, {"ema": 0.9}, {"precision": "bf16-mixed"}, {"gradient_checkpointing": True}])
def test_nothing_of_a_block_is_left_after_a_visit(
    tiny: Recipe, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Visits aren't followed by a garbage collection: no cycle may hold a block's tensors."""
    left: list[weakref.ref[Any]] = []
    original = train.make_optimizer

    def noted(network: nn.Module, given: train.TrainSettings) -> torch.optim.Optimizer:
        optimizer = original(network, given)
        left.extend([weakref.ref(network), weakref.ref(optimizer), *map(weakref.ref, network.parameters())])
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", noted)
    recipe = replace(tiny, training=replace(tiny.training, **settings))
    gc.collect()
    gc.disable()
    try:
        run_job(BlockJob(recipe, "block-0", str(tmp_path), until=3))
    finally:
        gc.enable()
    assert left
    assert [found() for found in left] == [None] * len(left)


def test_page_to_needs_a_rotation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "vit-digits", "--page-to", "host"]) == 2
    assert "no effect without --rotate" in capsys.readouterr().err


# A usable model at any time


def test_unfinished_blocks_answer_as_last_saved(tiny: Recipe, tmp_path: Path) -> None:
    run = Run.of(tiny)
    for part, until in zip(PARTS, (2, 4, None), strict=True):
        run_job(BlockJob(tiny, part, str(tmp_path), until=until))
    denoiser = run.denoiser(run.folder(tmp_path))
    with pytest.warns(UserWarning, match="block-0 isn't finished: its weights after update 2 are used"):
        first = denoiser.block(0)
    state = run.folder(tmp_path).load_state("block-0")
    assert state is not None
    for name, tensor in own_tensors(first).items():
        assert torch.equal(tensor, state.tensors[f"module/{name}"])
    with pytest.warns(UserWarning, match="isn't finished"):
        found = chain_report(denoiser, run.data, plan_walk(run.family.partition, 3), "average")
    assert 0 <= found["accuracy"] <= 1


def test_unfinished_blocks_answer_with_their_average(tiny: Recipe, tmp_path: Path) -> None:
    averaged = replace(tiny, training=replace(tiny.training, ema=0.9))
    run = Run.of(averaged)
    run_job(BlockJob(averaged, "block-0", str(tmp_path), until=4))
    with pytest.warns(UserWarning, match="isn't finished"):
        block = run.denoiser(run.folder(tmp_path)).block(0)
    state = run.folder(tmp_path).load_state("block-0")
    assert state is not None
    for name, tensor in own_tensors(block).items():
        assert torch.equal(tensor, state.tensors[f"average/module.{name}"])


def test_a_block_that_was_never_saved_cannot_answer(tiny: Recipe, tmp_path: Path) -> None:
    run = Run.of(tiny)
    with pytest.raises(InputError, match="missing or unfinished"):
        run.denoiser(run.folder(tmp_path)).block(0)


# Starting from a checkpoint


def starting_from(tiny: Recipe, source: Path) -> Recipe:
    return replace(tiny, training=replace(tiny.training, start_from=str(source)))


def test_blocks_start_from_another_run(tiny: Recipe, in_order: Path, tmp_path: Path) -> None:
    recipe = starting_from(tiny, in_order)
    block = Run.of(recipe).family.build_block(1)
    start_block(str(in_order), block)
    trained = load_file(in_order / "block-1.safetensors")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in own_tensors(block).items())
    run_in_order(jobs(recipe, tmp_path / "tuned"), run_job)
    assert weights(tmp_path / "tuned") != weights(in_order)


def test_the_checkpoint_decides_the_result_and_its_place_does_not(tiny: Recipe, in_order: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    run_in_order(jobs(starting_from(tiny, in_order), tmp_path / "tuned"), run_job)
    in_order.rename(moved)
    assert run_in_order(jobs(starting_from(tiny, moved), tmp_path / "tuned"), run_job)
    with pytest.raises(InputError, match=r"training\.start_checksum"):
        run_job(jobs(tiny, tmp_path / "tuned")[0])


def test_a_tuned_run_is_evaluated_without_its_checkpoint(tiny: Recipe, in_order: Path, tmp_path: Path) -> None:
    run_in_order(jobs(starting_from(tiny, in_order), tmp_path / "tuned"), run_job)
    in_order.rename(tmp_path / "gone")
    assert main(["evaluate", str(tmp_path / "tuned")]) == 0


def test_resuming_does_not_start_again(tiny: Recipe, in_order: Path, tmp_path: Path) -> None:
    recipe = starting_from(tiny, in_order)
    run_in_order(jobs(recipe, tmp_path / "at-once"), run_job)
    run_in_rotation(jobs(recipe, tmp_path / "turns"), run_job, 2)
    assert weights(tmp_path / "turns") == weights(tmp_path / "at-once")


def test_blocks_start_from_an_end_to_end_network(tiny: Recipe, tmp_path: Path) -> None:
    run = method_run(tiny, "end_to_end")
    (job,) = plain_jobs(run.family, run.batches, run.settings)
    run_job(BlockJob(run.recipe, job.part, str(tmp_path / "plain"), "end_to_end"))
    plain = load_file(tmp_path / "plain" / "network.safetensors")
    block = run.family.build_block(1)
    with pytest.warns(UserWarning, match="they start anew"):
        start_block(str(tmp_path / "plain"), block)
    assert torch.equal(block.stack.layers["1"].mlp[0].weight, plain["stack.layers.1.mlp.0.weight"])
    assert torch.equal(block.shell.patches.project.weight, plain["patches.project.weight"])
    assert torch.equal(block.shell.head.weight, plain["head.weight"])


def test_a_checkpoint_of_another_network_is_refused(tiny: Recipe, tmp_path: Path) -> None:
    save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="none of this block's layers"):
        run_job(jobs(starting_from(tiny, tmp_path / "other.safetensors"), tmp_path / "out")[0])


def test_a_checkpoint_that_is_not_there_is_refused(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no checkpoint"):
        Run.of(starting_from(tiny, tmp_path / "nowhere"))
