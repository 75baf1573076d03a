"""The command line. Exit codes: 0 done, 2 bad input (one sentence, no traceback), 1 a fault of ours."""

import signal
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diffusionblocks import plan as planner
from diffusionblocks import recipes, report
from diffusionblocks.checkpoint import merge, read_json, write_json
from diffusionblocks.compare import DEFAULT_METHODS, METHODS, compare, plan_of, walk_report
from diffusionblocks.config import InferenceSettings, Recipe, sections
from diffusionblocks.errors import InputError
from diffusionblocks.evaluate import block_report, contributions, step_sweep
from diffusionblocks.executors import local
from diffusionblocks.noise import LogNormal
from diffusionblocks.partition import CUTS, GRIDS, make_partition, plan_walk
from diffusionblocks.residency import PLACES, HostMemory
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import Stopped

# As wide as the tables need where the output isn't a terminal, so that a log file keeps whole rows.
console = Console(width=None if sys.stdout.isatty() else 150)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            if not words or words[0] in ("-h", "--help"):
                print(usage())
                return 0 if words else 2
            if words[0] not in COMMANDS:
                raise InputError(f"unknown command '{words[0]}': choose {', '.join(COMMANDS)}")
            COMMANDS[words[0]](words[1:])
        except (InputError, ArgumentError) as error:
            print(f"diffusionblocks: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except Stopped as stopped:
            print(f"diffusionblocks: {stopped}; its state is saved, the same command goes on from it", file=sys.stderr)
            return stopped.code
        except KeyboardInterrupt:
            print("diffusionblocks: stopped; the same command goes on from the last saved state", file=sys.stderr)
            return 130
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            print(f"diffusionblocks: {OUT_OF_MEMORY}", file=sys.stderr)
            return 2
    return 0


OUT_OF_MEMORY = (
    "this machine's memory doesn't hold it: `diffusionblocks plan RECIPE` shows what fits; more blocks, "
    "--gradient-checkpointing true or a smaller batch_size need less"
)


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator's error has no class of its own.
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def usage() -> str:
    lines = ["usage: diffusionblocks COMMAND ... (COMMAND --help lists its options)", ""]
    lines += [f"  {name:<10} {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()]
    return "\n".join([*lines, "", f"recipes: {', '.join(recipes.RECIPES)}"])


def partition_command(words: list[str]) -> None:
    """Prints each block's layers, noise range and mass, and the block of each call of a walk."""
    parser = _parser("partition")
    law = LogNormal()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--layer_split", type=tuple[int, ...] | None, default=None, help="e.g. 3,6,3")
    parser.add_argument("--overlap", type=float, default=0.05)
    parser.add_argument("--cut", choices=CUTS, default="equal_mass")
    parser.add_argument("--steps", type=int | None, default=None, help="calls of the walk; default: one a block")
    parser.add_argument("--grid", choices=GRIDS, default="mass")
    for name in ("p_mean", "p_std", "sigma_min", "sigma_max"):
        parser.add_argument(f"--{name}", type=float, default=getattr(law, name))
    args = _parse(parser, words)
    law = LogNormal(args.p_mean, args.p_std, args.sigma_min, args.sigma_max)
    partition = make_partition(law, args.layers, args.blocks, args.layer_split, args.cut, args.overlap)
    walk = plan_walk(partition, partition.blocks if args.steps is None else args.steps, args.grid)
    blocks = []
    for number, layers in enumerate(partition.layers):
        (low, high), (wide_low, wide_high) = partition.range(number), partition.training_range(number)
        blocks.append(
            {
                "block": number,
                "layers": [layers[0], layers[-1]],
                "sigma_max": high,
                "sigma_min": low,
                "overlap_sigma_max": wide_high,
                "overlap_sigma_min": wide_low,
                "mass": partition.mass(number),
            }
        )
    calls = [{"call": call.index, "sigma": call.sigma, "block": call.block} for call in walk]
    console.print(_table("blocks, from the highest noise down", blocks))
    console.print(_table(f"a walk of {len(walk)} calls", calls))
    _write_figures(args, {"blocks": blocks, "walk": calls})


def plan_command(words: list[str]) -> None:
    """Predicts the memory of every way to train a recipe, by kind, and recommends the cheapest that fits."""
    recipe, args = _recipe_arguments("plan", words, _plan_options)
    budget = planner.machine_memory() if args.budget is None else planner.read_bytes(args.budget)
    rows = planner.plan(recipe, methods=args.methods)
    recommended = planner.recommend(rows, budget)
    console.print(report.plan_table(recipe.name, rows, budget))
    choice = (
        "nothing" if recommended["method"] is None else f"{recommended['method']}, {recommended['blocks']} block(s)"
    )
    console.print(f"recommended: {choice.replace('_', ' ')}: {recommended['why']}", highlight=False, soft_wrap=True)
    if args.chart is not None:
        report.draw_plan(rows, budget, Path(args.chart))
    figures = {"recipe": recipe.name, "budget": budget, "rows": [asdict(row) for row in rows]}
    _write_figures(args, {**figures, "recommended": recommended})


def train_command(words: list[str]) -> None:
    """Trains a recipe block by block, or one block of it; goes on by itself where an earlier run stopped."""
    recipe, args = _recipe_arguments("train", words, _train_options)
    run = Run.of(recipe)
    out = Path(args.out or f"runs/{recipe.name}")
    parts = [job.part for job in run.jobs()]
    if args.block is not None:
        parts = [_part_of_block(run, args.block)]
    _print_recipe(recipe)
    jobs = [BlockJob(recipe, part, str(out)) for part in parts]
    if args.page_to is not None and args.rotate is None:
        raise InputError("page_to has no effect without --rotate: give both, or leave it out")
    host = HostMemory() if args.page_to == "host" else None
    with _stop_signals() as stop, _progress(stop, host) as runner:
        try:
            if args.rotate is None:
                figures = local.run_in_order(jobs, runner)
            else:
                figures = local.run_in_rotation(jobs, runner, args.rotate)
        finally:
            if host is not None:
                host.save()
    rows = [figure for figure in figures if figure is not None]
    shown = [
        {
            "part": row["part"],
            "updates": row["updates"],
            "seconds": row["seconds"],
            "peak MiB": round(row["peak_bytes"]["total"] / 2**20, 1),
            **{key: round(row["validation"][key], 4) for key in list(row["validation"])[:2]},
        }
        for row in rows
    ]
    console.print(_table(f"trained into {out}", shown))
    _write_figures(args, {"recipe": recipe.name, "seed": recipe.seed, "parts": rows})


def merge_command(words: list[str]) -> None:
    """Joins blocks trained in several folders into one."""
    parser = _parser("merge")
    parser.add_argument("folders", nargs="+", help="folders that `train` wrote")
    parser.add_argument("--out", type=str, required=True)
    args = _parse(parser, words)
    first = _read_run(args.folders[0], None)
    jobs = first.jobs()
    merged = merge(args.folders, args.out, [job.part for job in jobs])
    for job in jobs:
        merged.load(job.part, job.build())
    console.print(f"{len(jobs)} blocks joined in {args.out}; every checksum and every parameter fits")
    _write_figures(args, {"folder": args.out, "owners": first.owners()})


def evaluate_command(words: list[str]) -> None:
    """Evaluates a trained chain on all test samples: every call, every block, every start."""
    parser = _parser("evaluate")
    parser.add_argument("folder", help="a folder that `train` or `merge` wrote")
    parser.add_argument("--data_root", type=str | None, default=None, help="folder of the data files")
    parser.add_class_arguments(InferenceSettings)
    defaults = _stored_inference(words)
    parser.set_defaults({key: value for key, value in defaults.items() if value is not None})
    args = _parse(parser, words)
    inference = InferenceSettings(**{f.name: args[f.name] for f in fields(InferenceSettings)})
    run = _read_run(args.folder, args.data_root)
    denoiser = run.denoiser(run.folder(args.folder))
    plan = plan_of(run, inference)
    figures: dict[str, Any] = {
        "recipe": run.recipe.name,
        "seed": run.recipe.seed,
        "test_samples": len(run.data.test),
        "walk": walk_report(run, denoiser, inference),
        "step_sweep": step_sweep(denoiser, run.data, inference.grid, run.recipe.seed),
        "contributions": contributions(denoiser, run.data, plan, inference.answer),
        "blocks": block_report(denoiser, run.data),
    }
    walk = figures["walk"]
    console.print(f"test accuracy {100 * walk['accuracy']:.2f} % of {len(run.data.test)} samples ({inference.answer})")
    console.print(_table("after each call", walk["calls"]))
    console.print(_table("step sweep: accuracy of both answers", figures["step_sweep"]))
    console.print(_table("each block alone from the zero start, and the walk without it", figures["contributions"]))
    console.print(_table("each block on noised true targets; 'z alone' is the floor without x", figures["blocks"]))
    _write_figures(args, figures)


def compare_command(words: list[str]) -> None:
    """Trains ours and the baselines at equal layer evaluations and prints one table."""
    recipe, args = _recipe_arguments("compare", words, _compare_options)
    if not args.methods:
        raise InputError(f"there is nothing to compare: choose methods of {', '.join(METHODS)}")
    if args.quick:
        recipe = recipes.quick(recipe)
    out = Path(args.out or f"runs/compare-{recipe.name}")
    _print_recipe(recipe)
    with _stop_signals() as stop, _progress(stop) as runner:
        comparison = compare(recipe, args.methods, out, runner)
    report.draw_comparison(comparison, out, out / "comparison.png")
    console.print(report.comparison_table(comparison))
    console.print(f"{out}/comparison.json holds the figures, {out}/comparison.png the loss curves and memory bars")
    _write_figures(args, comparison)


def report_command(words: list[str]) -> None:
    """Writes one HTML page about a folder that `compare` wrote."""
    parser = _parser("report")
    parser.add_argument("folder")
    args = _parse(parser, words)
    page = report.write_html(Path(args.folder))
    console.print(f"{page}")
    _write_figures(args, read_json(Path(args.folder) / "comparison.json"))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "partition": partition_command,
    "plan": plan_command,
    "train": train_command,
    "merge": merge_command,
    "evaluate": evaluate_command,
    "compare": compare_command,
    "report": report_command,
}


def _plan_options(parser: ArgumentParser) -> None:
    parser.add_argument("--budget", type=str | None, default=None, help="e.g. 8GiB; default: this machine's memory")
    parser.add_argument("--methods", type=list[str], default=list(planner.METHODS), help="which rows")
    parser.add_argument("--chart", type=str | None, default=None, help="also draw the table into this picture")


def _train_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str | None, default=None, help="output folder")
    parser.add_argument("--block", type=int | None, default=None, help="train this block alone")
    parser.add_argument("--executor", choices=["local"], default="local", help="where the blocks train")
    parser.add_argument("--rotate", type=int | None, default=None, help="updates of each visit; default: in order")
    parser.add_argument(
        "--page_to", choices=PLACES, default=None, help="where idle blocks are kept; default with --rotate: disk"
    )


def _compare_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str | None, default=None, help="output folder")
    parser.add_argument("--methods", type=list[str], default=list(DEFAULT_METHODS), help=f"of {', '.join(METHODS)}")
    parser.add_argument("--quick", action=ActionYesNo, default=False, help="20 updates: shows that it works")


def _part_of_block(run: Run, block: int) -> str:
    if run.recipe.shell == "joint":
        raise InputError("a joint shell is updated by every block: no block trains alone; use shell per_block")
    if not 0 <= block < run.family.partition.blocks:
        raise InputError(f"block {block} doesn't exist: choose 0 to {run.family.partition.blocks - 1}")
    return f"block-{block}"


def _parser(command: str) -> ArgumentParser:
    about = (COMMANDS[command].__doc__ or "").splitlines()[0]
    parser = ArgumentParser(prog=f"diffusionblocks {command}", description=about, exit_on_error=False)
    parser.add_argument("--json", type=str | None, default=None, help="also write the figures to this file")
    return parser


def _recipe_arguments(
    command: str, words: list[str], options: Callable[[ArgumentParser], None]
) -> tuple[Recipe, Namespace]:
    """Parses `RECIPE [options] [--key value ...]`; the recipe's own values are the defaults of its keys."""
    named = words[0] if words and not words[0].startswith("-") else None
    if named is None and not {"-h", "--help"} & set(words):
        raise InputError(f"{command} needs a recipe: choose {', '.join(recipes.RECIPES)}")
    find = recipes.find_to_plan if command == "plan" else recipes.find
    recipe = find(named or "vit-digits")
    parser = _parser(command)
    parser.add_argument("recipe", help=", ".join((*recipes.RECIPES, *(recipes.SIZES if command == "plan" else ()))))
    parser.add_argument("--config", action="config", help="a YAML file with keys as below")
    options(parser)
    parser.add_class_arguments(Recipe, skip={"name", "family", "network"})
    parser.add_class_arguments(type(recipe.network), "network")
    parser.set_defaults(_flat(recipe))
    args = _parse(parser, words)
    parts = {name: kind(**args[name].as_dict()) for name, kind in sections(recipe.family).items()}
    top = {f.name: args[f.name] for f in fields(Recipe) if f.name not in {"name", "family", *parts}}
    return replace(recipe, **top, **parts), args


def _flat(recipe: Recipe) -> dict[str, Any]:
    values = {}
    for f in fields(Recipe):
        value = getattr(recipe, f.name)
        if is_dataclass(value):
            values.update({f"{f.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)})
        elif f.name not in ("name", "family"):
            values[f.name] = value
    return values


def _parse(parser: ArgumentParser, words: list[str]) -> Namespace:
    keys = {option[2:] for action in parser._actions for option in action.option_strings if option.startswith("--")}
    args = parser.parse_args(list(_known(words, keys, parser)))
    assert isinstance(args, Namespace)
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise InputError(f"the figures can't be written to {args.json} (its folder doesn't exist): choose another")
    return args


# Options whose values may be bare lists: 3,6,3.
LISTS = ("layer_split", "methods")


def _known(words: Sequence[str], keys: set[str], parser: ArgumentParser) -> Iterator[str]:
    """`--p-mean=1` as `--noise.p_mean=1`: dashes for underscores, and a key without its section where it is unique.

    A bare list such as 3,6,3 becomes the list that the parser reads.
    """
    before = ""
    for word in words:
        if not word.startswith("--"):
            yield _listed(word) if before in LISTS else word
            before = ""
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in keys:
            owners = [key for key in keys if key.endswith(f".{name}")]
            if len(owners) != 1:
                raise InputError(f"unknown option '{word}': `{parser.prog} --help` lists what is allowed")
            (name,) = owners
        yield f"--{name}{equals}{_listed(value) if equals and name in LISTS else value}"
        before = "" if equals else name


def _listed(value: str) -> str:
    return value if value.startswith("[") or value == "null" else f"[{value}]"


def _read_run(folder: str, data_root: str | None) -> Run:
    manifest = read_json(Path(folder) / "manifest.json")
    for name in ("recipe", "method", "environment", "data"):
        if name not in manifest:
            raise InputError(f"{folder}/manifest.json lacks '{name}': it isn't a run's manifest")
    recipe = Recipe.from_dict(manifest["recipe"])
    recipe = replace(recipe, data=replace(recipe.data, root=data_root or manifest["environment"].get("data_root")))
    if manifest["method"] != "blocks":
        raise InputError(f"{folder} holds the baseline {manifest['method']}: give a folder of blocks")
    return Run.of(recipe)


def _stored_inference(words: list[str]) -> dict[str, Any]:
    folder = next((word for word in words if not word.startswith("-")), None)
    if folder is None or not (Path(folder) / "manifest.json").exists():
        return {}
    manifest = read_json(Path(folder) / "manifest.json")
    return dict(manifest.get("inference", {})) if isinstance(manifest, dict) else {}


def _print_recipe(recipe: Recipe) -> None:
    """The resolved settings, a line a section."""
    sections: dict[str, dict[str, Any]] = {recipe.name: {}}
    for name, value in recipe.to_dict().items():
        if isinstance(value, dict):
            sections[name] = value
        elif name != "name":
            sections[recipe.name][name] = value
    for name, values in sections.items():
        text = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
        console.print(f"{name}: {text}", highlight=False, soft_wrap=True)


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or Ctrl-C has asked to stop: training then saves its state first. A second one stops at once."""
    received: list[int] = []
    former = {int(number): signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(number, former[number])

    for number in former:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    except Stopped as stopped:
        # A scheduler's SIGTERM is an orderly end; after Ctrl-C a shell loop should end too.
        stopped.code = 130 if signal.SIGINT in received else 0
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _progress(
    stop: Callable[[], bool], host: HostMemory | None = None
) -> Iterator[Callable[[BlockJob], dict[str, Any] | None]]:
    """A runner of block jobs that shows a bar for each part."""
    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bars:
        tasks: dict[tuple[str, str], Any] = {}

        def runner(job: BlockJob) -> dict[str, Any] | None:
            key = (job.folder, job.part)
            if key not in tasks:
                total = Run.of(job.recipe, job.method).settings.updates
                tasks[key] = bars.add_task(f"{Path(job.folder).name} {job.part}", total=total, loss=float("nan"))

            def show(part: str, update: int, loss: float) -> None:
                bars.update(tasks[key], completed=update, loss=loss)

            figures = run_job(job, show, stop, host)
            if figures is not None:
                bars.update(tasks[key], completed=figures["updates"])
            return figures

        yield runner


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.5g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _write_figures(args: Namespace, figures: dict[str, Any]) -> None:
    if args.json is not None:
        write_json(Path(args.json), figures)


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"diffusionblocks: warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
