"""Tables and pictures of what was measured, for the terminal and as files."""

import base64
import csv
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from diffusionblocks.checkpoint import read_json, write_atomic, write_text
from diffusionblocks.errors import InputError
from diffusionblocks.memory import KINDS
from diffusionblocks.plan import Row

MIB = 2**20
# Okabe and Ito's palette: told apart by colour-blind readers too.
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } tr { border-top: 1px solid #ccc } td, th { padding: .2em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } img { max-width: 100% }"""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")


def comparison_cells(comparison: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the comparison, as text."""
    head = [
        "method",
        "test accuracy",
        *KINDS,
        "total",
        "seconds",
        "layer evaluations",
    ]
    rows = []
    for row in comparison["rows"]:
        peak = row["peak_bytes"]
        rows.append(
            [
                row["method"].replace("_", " "),
                f"{100 * row['test_accuracy']:.1f} %",
                *(f"{peak[kind] / MIB:.1f}" for kind in (*KINDS, "total")),
                f"{row['seconds']:.0f}",
                f"{row['layer_evaluations']:,}",
            ]
        )
    return head, rows


def comparison_table(comparison: dict[str, Any]) -> Table:
    head, rows = comparison_cells(comparison)
    table = Table(title=f"{comparison['recipe']}, seed {comparison['seed']}: peak training memory by kind, MiB")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def loss_curve(folder: Path, part: str) -> tuple[list[int], list[float]]:
    """Updates and training losses of a part, joined over the stretches of a resumed run."""
    losses: dict[int, float] = {}
    for file in sorted((folder / "logs" / part).glob("from-*/metrics.csv")):
        start = int(file.parent.name.removeprefix("from-"))
        # A stretch that was killed may have logged updates that its successor did again.
        losses = {update: loss for update, loss in losses.items() if update < start}
        with open(file, newline="") as rows:
            losses.update({int(row["step"]): float(row["loss"]) for row in csv.DictReader(rows) if row.get("loss")})
    return list(losses), list(losses.values())


def curves_of(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    parts = sorted(path.name for path in (folder / "logs").glob("*") if path.is_dir())
    return {part: loss_curve(folder, part) for part in parts}


def draw_comparison(comparison: dict[str, Any], folder: Path, path: Path) -> None:
    """Loss curves of every part of every method, and the memory bars, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(1, 2)
    index = 0
    for row in comparison["rows"]:
        if row["method"] not in ("blocks", "end_to_end"):
            continue  # with checkpointing the curves are the same
        for part, (updates, losses) in curves_of(folder / row["method"]).items():
            label = "end to end" if row["method"] == "end_to_end" else part.replace("-", " ")
            curves.plot(updates, smooth(losses), label=label, color=COLOURS[index % len(COLOURS)], linewidth=1.3)
            index += 1
    curves.set(xlabel="update of the part", ylabel="training cross-entropy, nats", title="Loss of each part")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False)
    _draw_bars(bars, {row["method"].replace("_", " "): row["peak_bytes"] for row in comparison["rows"]})
    write_atomic(path, lambda draft: figure.savefig(draft, format="png", dpi=120))


def _draw_bars(axes: Any, peaks: dict[str, dict[str, int]]) -> None:
    """Bytes by kind, a bar for each name, the totals at their ends."""
    unit, name = unit_of(peaks.values())
    left = [0.0] * len(peaks)
    for kind, colour in zip(KINDS, COLOURS, strict=False):
        widths = [peak[kind] / unit for peak in peaks.values()]
        axes.barh(list(peaks), widths, left=left, label=kind, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for index, total in enumerate(left):
        axes.text(total, index, f" {total:.1f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * max(left))
    axes.set(xlabel=f"{name} at the peak of a training step", title="Training memory, counted")
    axes.legend(frameon=False, fontsize="small")


def unit_of(peaks: Iterable[dict[str, int]]) -> tuple[int, str]:
    """The unit in which totals of that size read well."""
    return (2**30, "GiB") if max(peak["total"] for peak in peaks) >= 10 * 2**30 else (MIB, "MiB")


def plan_table(name: str, rows: Sequence[Row], budget: int) -> Table:
    """Every planned way to train: bytes by kind, and what they hold."""
    size, unit = unit_of(row.peak_bytes for row in rows)
    table = Table(title=f"{name}: tensors at the peak of a training step, {unit}")
    for column in ("method", "blocks", *KINDS, "total", "shell", "logits", "noisy stream", "fits"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        kinds = [f"{row.peak_bytes[kind] / size:,.2f}" for kind in (*KINDS, "total")]
        parts = [
            f"{row.of_which[part] / size:,.2f}" for part in ("shell", "logits", "noisy_stream") if part in row.of_which
        ]
        fits = "yes" if row.peak_bytes["total"] <= budget else "no"
        table.add_row(row.method.replace("_", " "), str(row.blocks), *kinds, *parts, *[""] * (3 - len(parts)), fits)
    return table


def draw_plan(rows: Sequence[Row], budget: int, path: Path) -> None:
    """Every way to train as a bar of its bytes by kind, and the budget as a line; a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.28 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    peaks = {f"{row.method.replace('_', ' ')}, {row.blocks} block(s)": row.peak_bytes for row in rows}
    _draw_bars(axes, peaks)
    if budget <= max(peak["total"] for peak in peaks.values()):
        axes.axvline(budget / unit_of(peaks.values())[0], color="black", linewidth=1, linestyle="--")
    axes.set_title("Training memory, planned (dashed: the budget)")
    write_atomic(path, lambda draft: figure.savefig(draft, format="png", dpi=120))


def smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """The mean over the last `window` values."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def write_html(comparison_folder: Path) -> Path:
    """One page of a comparison's folder: the table, the picture and the settings; returns its path.

    Raises:
        InputError: the folder holds no comparison.json.
    """
    source = comparison_folder / "comparison.json"
    if not source.exists():
        raise InputError(f"{comparison_folder} holds no comparison.json: run `diffusionblocks compare` into it first")
    comparison = read_json(source)
    if not isinstance(comparison, dict) or not {"recipe", "seed", "rows", "settings"} <= comparison.keys():
        raise InputError(f"{source} isn't what `diffusionblocks compare` writes: run it again into a new folder")
    picture = comparison_folder / "comparison.png"
    draw_comparison(comparison, comparison_folder, picture)
    head, rows = comparison_cells(comparison)
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    encoded = base64.b64encode(picture.read_bytes()).decode()
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{html.escape(comparison["recipe"])}</title><style>{STYLE}</style>
<h1>{html.escape(comparison["recipe"])}, seed {comparison["seed"]}</h1>
<table><tr>{"".join(f"<th>{html.escape(name)}</th>" for name in head)}</tr>{cells}</table>
<p>Memory is the bytes of all live tensors at the peak of a training step, in MiB. All test samples are used.</p>
<img alt="loss curves and memory" src="data:image/png;base64,{encoded}">
<h2>Settings</h2><pre>{html.escape(json.dumps(comparison["settings"], indent=1))}</pre></html>
"""
    path = comparison_folder / "report.html"
    write_text(path, page)
    return path
