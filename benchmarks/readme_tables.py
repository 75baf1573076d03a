"""Writes the tables of README.md from the result files: python benchmarks/readme_tables.py [--check | --demo]

Each table stands between `<!-- NAME -->` and `<!-- end -->`. --check only says whether they are up to date; --demo
first takes the figures and the picture of `make demo` from runs/demo.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_file

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MIB = 2**20


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((HERE / "results" / f"{name}.json").read_text()))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] + ["---:"] * (len(head) - 1), *rows)]
    return "\n".join(lines)


def mean_and_interval(values: list[float]) -> str:
    mean, half = results_file.mean_and_half_width(values)
    return f"{100 * mean:.2f} ± {100 * half:.2f} %"


def demo() -> str:
    kinds = ("parameters", "gradients", "optimizer", "activations", "total")
    rows = []
    for row in result("demo")["rows"]:
        peak = [f"{row['peak_bytes'][kind] / MIB:.1f}" for kind in kinds]
        accuracy = f"{100 * row['test_accuracy']:.1f} %"
        rows.append([row["method"].replace("_", " "), accuracy, *peak, f"{row['seconds']:.0f}"])
    return markdown(["", "test accuracy", *kinds, "seconds"], rows)


def quality() -> str:
    names = {"blocks": "blocks, each alone", "end_to_end": "end to end", "shallow_ensemble": "ensemble of plain thirds"}
    budgets = {"400 updates": "quality-seeds-vit-digits-400", "1,000 updates": "quality-seeds-vit-digits-1000"}
    found = {label: result(name)["rows"] for label, name in budgets.items()}
    rows = []
    for method, title in names.items():
        cells = []
        for budget in found.values():
            values = [row["test_accuracy"] for row in budget if row["method"] == method]
            cells.append(mean_and_interval(values) if values else "not run")
        rows.append([title, *cells])
    return markdown(["digits, 5 seeds", *found], rows)


def memory() -> str:
    rows = [row for row in result("memory")["rows"] if row["series"] == "layers"]
    found = {(row["value"], row["method"]): row["peak_bytes"]["total"] / MIB for row in rows}
    depths = sorted({depth for depth, _ in found})
    methods = ("end_to_end", "end_to_end_checkpointed", "blocks", "blocks_checkpointed")
    rows = [[m.replace("_", " "), *(f"{found[depth, m]:,.0f}" for depth in depths)] for m in methods]
    return markdown(["peak, MiB", *(f"{depth} layers" for depth in depths)], rows)


TABLES: dict[str, Callable[[], str]] = {"demo": demo, "quality": quality, "memory": memory}


def filled(text: str) -> str:
    """The README's text with every table written anew."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no place for the table '{name}'")
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table()}\n{found[2]}", text)
    return text


def take_demo() -> None:
    found = HERE.parent / "runs" / "demo"
    comparison = json.loads((found / "comparison.json").read_text())
    results_file.write("demo", "make demo", comparison["settings"], comparison["rows"])
    shutil.copyfile(found / "comparison.png", HERE.parent / "docs" / "demo.png")


def main() -> int:
    if "--demo" in sys.argv:
        take_demo()
    text = README.read_text()
    if "--check" in sys.argv:
        print("up to date" if filled(text) == text else "README.md differs from benchmarks/results")
        return int(filled(text) != text)
    README.write_text(filled(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
