"""Peak training memory by kind against depth, counted exactly: python benchmarks/memory.py

For every depth: end to end, end to end with activation checkpointing, one block, one block with checkpointing; 4 layers
a block. Each is trained two updates through `fit`; the second is counted. Of the blocks the first and the last are
trained (they differ in nothing but their numbers) and the larger one is reported.
"""

import argparse
import gc
import sys
import tempfile

import results_file
from diffusionblocks.memory import KINDS
from diffusionblocks.train import fit
from paper_network import paper_network, run_of

MIB = 2**20


def peak(method: str, depth: int, checkpointing: bool) -> dict[str, int]:
    run = run_of(paper_network(depth, checkpointing), method)
    jobs = run.jobs()
    peaks = []
    for job in {jobs[0].part: jobs[0], jobs[-1].part: jobs[-1]}.values():
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            figures = fit(job, run.settings, run.folder(folder))
        assert figures is not None
        peaks.append(figures["peak_bytes"])
    return max(peaks, key=lambda found: found["total"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--name", default="memory")
    args = parser.parse_args()
    rows = []
    print(f"{'layers':>6} {'method':<26}" + "".join(f"{kind:>14}" for kind in (*KINDS, "total")) + "   MiB")
    for depth in args.depths:
        for method in ("end_to_end", "blocks"):
            for checkpointing in (False, True):
                found = peak(method, depth, checkpointing)
                name = method + ("_checkpointed" if checkpointing else "")
                rows.append({"layers": depth, "method": name, "peak_bytes": found})
                print(f"{depth:>6} {name:<26}" + "".join(f"{found[kind] / MIB:14.1f}" for kind in (*KINDS, "total")))
    total = {(row["layers"], row["method"]): row["peak_bytes"]["total"] for row in rows}
    for depth in args.depths:
        ratio = total[depth, "blocks_checkpointed"] / total[depth, "end_to_end_checkpointed"]
        print(f"{depth} layers: blocks with checkpointing / end to end with checkpointing = {ratio:.3f}")
    flat = [total[depth, "blocks_checkpointed"] for depth in args.depths]
    print(f"blocks with checkpointing over all depths: largest / smallest = {max(flat) / min(flat):.4f}")
    results_file.write(args.name, " ".join(["python", *sys.argv]), {"layers_per_block": 4, "batch_size": 32}, rows)


if __name__ == "__main__":
    main()
