"""Counted bytes against resident memory, as a cross-check: python benchmarks/resident.py

Each case trains in a process of its own, with glibc told to give freed memory back. What the process grew by from just
before the first update to its highest is compared with the counted peak. Not for timing: these settings are slow.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import results_file

MIB = 2**20
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
CASES = [
    (method, depth, checkpointing)
    for method, depth in (("blocks", 12), ("blocks", 48), ("end_to_end", 12))
    for checkpointing in (False, True)
]


def status(name: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train(method: str, depth: int, checkpointing: bool) -> dict[str, int]:
    """Trains three updates: the second is counted, which takes memory itself; so the third is what is looked at."""
    from diffusionblocks import train as loop
    from paper_network import paper_network, run_of

    run = run_of(paper_network(depth, checkpointing, updates=3), method)
    original, before, grown = loop.train_step, 0, 0

    def looked_at(*args: object) -> float:
        nonlocal before, grown
        update = args[-1]
        if update == 2:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # starts the highest anew
        loss = original(*args)
        if update == 2:
            grown = status("VmHWM") - before
        return loss

    loop.train_step = looked_at
    with tempfile.TemporaryDirectory() as folder:
        job = run.jobs()[0]
        job.batches(0)
        gc.collect()
        before = status("VmRSS")
        figures = loop.fit(job, run.settings, run.folder(folder))
    assert figures is not None
    return {"counted": figures["peak_bytes"]["total"], "resident": grown}


def main() -> None:
    if len(sys.argv) == 4:
        print(json.dumps(train(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True")))
        return
    rows = []
    for case in CASES:
        words = [sys.executable, __file__, *map(str, case)]
        done = subprocess.run(words, env={**os.environ, **GLIBC}, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"method": case[0], "layers": case[1], "checkpointing": case[2], **found})
        print(
            f"{case}: counted {found['counted'] / MIB:.1f} MiB, resident {found['resident'] / MIB:.1f} MiB", flush=True
        )
    results_file.write("resident", " ".join(["python", *sys.argv]), GLIBC, rows)


if __name__ == "__main__":
    main()
