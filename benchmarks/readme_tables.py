"""Writes the tables of README.md and docs/memory.md from the result files:

    python benchmarks/readme_tables.py [--check | --demo]

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
README, MEMORY = HERE.parent / "README.md", HERE.parent / "docs" / "memory.md"
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


def peaks(series: str, methods: tuple[str, ...], what: str) -> str:
    """Counted peaks of a series, MiB: a row a method, a column a value."""
    rows = [row for row in result("memory")["rows"] if row["series"] == series]
    found = {(row["value"], row["method"]): row["peak_bytes"]["total"] / MIB for row in rows}
    values = sorted({value for value, _ in found})
    cells = [[m.replace("_", " "), *(f"{found[value, m]:,.0f}" for value in values)] for m in methods]
    return markdown(["peak, MiB", *(what.format(f"{value:,}") for value in values)], cells)


FOUR = ("end_to_end", "end_to_end_checkpointed", "blocks", "blocks_checkpointed")
BLOCKS = FOUR[2:]
ALL = (*FOUR[:2], "block_coordinate", "block_coordinate_checkpointed", *BLOCKS)


def planned() -> str:
    """How far plan is from what was counted, by series."""
    rows = result("memory")["rows"]
    names = list(dict.fromkeys(row["series"] for row in rows))
    cells = []
    for name in names:
        off = [row["planned_total"] / row["peak_bytes"]["total"] - 1 for row in rows if row["series"] == name]
        cells.append([name, str(len(off)), f"{100 * min(off):+.3f} %", f"{100 * max(off):+.3f} %"])
    return markdown(["series", "networks", "planned - counted, from", "to"], cells)


def resident() -> str:
    rows = []
    for row in result("resident")["rows"]:
        name = f"{row['method'].replace('_', ' ')}, {row['layers']} layers" + ", checkpointed" * row["checkpointing"]
        counted, grown = row["counted"] / MIB, row["resident"] / MIB
        rows.append([name, f"{counted:,.1f}", f"{grown:,.1f}", f"{grown - counted:+.1f}"])
    return markdown(["MiB", "counted", "resident memory grew by", "difference"], rows)


def rotation() -> str:
    rows = []
    for row in result("rotation")["rows"]:
        seconds = sorted(row["seconds"])
        span = f"{seconds[len(seconds) // 2]:.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})"
        rows.append([f"{row['network']}, {row['way']}", span, f"{row['ratio']:.3f}"])
    return markdown(["", "seconds, median (span)", "ratio"], rows)


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"demo": demo, "quality": quality, "memory": lambda: peaks("layers", FOUR, "{} layers")},
    MEMORY: {
        "layers": lambda: peaks("layers", ALL, "{} layers"),
        "blocks": lambda: peaks("blocks", BLOCKS, "B = {}"),
        "batch": lambda: peaks("batch_size", ALL, "batch {}"),
        "vocabulary": lambda: peaks("vocabulary", ALL, "{} entries"),
        "chunked": lambda: peaks("vocabulary, chunks of 64", ALL, "{} entries"),
        "planned": planned,
        "resident": resident,
        "rotation": rotation,
    },
}


def filled(path: Path) -> str:
    """A file's text with every table written anew."""
    text = path.read_text()
    for name, table in TABLES[path].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{path.name} has no place for the table '{name}'")
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
    stale = [path for path in TABLES if filled(path) != path.read_text()]
    if "--check" in sys.argv:
        print(f"{', '.join(path.name for path in stale)} differ from benchmarks/results" if stale else "up to date")
        return int(bool(stale))
    for path in stale:
        path.write_text(filled(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
