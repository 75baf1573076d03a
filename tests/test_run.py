"""Runs: blocks that don't know of each other, equal work for every method, and the comparison's contract."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diffusionblocks import run as run_module
from diffusionblocks import train
from diffusionblocks.block import ConditionedLayer
from diffusionblocks.cli import main
from diffusionblocks.compare import METHODS, compare, method_run, work
from diffusionblocks.config import DataSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.executors.local import run_in_order, run_in_rotation
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.report import loss_curve
from diffusionblocks.run import BASELINES, BlockJob, Run, run_job
from diffusionblocks.train import TrainSettings

RECIPE = Recipe(
    name="runs",
    network=ViTSettings(layers=6, width=16, heads=2, mlp=32, patch=4, condition_width=4),
    training=TrainSettings(updates=6, batch_size=16, warmup=1, checkpoint_every=4),
    data=DataSettings(train_examples=100),
)
PARTS = ("block-0", "block-1", "block-2")


pytestmark = pytest.mark.usefixtures("little_to_sweep")


def jobs(folder: Path, recipe: Recipe = RECIPE) -> list[BlockJob]:
    return [BlockJob(recipe, part, str(folder)) for part in PARTS]


def weights(folder: Path, part: str) -> bytes:
    return (folder / f"{part}.safetensors").read_bytes()


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All blocks, one after another."""
    folder = tmp_path_factory.mktemp("runs") / "in-order"
    figures = run_in_order(jobs(folder), run_job)
    assert [figure["part"] for figure in figures if figure] == list(PARTS)
    return folder


# Independence


@pytest.mark.parametrize("part", PARTS)
def test_a_block_alone_has_the_bytes_it_has_among_others(in_order: Path, tmp_path: Path, part: str) -> None:
    run_job(BlockJob(RECIPE, part, str(tmp_path)))
    assert weights(tmp_path, part) == weights(in_order, part)
    assert loss_curve(tmp_path, part) == loss_curve(in_order, part)
    assert not [path for path in tmp_path.glob("block-*") if not path.name.startswith(part)]


@pytest.mark.parametrize("visit", [2, 4, 100])
def test_rotation_gives_the_same_bytes(in_order: Path, tmp_path: Path, visit: int) -> None:
    """Visits of 2 of 6 updates, of 4, which doesn't divide them, and of more than all."""
    visits = []

    def noted(job: BlockJob) -> dict[str, Any] | None:
        visits.append(job.part)
        return run_job(job)

    figures = run_in_rotation(jobs(tmp_path), noted, visit)
    assert all(figure is not None for figure in figures)
    assert visits == list(PARTS) * {2: 3, 4: 2, 100: 1}[visit]
    for part in PARTS:
        assert weights(tmp_path, part) == weights(in_order, part)
        assert loss_curve(tmp_path, part) == loss_curve(in_order, part)


def test_backwards_gives_the_same_bytes(in_order: Path, tmp_path: Path) -> None:
    run_in_order(jobs(tmp_path)[::-1], run_job)
    assert all(weights(tmp_path, part) == weights(in_order, part) for part in PARTS)


def test_a_visit_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="visit of 0"):
        run_in_rotation(jobs(tmp_path), run_job, 0)


def snapshot(folder: Path, except_part: str) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file() and except_part not in str(path.relative_to(folder))]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_training_a_block_touches_no_other_file(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path)))
    run_job(BlockJob(RECIPE, "block-2", str(tmp_path), until=1))
    before = snapshot(tmp_path, "block-1")
    # Manifest, weights and figures of block 0; states of blocks 0 and 2, three locks; two logs.
    assert len(before) == 10
    time.sleep(0.01)  # so that a rewritten file would have another time
    for until in (1, 5, None):
        run_job(BlockJob(RECIPE, "block-1", str(tmp_path), until=until))
        assert snapshot(tmp_path, "block-1") == before


@pytest.mark.parametrize("method", ["blocks", "joint", *BASELINES])
def test_global_random_states_do_not_matter_and_stay(tmp_path: Path, method: str) -> None:
    recipe = replace(RECIPE, shell="joint") if method == "joint" else RECIPE
    name = "blocks" if method == "joint" else method
    part = Run.of(recipe, name).jobs()[-1].part
    written = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), str(np.random.get_state())
        run_job(BlockJob(recipe, part, str(tmp_path / str(seed)), name))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert str(np.random.get_state()) == before[1]
        written.append(weights(tmp_path / str(seed), part))
    assert written[0] == written[1]


def test_another_seed_gives_other_weights_to_every_block(in_order: Path, tmp_path: Path) -> None:
    for part in PARTS:
        run_job(BlockJob(replace(RECIPE, seed=1), part, str(tmp_path)))
        assert weights(tmp_path, part) != weights(in_order, part)


def test_blocks_start_and_draw_differently(in_order: Path) -> None:
    first, second = (load_file(in_order / f"{part}.safetensors") for part in PARTS[:2])
    assert not torch.equal(first["shells.0.cls"], second["shells.1.cls"])
    run = Run.of(RECIPE)
    x = [run.batches(block)(0).x for block in range(3)]
    assert not torch.equal(x[0], x[1])


# Equal work


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_method_evaluates_as_many_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """What is counted by hand in the layers' forward passes is what is written down, and alike for all."""
    seen = [0]
    forward = ConditionedLayer.forward

    def counted(self: ConditionedLayer, h: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen[0] += len(h) if torch.is_grad_enabled() else 0
        return forward(self, h, *rest)

    monkeypatch.setattr(ConditionedLayer, "forward", counted)
    recipe = replace(RECIPE, training=replace(RECIPE.training, accumulate=accumulate))
    expected = 6 * 16 * 6 * accumulate  # updates, examples, layers
    for method in ("blocks", *BASELINES, "joint"):
        changed = replace(recipe, shell="joint") if method == "joint" else recipe
        name = "blocks" if method == "joint" else method
        seen[0], written = 0, 0
        for job in Run.of(changed, name).jobs():
            figures = run_job(BlockJob(changed, job.part, str(tmp_path / method), name))
            assert figures is not None
            written += figures["layer_evaluations"]
        assert (written, seen[0]) == (expected, expected), method


def test_joint_runs_blocks_times_the_updates() -> None:
    joint, alone = Run.of(replace(RECIPE, shell="joint")), Run.of(RECIPE)
    assert (joint.settings.updates, joint.settings.warmup) == (18, 3)
    assert (alone.settings.updates, alone.settings.warmup) == (6, 1)
    assert Run.of(replace(RECIPE, shell="joint"), "end_to_end").settings.updates == 6


def test_a_joint_update_draws_one_block_for_all_accumulated_batches() -> None:
    recipe = replace(RECIPE, shell="joint", training=replace(RECIPE.training, accumulate=3))
    run = Run.of(recipe)
    (job,) = run.jobs()
    network = job.build()
    resting = {update: {id(p) for p in job.idle(network, update)} for update in range(12)}
    for step in range(36):
        network.zero_grad()
        job.losses(network, job.batches(step), step).mean().backward()
        used = {id(p) for p in network.parameters() if p.grad is not None}
        assert not used & resting[step // 3]
        assert used | resting[step // 3] == {id(p) for p in network.parameters()}
    # Every block had a turn.
    assert len({frozenset(rest) for rest in resting.values()}) == 3


# Refusals


def refused(action: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(InputError, match=pattern) as caught:
        action()
    assert "\n" not in str(caught.value)


def test_unknown_method_is_refused(tmp_path: Path) -> None:
    refused(
        lambda: run_job(BlockJob(RECIPE, "network", str(tmp_path), "magic")), "unknown method 'magic': choose blocks"
    )
    refused(lambda: compare(RECIPE, ["blocks", "magic"], tmp_path / "out", run_job), "unknown method 'magic': choose")
    refused(lambda: method_run(RECIPE, "end_to_end_checkpointed_checkpointed"), "unknown method")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["block-3", "block--1", "network", "../block-0", ""])
def test_a_part_that_does_not_exist_is_refused(tmp_path: Path, part: str) -> None:
    refused(lambda: run_job(BlockJob(RECIPE, part, str(tmp_path / "out"))), "there is no .*block-0, block-1, block-2")
    assert not (tmp_path / "out").exists()


def test_one_block_of_a_joint_network_is_refused(tmp_path: Path) -> None:
    recipe = replace(RECIPE, shell="joint")
    refused(lambda: run_job(BlockJob(recipe, "block-1", str(tmp_path))), "there is no block-1: this run trains joint")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [(["--block", "3"], "block 3 doesn't exist: choose 0 to 2"), (["--shell", "joint", "--block", "0"], "joint shell")],
)
def test_command_line_refuses_blocks_that_cannot_train_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["train", "vit-digits", "--out", str(tmp_path / "out"), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_uneven_joint_network_is_refused() -> None:
    recipe = replace(RECIPE, shell="joint", layer_split=(1, 2, 4), network=replace(RECIPE.network, layers=7))
    refused(lambda: Run.of(recipe).jobs(), "blocks of equal size")
    # Each block counts its own layers where they train alone.
    alone = Run.of(replace(recipe, shell="per_block"))
    assert [job.layers for job in alone.jobs()] == [1, 2, 4]


# The comparison


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("comparison") / "out"
    return out, compare(RECIPE, METHODS, out, run_job)


def test_rows_keep_their_contract(compared: tuple[Path, dict[str, Any]]) -> None:
    out, comparison = compared
    assert json.loads((out / "comparison.json").read_text()) == json.loads(json.dumps(comparison))
    assert (comparison["recipe"], comparison["seed"]) == ("runs", 0)
    assert [row["method"] for row in comparison["rows"]] == list(METHODS)
    for row in comparison["rows"]:
        assert {
            "method",
            "test_accuracy",
            "peak_bytes",
            "seconds",
            "seconds_per_step",
            "layer_evaluations",
        } <= row.keys()
        assert set(row["peak_bytes"]) == {"parameters", "gradients", "optimizer", "activations", "total"}
        assert all(type(count) is int for count in row["peak_bytes"].values())
        assert sum(row["peak_bytes"].values()) == 2 * row["peak_bytes"]["total"]
        assert 0 <= row["test_accuracy"] <= 1
        assert round(row["test_accuracy"] * 360) == pytest.approx(row["test_accuracy"] * 360, abs=1e-3)
        assert row["seconds"] > 0
        assert row["seconds_per_step"] > 0
        assert row["layer_evaluations"] == 6 * 16 * 6


def test_checkpointed_rows_are_the_same_networks(compared: tuple[Path, dict[str, Any]]) -> None:
    out, comparison = compared
    rows = {row["method"]: row for row in comparison["rows"]}
    for method in ("blocks", "end_to_end"):
        twin = f"{method}_checkpointed"
        for path in (out / method).glob("*.safetensors"):
            assert path.read_bytes() == (out / twin / path.name).read_bytes()
        assert rows[method]["test_accuracy"] == rows[twin]["test_accuracy"]
        assert rows[twin]["peak_bytes"]["activations"] < rows[method]["peak_bytes"]["activations"]


def test_blocks_of_the_comparison_are_those_trained_alone(
    compared: tuple[Path, dict[str, Any]], in_order: Path
) -> None:
    assert all(weights(compared[0] / "blocks", part) == weights(in_order, part) for part in PARTS)


def test_a_second_comparison_trains_nothing(
    compared: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, first = compared
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    monkeypatch.setattr(train, "train_step", lambda *_: pytest.fail("it trained again"))
    assert compare(RECIPE, METHODS, out, run_job) == first
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}


def test_work_takes_the_largest_part_and_adds_the_rest() -> None:
    def part(total: int) -> dict[str, Any]:
        peak = {"parameters": total, "total": total}
        return {"peak_bytes": peak, "seconds": 1.5, "seconds_per_step": 0.25, "layer_evaluations": 10}

    found = work([part(3), part(9), part(4)])
    assert found["peak_bytes"]["total"] == 9
    assert (found["seconds"], found["seconds_per_step"], found["layer_evaluations"]) == (4.5, 0.75, 30)


def test_a_comparison_of_one_update_has_all_figures(tmp_path: Path) -> None:
    recipe = replace(RECIPE, training=replace(RECIPE.training, updates=1, warmup=0))
    (row,) = compare(recipe, ["blocks"], tmp_path, run_job)["rows"]
    assert row["peak_bytes"]["total"] > 0


def test_a_baseline_is_loaded_only_when_asked_for() -> None:
    for name in BASELINES:
        assert run_module.baseline(name).__name__ == f"diffusionblocks.baselines.{name}"
