"""Bytes against hand counts."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from diffusionblocks.compare import method_run
from diffusionblocks.config import Recipe
from diffusionblocks.executors.local import run_in_order
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.memory import KINDS, MemoryMeter
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import TrainSettings

FLOAT = 4


@pytest.fixture(scope="module", autouse=True)
def unfreeze() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_else() -> None:
    """Hides what the test session holds, so that counts are exact."""
    gc.collect()
    gc.freeze()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


MLP_BYTES = FLOAT * (8 * 16 + 16 + 16 * 4 + 4)


def trained_once(network: nn.Module, inputs: Tensor) -> AdamW:
    """An optimizer whose states exist."""
    optimizer = AdamW(network.parameters(), fused=True)
    network(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def watching(network: nn.Module, optimizer: AdamW, average: nn.Module | None = None) -> MemoryMeter:
    meter = MemoryMeter()
    meter.watch(network, optimizer, average)
    return meter


def bytes_of(module: nn.Module) -> int:
    """Every parameter and buffer once, whether or not it is saved."""
    return sum({id(t): t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()]}.values())


def states_bytes(module: nn.Module) -> int:
    """AdamW: two copies of each parameter, and a step counter of 4 bytes each."""
    return sum(2 * p.numel() * p.element_size() + 4 for p in module.parameters())


# At rest


def test_mlp_at_rest_is_exact_to_the_byte() -> None:
    network, inputs = mlp(), torch.ones(5, 8)
    optimizer = trained_once(network, inputs)
    with watching(network, optimizer) as meter:
        pass
    expected = {"parameters": MLP_BYTES, "gradients": 0, "optimizer": 2 * MLP_BYTES + 4 * 4, "activations": 5 * 8 * 4}
    assert meter.peak == {**expected, "total": sum(expected.values())}


def test_gradients_at_rest_are_counted() -> None:
    network, inputs = mlp(), torch.ones(5, 8)
    optimizer = trained_once(network, inputs)
    network(inputs).sum().backward()
    with watching(network, optimizer) as meter:
        pass
    assert meter.peak["gradients"] == meter.peak["parameters"] == MLP_BYTES


def test_average_counts_as_optimizer() -> None:
    network, average = mlp(), mlp()
    optimizer = trained_once(network, torch.ones(5, 8))
    with watching(network, optimizer, average) as meter:
        pass
    assert meter.peak["optimizer"] == 3 * MLP_BYTES + 4 * 4


def test_a_tensor_outside_is_counted() -> None:
    network = mlp()
    optimizer = trained_once(network, torch.ones(5, 8))
    with watching(network, optimizer) as alone:
        pass
    other_block = mlp()
    with watching(network, optimizer) as together:
        pass
    assert together.peak["total"] == alone.peak["total"] + bytes_of(other_block)
    assert together.peak["activations"] == alone.peak["activations"] + MLP_BYTES
    assert together.peak["parameters"] == alone.peak["parameters"]
    del other_block
    with watching(network, optimizer) as again:
        pass
    assert again.peak == alone.peak


def test_buffers_are_parameters_even_if_they_are_not_saved() -> None:
    network = nn.BatchNorm1d(10)
    network.register_buffer("table", torch.zeros(3, 10), persistent=False)
    optimizer = trained_once(network, torch.randn(4, 10))
    with watching(network, optimizer) as meter:
        pass
    # weight, bias, running mean and variance; the table; the count of batches is one int64.
    assert meter.peak["parameters"] == FLOAT * (4 * 10 + 30) + 8


# In motion


def test_views_are_counted_once_and_freed_tensors_leave() -> None:
    with MemoryMeter() as meter:
        whole = torch.zeros(1000)
        parts = [whole[:500], whole.view(10, 100), whole.T if whole.ndim == 2 else whole[None].transpose(0, 1)]
        assert meter.peak["total"] == 1000 * FLOAT
        copy = whole.clone()
        assert meter.peak["total"] == 2000 * FLOAT
        del copy
        again = whole.clone()
        assert meter.peak["total"] == 2000 * FLOAT
        del again, whole
        # A view keeps the storage; with the last one it goes.
        kept = torch.zeros(1000)
        assert meter.peak["total"] == 2000 * FLOAT
        parts.clear()
        other = torch.zeros(1000)
        assert meter.peak["total"] == 2000 * FLOAT
        third = torch.zeros(1000)
        assert meter.peak["total"] == 3000 * FLOAT
        del kept, other, third
    assert meter.peak == {**dict.fromkeys(KINDS, 0), "activations": 3000 * FLOAT, "total": 3000 * FLOAT}


def test_a_tensor_in_place_and_of_another_type_has_its_own_size() -> None:
    with MemoryMeter() as meter:
        wide = torch.zeros(100, dtype=torch.float64)
        wide.add_(1)
        small = wide.to(torch.bfloat16)
        flags = wide > 0
    assert meter.peak["activations"] == 100 * (8 + 2 + 1)
    del small, flags


def test_forward_pass_by_hand() -> None:
    n, network = 1000, mlp()
    optimizer = trained_once(network, torch.ones(1, 8))
    inputs = torch.ones(n, 8)
    with watching(network, optimizer) as meter:
        output = network(inputs)
    # The peak is at the ReLU: input, hidden, and its copy above 0.
    assert meter.peak["activations"] == FLOAT * n * (8 + 16 + 16)
    with watching(network, optimizer) as kept:
        pass
    # The graph keeps the input and the hidden above 0; the output is ours.
    assert kept.peak["activations"] == FLOAT * n * (8 + 16 + 4)
    del output


def test_step_with_a_large_scratch_tensor_is_exact() -> None:
    network, inputs = mlp(), torch.ones(1, 8)
    optimizer = trained_once(network, inputs)
    with watching(network, optimizer) as meter:
        network(inputs).sum().backward()
        scratch = torch.zeros(1000)
        optimizer.step()
        del scratch
        optimizer.zero_grad()
    assert meter.peak["parameters"] == MLP_BYTES
    assert meter.peak["gradients"] == MLP_BYTES
    assert meter.peak["optimizer"] == 2 * MLP_BYTES + 16
    assert meter.peak["activations"] == FLOAT * (8 + 1000)


def test_optimizer_states_that_a_step_makes_change_their_kind() -> None:
    network, inputs = mlp(), torch.ones(1, 8)
    optimizer = AdamW(network.parameters(), fused=True)
    with watching(network, optimizer) as meter:
        network(inputs).sum().backward()
        optimizer.step()
    assert meter.peak["optimizer"] == 2 * MLP_BYTES + 16
    assert meter.peak["total"] >= 4 * MLP_BYTES + 16


def test_an_error_inside_leaves_no_hooks() -> None:
    network, inputs = mlp(), torch.ones(1, 8)
    optimizer = trained_once(network, inputs)
    with pytest.raises(RuntimeError, match="planned"), watching(network, optimizer):
        raise RuntimeError("planned")
    assert not optimizer._optimizer_step_post_hooks
    assert all(not p._post_accumulate_grad_hooks for p in network.parameters())


def test_meter_changes_no_result() -> None:
    network, inputs = mlp(), torch.ones(3, 8)
    optimizer = trained_once(network, inputs)
    plain = network(inputs)
    with watching(network, optimizer):
        metered = network(inputs)
    assert torch.equal(plain, metered)


# As `fit` measures


def peak_of(recipe: Recipe, out: Path, part: str = "block-0", method: str = "blocks") -> dict[str, int]:
    figures = run_job(BlockJob(recipe, part, str(out), method))
    assert figures is not None
    peak: dict[str, int] = figures["peak_bytes"]
    assert peak["total"] == sum(peak[kind] for kind in KINDS)
    return peak


def two_updates(recipe: Recipe, **network: Any) -> Recipe:
    training = TrainSettings(updates=2, batch_size=16, warmup=0)
    return replace(recipe, training=training, network=replace(recipe.network, **network))


def test_vit_block_is_exact_to_the_byte(tiny: Recipe, tmp_path: Path) -> None:
    peak = peak_of(two_updates(tiny), tmp_path)
    block = Run.of(tiny).family.build_block(0)
    assert peak["parameters"] == bytes_of(block)
    assert peak["optimizer"] == states_bytes(block)
    assert peak["total"] >= bytes_of(block) + states_bytes(block)
    # By hand: the layer (qkv, projection, two norms, MLP, modulation), the stem, the head.
    w, m, c, patches, pixels, classes, dim = 16, 32, 4, 4, 16, 10, 9
    layer = 3 * w * w + 3 * w + w * w + w + 2 * 2 * w + 2 * w * m + m + w + 6 * w * (c + 1)
    shell = pixels * w + w + patches * w + w + dim * w + w + 32 * c + c + 2 * w + w * classes + classes
    assert sum(p.numel() for p in block.parameters()) == layer + shell


def test_a_large_stack_peaks_with_gradients(tiny: Recipe, tmp_path: Path) -> None:
    """Wide layers and few examples: the peak is in the second of two batches, beside every gradient of the first."""
    recipe = two_updates(tiny, width=64, mlp=256)
    recipe = replace(recipe, training=replace(recipe.training, batch_size=1, accumulate=2))
    peak = peak_of(recipe, tmp_path)
    block = Run.of(recipe).family.build_block(0)
    whole = sum(p.numel() * FLOAT for p in block.parameters())
    # One example's gradient of CLS is a view of all tokens' one.
    assert whole <= peak["gradients"] <= 1.02 * whole


def test_ema_is_one_more_copy(tiny: Recipe, tmp_path: Path) -> None:
    recipe = two_updates(tiny)
    with_average = replace(recipe, training=replace(recipe.training, ema=0.9))
    block = Run.of(tiny).family.build_block(0)
    # The copy, and its count of updates.
    expected = states_bytes(block) + bytes_of(block) + 8
    assert peak_of(with_average, tmp_path)["optimizer"] == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_joint_network_shows_the_states_of_all_blocks(tiny: Recipe, tmp_path: Path, accumulate: int) -> None:
    recipe = replace(two_updates(tiny), shell="joint")
    recipe = replace(recipe, training=replace(recipe.training, updates=5, accumulate=accumulate))
    network = Run.of(recipe).family.build_joint()
    peak = peak_of(recipe, tmp_path, "joint")
    assert peak["parameters"] == bytes_of(network)
    assert peak["optimizer"] == states_bytes(network)


@pytest.mark.parametrize("method", ["blocks", "end_to_end", "shallow_ensemble"])
def test_checkpointing_needs_fewer_activations(tiny: Recipe, tmp_path: Path, method: str) -> None:
    recipe = two_updates(tiny, layers=12)
    peaks = {}
    for on in (False, True):
        changed = replace(recipe, training=replace(recipe.training, gradient_checkpointing=on))
        part = Run.of(changed, method).jobs()[0].part
        peaks[on] = peak_of(changed, tmp_path / str(on), part, method)
    assert peaks[True]["activations"] < 0.6 * peaks[False]["activations"]
    assert peaks[True]["parameters"] == peaks[False]["parameters"]
    assert peaks[True]["optimizer"] == peaks[False]["optimizer"]


def test_a_block_needs_less_than_the_whole(tiny: Recipe, tmp_path: Path) -> None:
    recipe = two_updates(tiny, layers=12)
    block = peak_of(recipe, tmp_path / "block")
    (job,) = method_run(recipe, "end_to_end").jobs()
    whole = peak_of(recipe, tmp_path / "whole", job.part, "end_to_end")
    # A third of the layers, and a shell.
    for kind in ("parameters", "optimizer", "activations", "total"):
        assert block[kind] < 0.7 * whole[kind]


def test_peak_of_a_block_does_not_grow_with_depth(tmp_path: Path) -> None:
    totals = []
    for depth in (4, 8, 16):
        network = ViTSettings(layers=depth, width=16, heads=2, mlp=32, patch=4, condition_width=4)
        recipe = two_updates(Recipe(name="deep", blocks=depth // 2, network=network))
        totals.append(peak_of(recipe, tmp_path / str(depth), part=f"block-{depth // 2 - 1}")["total"])
    assert max(totals) <= 1.01 * min(totals)


def test_later_blocks_peak_as_if_alone(tiny: Recipe, tmp_path: Path) -> None:
    """After other blocks were trained in the same process, nothing of them is left."""
    recipe = two_updates(tiny)
    alone = peak_of(recipe, tmp_path / "alone", "block-2")
    jobs = [BlockJob(recipe, f"block-{number}", str(tmp_path / "all")) for number in range(3)]
    figures = run_in_order(jobs, run_job)
    assert figures[2] is not None
    assert figures[2]["peak_bytes"] == alone


# On CUDA


def test_allocator_is_asked_about_the_metered_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: calls.append("read") or 3)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5)
    with MemoryMeter() as meter:
        calls.append("step")
    assert calls == ["reset", "step", "read"]
    assert meter.device_peak == {"allocated": 3, "reserved": 5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_there_is_no_allocator_to_ask() -> None:
    with MemoryMeter() as meter:
        pass
    assert meter.device_peak is None
