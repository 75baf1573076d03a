"""Time of one training step: the sum over all blocks against end to end: python benchmarks/walltime.py

The same network, batch and loop (`train_step`), interleaved update by update in one run; medians and their ratio. The
paper reports 1.07 for its recipe.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

import results_file
from diffusionblocks.config import Recipe
from diffusionblocks.recipes import VIT_DIGITS
from diffusionblocks.run import Run
from diffusionblocks.train import make_fabric, make_optimizer, train_step
from paper_network import paper_network, run_of


def stepper(run: Run, index: int) -> Callable[[int], float]:
    job = run.jobs()[index]
    network = job.build()
    fabric = make_fabric(run.settings)
    module, optimizer = fabric.setup(network, make_optimizer(network, run.settings))
    return lambda update: train_step(fabric, module, optimizer, job, run.settings, update)


def measure(
    recipe: Recipe, make_run: Callable[[Recipe, str], Run], updates: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds of each update of: end to end, block 0, block 1, ..."""
    steppers = [stepper(make_run(recipe, "end_to_end"), 0)]
    steppers += [stepper(make_run(recipe, "blocks"), block) for block in range(recipe.blocks)]
    seconds: list[list[float]] = [[] for _ in steppers]
    for update in range(updates + warm_up):
        for times, step in zip(seconds, steppers, strict=True):
            started = time.perf_counter()
            step(update)
            times.append(time.perf_counter() - started)
    return [times[warm_up:] for times in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    cases = [("paper network", paper_network(12, False, blocks=blocks), run_of) for blocks in (3, 6)]
    cases.append(("vit-digits", VIT_DIGITS, Run.of))
    for name, recipe, make_run in cases:
        seconds = measure(recipe, make_run, args.updates)
        medians = [statistics.median(times) for times in seconds]
        # Each update gives one ratio too: their spread says how much the machine wavered.
        ratios = sorted(sum(blocks) / whole for whole, *blocks in zip(*seconds, strict=True))
        ratio = sum(medians[1:]) / medians[0]
        rows.append(
            {
                "network": name,
                "blocks": recipe.blocks,
                "end_to_end_seconds": medians[0],
                "block_seconds": medians[1:],
                "ratio": ratio,
                "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
            }
        )
        print(
            f"{name}, B = {recipe.blocks}: end to end {medians[0]:.3f} s, blocks "
            f"{' + '.join(f'{median:.3f}' for median in medians[1:])} s, ratio {ratio:.3f} "
            f"(quartiles {rows[-1]['ratio_quartiles'][0]:.3f} to {rows[-1]['ratio_quartiles'][1]:.3f})"
        )
    results_file.write("walltime", " ".join(["python", *sys.argv]), {"updates": args.updates}, rows)


if __name__ == "__main__":
    main()
