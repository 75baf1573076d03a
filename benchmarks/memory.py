"""Peak training memory by kind, counted exactly and planned: python benchmarks/memory.py

Four series: against depth (4 layers a block), the number of blocks at 48 layers, the batch size at 12 layers (all with
the ViT of `paper_network.py`), and the vocabulary (a small Llama-shaped network). Parts are trained two updates through
`fit`, and the second is counted. Of the blocks the first is trained: they differ in nothing but their numbers.
`planned_total` is what `diffusionblocks plan` says of the same.

    python benchmarks/memory.py --draw      only draws docs/memory.png from the result file
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import results_file
from diffusionblocks.checkpoint import RunFolder, write_atomic
from diffusionblocks.compare import CHECKPOINTED
from diffusionblocks.config import Recipe
from diffusionblocks.families.causal_lm import CausalLMSettings, TokenBatch
from diffusionblocks.memory import KINDS
from diffusionblocks.plan import METHODS, plan
from diffusionblocks.report import COLOURS
from diffusionblocks.run import baseline, shaped_family
from diffusionblocks.train import Job, TrainSettings, fit
from paper_network import paper_network, run_of

MIB = 2**20
PICTURE = Path(__file__).parents[1] / "docs" / "memory.png"


def images(recipe: Recipe, method: str) -> Job:
    return run_of(recipe, method).jobs()[0]


def text(recipe: Recipe, method: str) -> Job:
    """The first block, or the baseline's network, on random tokens."""
    family, network, training = shaped_family(recipe), recipe.network, recipe.training
    assert isinstance(network, CausalLMSettings)

    def batches(step: int) -> TokenBatch:
        shape = (training.batch_size, network.tokens + 1)
        return TokenBatch(torch.randint(network.vocabulary, shape, generator=torch.Generator().manual_seed(step)))

    if method != "blocks":
        return baseline(method).jobs(family, lambda block: batches, training)[0]
    build = partial(family.build_block, 0)
    return Job("block-0", 1, build, batches, lambda block, batch, step: family.step_losses(block, batch, 0, step))


def measured(recipe: Recipe, method: str, make: Callable[[Recipe, str], Job]) -> dict[str, Any]:
    name = method.removesuffix(CHECKPOINTED)
    training = replace(recipe.training, gradient_checkpointing=method.endswith(CHECKPOINTED))
    recipe = replace(recipe, training=training)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        job = make(recipe, name)
        # The first block's turn is the one that counts: the run ends with it.
        figures = fit(replace(job, turn=lambda update: 0), training, RunFolder(folder, {}))
    assert figures is not None
    (row,) = plan(recipe, [recipe.blocks], [method])
    return {"peak_bytes": figures["peak_bytes"], "planned_total": row.peak_bytes["total"]}


def series(depths: list[int]) -> Iterator[tuple[str, int, Recipe, Callable[[Recipe, str], Job]]]:
    for depth in depths:
        yield "layers", depth, paper_network(depth, False), images
    for blocks in (2, 3, 4, 6, 12, 24, 48):
        yield "blocks", blocks, paper_network(48, False, blocks=blocks), images
    for batch_size in (8, 32, 128):
        recipe = paper_network(12, False)
        yield (
            "batch_size",
            batch_size,
            replace(recipe, training=replace(recipe.training, batch_size=batch_size)),
            images,
        )
    for vocabulary in (256, 32_000):
        for chunk in (0, 64):
            network = CausalLMSettings(layers=12, width=128, mlp=384, vocabulary=vocabulary, tokens=128, chunk=chunk)
            training = TrainSettings(updates=2, batch_size=8, warmup=0)
            recipe = Recipe("text", "causal_lm", blocks=3, network=network, training=training)
            yield f"vocabulary, chunks of {chunk}" if chunk else "vocabulary", vocabulary, recipe, text


def draw(rows: list[dict[str, Any]]) -> None:
    """Peak memory against depth, both axes logarithmic; a flat line is what blocks are for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    found = [row for row in rows if row["series"] == "layers"]
    for method, colour in zip(METHODS, COLOURS, strict=True):
        points = [(row["value"], row["peak_bytes"]["total"] / MIB) for row in found if row["method"] == method]
        style = "--" if method.endswith(CHECKPOINTED) else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", color=colour, label=method.replace("_", " "))
    axes.set(xscale="log", yscale="log", xlabel="layers (4 a block)", ylabel="MiB at the peak of a training step")
    depths = sorted({row["value"] for row in found})
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.minorticks_off()
    axes.set_title("Training memory against depth: ViT 128 wide, MLP 3072, batch 32")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    write_atomic(PICTURE, lambda draft: figure.savefig(draft, format="png", dpi=120))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48, 96, 192])
    parser.add_argument("--name", default="memory")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the result file, measure nothing")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads((results_file.RESULTS / f"{args.name}.json").read_text())["rows"])
        return
    rows = []
    print(
        f"{'series':<24}{'value':>7} {'method':<30}" + "".join(f"{kind:>13}" for kind in (*KINDS, "total", "planned"))
    )
    for name, value, recipe, make in series(args.depths):
        for method in METHODS:
            if name == "blocks" and not method.startswith("blocks"):
                continue  # the depth series has them
            row = {"series": name, "value": value, "method": method, **measured(recipe, method, make)}
            rows.append(row)
            cells = [*(row["peak_bytes"][kind] for kind in (*KINDS, "total")), row["planned_total"]]
            print(f"{name:<24}{value:>7} {method:<30}" + "".join(f"{cell / MIB:13.1f}" for cell in cells), flush=True)
    total = {(row["series"], row["value"], row["method"]): row["peak_bytes"]["total"] for row in rows}
    for depth in args.depths:
        ratio = total["layers", depth, "blocks_checkpointed"] / total["layers", depth, "end_to_end_checkpointed"]
        print(f"{depth} layers: blocks with checkpointing / end to end with checkpointing = {ratio:.3f}")
    for method in ("blocks", "blocks_checkpointed"):
        flat = [total["layers", depth, method] for depth in args.depths]
        print(f"{method} over all depths: largest / smallest = {max(flat) / min(flat):.5f}")
    off = max(abs(row["planned_total"] / row["peak_bytes"]["total"] - 1) for row in rows)
    print(f"planned against counted: {100 * off:.2f} % apart at most")
    results_file.write(args.name, " ".join(["python", *sys.argv]), {"layers_per_block": 4, "batch_size": 32}, rows)


if __name__ == "__main__":
    main()
