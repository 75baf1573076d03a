"""A result file: figures with the settings, commit, hardware and date they belong to."""

import json
import platform
import statistics
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def commit() -> str:
    """The commit that ran, with a mark where the tree had changes that it doesn't hold."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../src", "../benchmarks/*.py")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


def mean_and_half_width(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (Student's t); two values or more."""
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(half)


def write(name: str, command: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "command": command,
        "commit": commit(),
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "settings": settings,
        "rows": rows,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path
