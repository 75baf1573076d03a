"""Imports look upward only, optional packages stay optional, and files keep their size and names."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "diffusionblocks"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
# A module may import only those before it. "families" is the __init__.py of that folder, PACKAGE the one at the top.
ORDER = [
    "errors",
    "files",
    "tensors",
    "seeds",
    "noise",
    "partition",
    "layers",
    "block",
    "objective",
    "image_files",
    "data",
    "families",
    "families.base",
    "families.vit",
    "families.causal_lm",
    "model",
    "checkpoint",
    "residency",
    "memory",
    "train",
    "baselines",
    "baselines.end_to_end",
    "baselines.block_coordinate",
    "baselines.shallow_ensemble",
    "sample",
    "metrics",
    "evaluate",
    "config",
    "recipes",
    "run",
    "plan",
    "executors",
    "executors.local",
    "compare",
    "report",
    PACKAGE,
    "cli",
]
REMOVABLE = ("baselines", "executors")
MAY_IMPORT_REMOVABLE = ("cli", *REMOVABLE)
VAGUE_NAMES = ("utils", "common", "misc")
LONGEST = 500
OPTIONAL = [
    "ray",
    "diffusers",
    "transformers",
    "kornia",
    "tensorboard",
    "datasets",
    "tokenizers",
    "mauve",
    "huggingface_hub",
    "beartype",
    "pytest",
]

# Runs in a fresh interpreter: arguments are the blocked packages, comma-separated, then the modules to import.
IMPORT_WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

blocked = sys.argv[1].split(",")
sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    print(importlib.import_module(name).__file__)
"""


TRAIN_ONE_BLOCK = """
from diffusionblocks.config import Recipe
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.run import BlockJob, run_job
from diffusionblocks.train import TrainSettings

network = ViTSettings(layers=3, width=8, heads=2, mlp=8, patch=4, condition_width=2)
recipe = Recipe(network=network, training=TrainSettings(updates=3, batch_size=8))
run_job(BlockJob(recipe, "block-1", "run"))
"""


def module_name(path: str) -> str:
    """families/base.py -> families.base, families/__init__.py -> families, __init__.py -> the package's own name."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or PACKAGE


def imported(path: str, source: str) -> Iterator[tuple[str, int, bool]]:
    """Every import, also those inside functions: the full dotted name, its line, and whether a function holds it."""
    folder = [PACKAGE, *path.split("/")[:-1]]

    def visit(node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (start, node.module) if part)
            yield from ((f"{base}.{alias.name}", node.lineno, in_function) for alias in node.names)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse(source), False)


def own_module(dotted: str, modules: set[str]) -> str | None:
    """The module of ours that an import reaches: "diffusionblocks.noise.LogNormal" -> noise; None if not ours."""
    top, *parts = dotted.split(".")
    if top != PACKAGE:
        return None
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in modules or name in ORDER:
            return name
    return PACKAGE


def violations(sources: dict[str, str]) -> list[str]:
    """What breaks the rules of this file, one sentence each; `sources` maps a path below the package to its text."""
    found, ray_imports = [], []
    modules = {module_name(path) for path in sources}
    for path, source in sorted(sources.items()):
        name = module_name(path)
        if name not in ORDER:
            found.append(f"{path} is not in ORDER: add '{name}' to tests/test_arrows.py, after all that it imports")
        if Path(path).stem in VAGUE_NAMES:
            found.append(f"{path} has a name that says nothing: call it after what it does")
        if (lines := len(source.splitlines())) > LONGEST:
            found.append(f"{path} has {lines} lines, more than {LONGEST}: split it")
        for dotted, line, in_function in imported(path, source):
            if dotted.split(".")[0] == "ray":
                ray_imports.append(f"{path}:{line}")
            if (target := own_module(dotted, modules)) is None:
                continue
            place = f"{path}:{line} imports {target}"
            if target in ORDER and name in ORDER and ORDER.index(target) >= ORDER.index(name):
                found.append(f"{place}, which comes later: imports look upward in ORDER only")
            if name.startswith("families.") and target.startswith("families.") and target != "families.base":
                found.append(f"{place}: a family may not import another")
            optional = target.split(".")[0] in REMOVABLE and name.split(".")[0] not in MAY_IMPORT_REMOVABLE
            if optional and not in_function:
                found.append(f"{place}: the core must work with baselines/ and executors/ deleted")
    if len(ray_imports) > 1:
        found.append(f"ray is imported {len(ray_imports)} times ({', '.join(ray_imports)}): once is enough")
    return found


def import_without(
    blocked: list[str], modules: list[str], path: Path, then: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Imports `modules` from the folder `path` in a new interpreter that cannot find `blocked`; runs `then` there."""
    return subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT + then, ",".join(blocked), *modules],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def read_sources() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}


def test_source_keeps_the_rules() -> None:
    sources = read_sources()
    assert {"noise.py", "cli.py"} <= set(sources)
    assert not violations(sources), "\n".join(violations(sources))


def test_order_names_only_modules_that_exist() -> None:
    assert sorted(ORDER) == sorted({module_name(path) for path in read_sources()})


@pytest.mark.parametrize(
    "statement",
    [
        "import diffusionblocks.train",
        "from diffusionblocks import train",
        "from diffusionblocks.train import fit",
        "from .train import fit",
        "from . import train",
        "def late():\n    from diffusionblocks.train import fit",
        "if True:\n    import numpy, diffusionblocks.train as loop",
    ],
)
def test_finds_an_import_of_a_later_module(statement: str) -> None:
    assert [text for text in violations({"noise.py": statement}) if "imports train, which comes later" in text]


@pytest.mark.parametrize(
    ("path", "source", "part"),
    [
        ("noise.py", "from diffusionblocks import LogNormal", "imports diffusionblocks, which comes later"),
        ("noise.py", "from diffusionblocks.noise import LogNormal", "imports noise, which comes later"),
        ("families/vit.py", "from ..train import fit", "imports train, which comes later"),
        ("families/vit.py", "from .dit import DiT", "a family may not import another"),
        ("families/base.py", "from diffusionblocks.families.vit import ViT", "a family may not import another"),
        ("evaluate.py", "from diffusionblocks.baselines import end_to_end", "baselines/ and executors/ deleted"),
        ("compare.py", "from diffusionblocks.executors.local import run_in_order", "baselines/ and executors/ deleted"),
        ("report.py", "try:\n    import ray\nexcept ImportError:\n    from ray import get", "ray is imported 2 times"),
        ("convert.py", "", "convert.py is not in ORDER: add 'convert'"),
        ("families/utils.py", "", "has a name that says nothing"),
        ("noise.py", "\n" * 501, "has 501 lines"),
    ],
)
def test_finds_each_broken_rule(path: str, source: str, part: str) -> None:
    sources = {path: source, "families/dit.py": ""}
    assert any(part in text for text in violations(sources)), violations(sources)


def test_allows_what_the_rules_allow() -> None:
    sources = {
        "noise.py": "import numpy\n" + "\n" * 499,
        "families/vit.py": "from .base import Family\nfrom diffusionblocks import objective, seeds",
        "evaluate.py": "def late():\n    from diffusionblocks.baselines import end_to_end",
        "executors/local.py": "import ray\nfrom diffusionblocks.run import BlockJob",
        "__init__.py": "from .noise import LogNormal",
        "cli.py": "from diffusionblocks import LogNormal, executors",
    }
    assert violations(sources) == []


def test_core_works_without_baselines_and_executors(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in REMOVABLE:
        shutil.rmtree(tmp_path / PACKAGE / folder)
    names = [module_name(path.relative_to(tmp_path / PACKAGE).as_posix()) for path in tmp_path.rglob("*.py")]
    # The command line is no core: it starts executors.
    dotted = [PACKAGE, *(f"{PACKAGE}.{name}" for name in sorted(names) if name not in (PACKAGE, "cli"))]
    done = import_without(OPTIONAL, dotted, tmp_path, TRAIN_ONE_BLOCK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(dotted) > 20
    assert all(line.startswith(str(tmp_path)) for line in done.stdout.splitlines())
    assert (tmp_path / "run" / "block-1.safetensors").exists()


def test_a_missing_package_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import kornia.augmentation")
    done = import_without(["kornia"], ["planted"], tmp_path)
    assert done.returncode == 1
    assert "No module named 'kornia'" in done.stderr


def test_command_line_works_without_optional_packages(tmp_path: Path) -> None:
    network = "--layers=3 --width=8 --heads=2 --mlp=8 --patch=4 --condition_width=2 --updates=3 --batch_size=8"
    commands = [["partition"], ["train", "vit-digits", *network.split(), "--out=run"]]
    script = f"from diffusionblocks.cli import main\nsys.exit(sum(main(words) for words in {commands}))"
    done = import_without(OPTIONAL, [], SOURCE.parent, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 3
