"""Test accuracy of ours beside the baselines at equal layer evaluations.

    python benchmarks/quality.py seeds --updates 400        digits, 5 seeds: blocks, end to end, shallow ensemble
    python benchmarks/quality.py choices                    digits, 2 seeds: one choice of the recipe changed at a time
    python benchmarks/quality.py once --recipe vit-mnist --root DIR --updates 600

All test samples, seeded starts; every start and answer is shown, none is picked by the test split. A run that was
killed goes on where it stood (its folders lie in runs/quality).
"""

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import results_file
from diffusionblocks import evaluate, metrics, recipes
from diffusionblocks.checkpoint import RunFolder
from diffusionblocks.compare import test_figures, work
from diffusionblocks.config import Recipe
from diffusionblocks.partition import plan_walk
from diffusionblocks.run import Run
from diffusionblocks.train import fit

RUNS = Path(__file__).parent.parent / "runs" / "quality"
STARTS = (("zero", 1), ("random", 1), ("random", 4))
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "ours": {},
    "context joint": {"network": {"context": "joint"}},
    "readout z": {"network": {"readout": "z"}},
    "readout mix": {"network": {"readout": "mix"}},
    "gates 0": {"network": {"gates": 0.0}},
    "weight edm": {"top": {"weight": "edm"}},
    "weight edm_clamped": {"top": {"weight": "edm_clamped"}},
    "P_mean -1.2": {"noise": {"p_mean": -1.2}},
    "equal information": {"noise": {"law": "equal_information"}},
    "codes random, 64 dims": {"network": {"codes": "random", "code_dim": 64}},
    "codes of norm 4": {"network": {"code_norm": 4.0}},
    "shell joint": {"top": {"shell": "joint"}},
    "shell joint, codes learned": {"top": {"shell": "joint"}, "network": {"codes": "learned"}},
}


def changed(recipe: Recipe, changes: dict[str, dict[str, Any]]) -> Recipe:
    top = dict(changes.get("top", {}))
    for section in ("network", "noise"):
        top[section] = replace(getattr(recipe, section), **changes.get(section, {}))
    return replace(recipe, **top)


def train(run: Run, folder: RunFolder) -> list[dict[str, Any] | None]:
    return [fit(job, run.settings, folder) for job in run.jobs()]


def measure(name: str, recipe: Recipe, method: str) -> dict[str, Any]:
    """One run: trained, then evaluated from every start with both answers."""
    run = Run.of(recipe, method)
    folder = run.folder(RUNS / name.replace(" ", "-").replace(",", "") / method / f"seed-{recipe.seed}")
    figures = train(run, folder)
    row = {"name": name, "method": method, "seed": recipe.seed, **test_figures(run, folder), **work(figures)}
    if method == "blocks":
        row["accuracy"] = dict(every_answer(run, folder))
    shown = {key: f"{100 * value:.1f}" for key, value in row.get("accuracy", {}).items()}
    print(f"{name:<28} {method:<18} seed {recipe.seed}: {100 * row['test_accuracy']:.1f} % {shown}", flush=True)
    return row


def every_answer(run: Run, folder: RunFolder) -> Iterator[tuple[str, float]]:
    denoiser, partition = run.denoiser(folder), run.family.partition
    labels = evaluate.labels_of(run.data, "test")
    plan = plan_walk(partition, partition.blocks)
    for start, starts in STARTS:
        beliefs = evaluate.walk_beliefs(denoiser, run.data, plan, "test", start, starts, seed=run.recipe.seed)
        label = start if starts == 1 else f"mean of {starts}"
        for answer in ("last", "average"):
            yield f"{label}, {answer}", metrics.accuracy(evaluate.answer(beliefs, answer), labels)
        if start == "zero":
            for call, belief in zip(plan, beliefs, strict=True):
                yield f"zero, call {call.index}", metrics.accuracy(belief, labels)


def interval(values: list[float]) -> str:
    """Mean and 95 % confidence half-width in per cent; the value alone where there is one."""
    if len(values) < 2:
        return f"{100 * values[0]:.2f}"
    mean, half = results_file.mean_and_half_width(values)
    return f"{100 * mean:.2f} +- {100 * half:.2f}"


def summary(rows: list[dict[str, Any]]) -> None:
    for name, method in dict.fromkeys((row["name"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["name"], row["method"]) == (name, method)]
        text = interval([row["test_accuracy"] for row in mine])
        answers = {key: interval([row["accuracy"][key] for row in mine]) for key in mine[0].get("accuracy", {})}
        print(f"{name:<28} {method:<18} {text} % {answers or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=["seeds", "choices", "once"])
    parser.add_argument("--recipe", default="vit-digits", choices=recipes.RECIPES)
    parser.add_argument("--root", help="folder of the data files")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--train-examples", type=int)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--methods", nargs="+", default=["blocks", "end_to_end", "shallow_ensemble"])
    parser.add_argument("--only", nargs="+", help="names of choices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", help="of the result file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # The published recipe's sigma_data doesn't fit its codes: measured here all the same.
    warnings.filterwarnings("ignore", message="sigma_data")
    recipe = recipes.find(args.recipe)
    training = replace(recipe.training, updates=args.updates or recipe.training.updates)
    recipe = replace(
        recipe, training=training, data=replace(recipe.data, root=args.root, train_examples=args.train_examples)
    )
    seeds = args.seeds or {"seeds": [0, 1, 2, 3, 4], "choices": [0, 1], "once": [0]}[args.study]
    rows = []
    if args.study == "choices":
        for name in args.only or [*CHOICES, "paper"]:
            variant = recipes.paper(recipe) if name == "paper" else changed(recipe, CHOICES[name])
            rows += [measure(name, replace(variant, seed=seed), "blocks") for seed in seeds]
    else:
        name = f"{recipe.name} {training.updates}"
        rows = [measure(name, replace(recipe, seed=seed), method) for seed in seeds for method in args.methods]
    summary(rows)
    label = args.name or f"quality-{args.study}-{recipe.name}-{training.updates}"
    results_file.write(label, " ".join(["python", *sys.argv]), recipe.to_dict(), rows)


if __name__ == "__main__":
    main()
