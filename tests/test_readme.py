"""What the README and the docs name exists: commands, options, recipes, targets, links, functions."""

import importlib
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diffusionblocks import cli
from diffusionblocks.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks/README.md", ROOT / "CONTRIBUTING.md"]
NAMED_PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if page.exists()]


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands_in(block: str) -> Iterator[list[str]]:
    """The words of each shell command: comments, prompts and variables off, continued lines joined."""
    for line in block.replace("\\\n", " ").splitlines():
        if not re.match(r"^(\$ )?([A-Z_]+=\S* )*[\w./-]*(diffusionblocks|make|python3?) ", line):
            continue
        for part in re.split(r"&&|;|\|\|?", line.removeprefix("$ ")):
            words = shlex.split(part.split(">")[0], comments=True)
            while words and "=" in words[0]:
                words = words[1:]
            if words:
                yield words


def all_commands(page: Path) -> list[list[str]]:
    return [words for block in code_blocks(page.read_text("utf-8")) for words in commands_in(block)]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


class Parsed(Exception):
    pass


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Parses a `diffusionblocks` command as the program does, and stops before it does anything."""
    original = cli._parse

    def parse(*given: Any) -> None:
        original(*given)
        raise Parsed

    monkeypatch.setattr(cli, "_parse", parse)
    monkeypatch.chdir(folder)
    for option, value in pairwise(words):
        if option in ("--json", "--config"):
            Path(value).parent.mkdir(parents=True, exist_ok=True)
        if option == "--config":
            Path(value).write_text("{}")
    if "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            cli.main(words)
        return
    try:
        code = cli.main(words)
    except Parsed:
        return
    pytest.fail(f"`diffusionblocks {shlex.join(words)}` ended with code {code}")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", NAMED_PAGES)
def test_commands_in_code_blocks_work(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in all_commands(page):
        program = Path(words[0]).name
        if program == "diffusionblocks":
            with monkeypatch.context() as patch:
                check_command(words[1:], patch, tmp_path)
        elif program == "make":
            targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert set(targets) <= make_targets(), words
        elif program.startswith("python") and len(words) > 1 and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), words


def test_readme_shows_the_commands() -> None:
    shown = all_commands(ROOT / "README.md")
    assert ["make", "demo"] in shown
    assert ["make", "test"] in shown
    assert {"train", "merge", "evaluate", "compare"} <= {words[1] for words in shown if words[0] == "diffusionblocks"}


@pytest.mark.parametrize("page", NAMED_PAGES)
def test_commands_in_the_prose_exist(page: Path) -> None:
    text = prose(page.read_text("utf-8"))
    for target in re.findall(r"`make ([\w-]+)", text):
        assert target in make_targets()
    for command in re.findall(r"`diffusionblocks ([\w-]+)", text):
        assert command in cli.COMMANDS
    for script in re.findall(r"`python ([\w./-]+\.py)", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", NAMED_PAGES)
def test_links_and_pictures_exist(page: Path) -> None:
    text = prose(page.read_text("utf-8"))
    targets = re.findall(r"\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)", text)
    targets += re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    missing = []
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = page if not path else page.parent / path
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            missing.append(target)
    assert missing == []


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", NAMED_PAGES)
def test_recipes_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:paper-)?vit-[a-z0-9-]*[a-z0-9])`", page.read_text("utf-8")))
    assert named <= set(RECIPES)


def references(text: str) -> list[tuple[str, list[str]]]:
    """Each `file.py` with the names that follow it: `noise.py` `LogNormal`, `NoiseLaw.widen`."""
    found = re.findall(r"`([\w/]+\.py)`((?:,? `[A-Za-z_][\w.]*`)*)", text)
    return [(path, re.findall(r"`([\w.]+)`", names)) for path, names in found]


@pytest.mark.parametrize("page", NAMED_PAGES)
def test_functions_named_after_their_files_exist(page: Path) -> None:
    missing = []
    for path, names in references(prose(page.read_text("utf-8"))):
        if not (ROOT / "src/diffusionblocks" / path).exists():
            if not (ROOT / path).exists() and not (page.parent / path).exists():
                missing.append(path)
            continue
        module = importlib.import_module("diffusionblocks." + path.removesuffix(".py").replace("/", "."))
        for name in names:
            owner: Any = module
            for part in name.split("."):
                if not hasattr(owner, part) and part not in getattr(owner, "__dataclass_fields__", {}):
                    missing.append(f"{path} {name}")
                    break
                owner = getattr(owner, part, None)
    assert missing == []


# -- the checks themselves ----------------------------------------------------------------------------------------


def test_commands_are_found_as_a_reader_types_them() -> None:
    block = (
        "$ diffusionblocks train vit-digits \\\n  --out 'a b'  # all blocks\n"
        "OMP_NUM_THREADS=1 .venv/bin/diffusionblocks report x && make demo QUICK=1\n"
        "some output about diffusionblocks and make\n"
    )
    assert list(commands_in(block)) == [
        ["diffusionblocks", "train", "vit-digits", "--out", "a b"],
        [".venv/bin/diffusionblocks", "report", "x"],
        ["make", "demo", "QUICK=1"],
    ]


@pytest.mark.parametrize(
    "words",
    ["train vit-foo", "train vit-digits --epochs 3", "fly", "partition --blocks three", "merge a", "train --out a"],
)
def test_a_wrong_command_is_noticed(
    words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(pytest.fail.Exception, match="ended with code 2"):
        check_command(words.split(), monkeypatch, tmp_path)


def test_headings_and_references_are_read() -> None:
    assert references("`noise.py` `LogNormal`, `NoiseLaw.widen` and `seeds.py`") == [
        ("noise.py", ["LogNormal", "NoiseLaw.widen"]),
        ("seeds.py", []),
    ]
    assert "two-commands" in anchors(ROOT / "README.md")
