"""Ours beside the baselines: one recipe, the same data and loop, the same number of layer evaluations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusionblocks import evaluate
from diffusionblocks.checkpoint import RunFolder, write_json
from diffusionblocks.config import InferenceSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.model import Denoiser
from diffusionblocks.partition import Call, plan_walk
from diffusionblocks.run import BASELINES, BlockJob, Run, baseline

CHECKPOINTED = "_checkpointed"
DEFAULT_METHODS = ("blocks", "end_to_end", "end_to_end_checkpointed", "blocks_checkpointed", "shallow_ensemble")
METHODS = (*DEFAULT_METHODS, "block_coordinate", "block_coordinate_checkpointed")
Runner = Callable[[BlockJob], dict[str, Any] | None]


def method_run(recipe: Recipe, method: str) -> Run:
    """The run of one row: "..._checkpointed" is the same method with activation checkpointing."""
    if method not in METHODS:
        raise InputError(f"unknown method '{method}': choose {', '.join(METHODS)}")
    checkpointing = method.endswith(CHECKPOINTED)
    training = replace(recipe.training, gradient_checkpointing=checkpointing)
    return Run.of(replace(recipe, training=training), method.removesuffix(CHECKPOINTED))


def compare(recipe: Recipe, methods: Sequence[str], out: Path, runner: Runner) -> dict[str, Any]:
    """Trains every method into its own folder below `out`, evaluates it on all test samples, writes comparison.json.

    Parts that are finished already are not trained again, so a killed comparison goes on where it stood.
    """
    runs = {method: method_run(recipe, method) for method in methods}
    folders = {method: run.folder(out / method) for method, run in runs.items()}
    rows = []
    for method, run in runs.items():
        figures = [runner(BlockJob(run.recipe, job.part, str(folders[method].path), run.method)) for job in run.jobs()]
        rows.append({"method": method, **test_figures(run, folders[method]), **work(figures)})
    comparison = {"recipe": recipe.name, "seed": recipe.seed, "rows": rows, "settings": recipe.to_dict()}
    write_json(out / "comparison.json", comparison)
    return comparison


def test_figures(run: Run, folder: RunFolder) -> dict[str, float]:
    """Accuracy, cross-entropy and calibration error on the whole test split, by the recipe's own walk and answer."""
    if run.method in BASELINES:
        beliefs = evaluate.baseline_beliefs(baseline(run.method), run.networks(folder), run.data)
        found = evaluate.figures_of(beliefs, evaluate.labels_of(run.data, "test"))
    else:
        found = walk_report(run, run.denoiser(folder), run.recipe.inference)
    return {f"test_{name}": found[name] for name in ("accuracy", "cross_entropy", "calibration_error")}


def plan_of(run: Run, inference: InferenceSettings) -> tuple[Call, ...]:
    """The walk's calls: as many as asked for, or one a block."""
    return plan_walk(run.family.partition, inference.steps or run.family.partition.blocks, inference.grid)


def walk_report(run: Run, denoiser: Denoiser, inference: InferenceSettings) -> dict[str, Any]:
    """The figures of the walk that the settings describe, on the whole test split."""
    return evaluate.chain_report(
        denoiser,
        run.data,
        plan_of(run, inference),
        inference.answer,
        start=inference.start,
        starts=inference.starts or 1,
        solver=inference.solver,
        seed=run.recipe.seed,
    )


def work(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Parts train one at a time: memory is the largest part's, time and work are summed over the parts."""
    done = [part for part in figures if part is not None]
    return {
        "peak_bytes": max((part["peak_bytes"] for part in done), key=lambda peak: peak["total"]),
        "seconds": round(sum(part["seconds"] for part in done), 2),
        "seconds_per_step": round(sum(part["seconds_per_step"] for part in done), 5),
        "layer_evaluations": sum(part["layer_evaluations"] for part in done),
    }
