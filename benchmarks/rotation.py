"""What paging costs: training in rotation against training in order: python benchmarks/rotation.py

Wall time of whole runs, built, trained, saved and validated, interleaved in one process: every part to its end; visits
of 50 updates with idle blocks on disk; the same with idle blocks in main memory. All three end with the same bytes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import results_file
from diffusionblocks.config import Recipe
from diffusionblocks.executors.local import Runner, run_in_order, run_in_rotation
from diffusionblocks.recipes import VIT_DIGITS
from diffusionblocks.residency import HostMemory
from diffusionblocks.run import BlockJob, run_job


def run(recipe: Recipe, visit: int | None, runner: Runner) -> tuple[float, bytes]:
    """Seconds, and the weights of all blocks."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [f"block-{block}" for block in range(recipe.blocks)]
        jobs = [BlockJob(recipe, part, folder) for part in parts]
        started = time.perf_counter()
        if visit is None:
            run_in_order(jobs, runner)
        else:
            run_in_rotation(jobs, runner, visit)
        seconds = time.perf_counter() - started
        return seconds, b"".join((Path(folder) / f"{part}.safetensors").read_bytes() for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visit", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    training = replace(VIT_DIGITS.training, updates=2 * args.visit, checkpoint_every=args.visit)
    wide = replace(VIT_DIGITS.network, layers=8, width=512, heads=8, mlp=2048)
    recipes = {
        "vit-digits": replace(VIT_DIGITS, training=training),
        "512 wide": replace(VIT_DIGITS, network=wide, blocks=2, training=replace(training, batch_size=32)),
    }
    rows = []
    for name, recipe in recipes.items():
        seconds: dict[str, list[float]] = {"in order": [], "to disk": [], "to host memory": []}
        for _ in range(args.rounds):
            found = {
                "in order": run(recipe, None, run_job),
                "to disk": run(recipe, args.visit, run_job),
                "to host memory": run(recipe, args.visit, partial(run_job, host=HostMemory())),
            }
            assert len({weights for _, weights in found.values()}) == 1, "rotation changed the bits"
            for way, (taken, _) in found.items():
                seconds[way].append(taken)
        median = {way: statistics.median(times) for way, times in seconds.items()}
        for way, times in seconds.items():
            rows.append({"network": name, "way": way, "seconds": times, "ratio": median[way] / median["in order"]})
            print(f"{name}: {way:<15} {median[way]:7.2f} s, {rows[-1]['ratio']:.3f} of in order", flush=True)
    settings = {"visit": args.visit, "rounds": args.rounds, "threads": torch.get_num_threads()}
    results_file.write("rotation", " ".join(["python", *sys.argv]), settings, rows)


if __name__ == "__main__":
    main()
