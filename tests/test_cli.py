"""The command line: what it writes, how options may be spelled, and one line for every fault."""

import base64
import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusionblocks import cli
from diffusionblocks.cli import main
from diffusionblocks.compare import DEFAULT_METHODS
from diffusionblocks.config import FAMILIES, Recipe, sections
from diffusionblocks.memory import KINDS
from diffusionblocks.recipes import RECIPES
from diffusionblocks.run import BlockJob

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
SOURCE = Path(__file__).parents[1] / "src"
NETWORK = ["--network.layers=3", "--width=8", "--heads=2", "--mlp=8", "--network.patch=4", "--condition-width=2"]
TINY = ["vit-digits", *NETWORK, "--training.updates=3", "--batch-size=8", "--warmup=1"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are as a user types them, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIFFUSIONBLOCKS_DATA", raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run, trained at once. Not to be changed: copy it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *TINY, f"--out={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick comparison of all methods. Not to be changed."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    words = ["compare", *TINY, "--quick", f"--out={folder}", f"--json={folder.parent}/copy.json"]
    assert main(words) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    capsys.readouterr()
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("diffusionblocks: ")
    assert len(line) > 40
    assert "Traceback" not in captured.out
    return line


def read(path: Path | str) -> Any:
    return json.loads(Path(path).read_text())


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[BlockJob]:
    """What `train` would have trained."""
    found: list[BlockJob] = []

    def keep(jobs: list[BlockJob], runner: Any) -> list[None]:
        found.extend(jobs)
        return []

    monkeypatch.setattr(cli.local, "run_in_order", keep)
    return found


# -- partition ----------------------------------------------------------------------------------------------------


def test_partition_prints_the_published_edges() -> None:
    assert main(["partition", "--json=figures.json"]) == 0
    figures = read("figures.json")
    assert set(figures) == {"blocks", "walk"}
    names = {"block", "layers", "sigma_max", "sigma_min", "overlap_sigma_max", "overlap_sigma_min", "mass"}
    assert all(set(block) == names for block in figures["blocks"])
    assert all(set(call) == {"call", "sigma", "block"} for call in figures["walk"])
    edges = [figures["blocks"][0]["sigma_max"], *(block["sigma_min"] for block in figures["blocks"])]
    assert edges == pytest.approx(GOLDEN["block_boundaries"]["3"][::-1], rel=1e-9)
    assert [block["sigma_max"] for block in figures["blocks"]] == edges[:-1]
    assert [block["layers"] for block in figures["blocks"]] == [[0, 3], [4, 7], [8, 11]]
    assert [block["mass"] for block in figures["blocks"]] == pytest.approx([1 / 3] * 3)
    wide = [[block["overlap_sigma_min"], block["overlap_sigma_max"]] for block in figures["blocks"]]
    for (low, high), block in zip(wide, figures["blocks"], strict=True):
        alpha = (block["sigma_max"] / block["sigma_min"]) ** 0.05
        assert low == pytest.approx(max(0.002, block["sigma_min"] / alpha))
        assert high == pytest.approx(min(80, block["sigma_max"] * alpha))
    assert [(call["call"], call["block"]) for call in figures["walk"]] == [(0, 0), (1, 1), (2, 2)]
    assert [call["sigma"] for call in figures["walk"]] == edges[:-1]


def test_partition_options_take_effect() -> None:
    words = "--layers 6 --blocks 2 --layer_split 1,5 --overlap 0 --steps 5 --p-mean 0 --p-std 1 --sigma-min 0.1"
    assert main(["partition", *words.split(), "--sigma-max", "10", "--cut=uniform", "--json=figures.json"]) == 0
    figures = read("figures.json")
    assert [block["layers"] for block in figures["blocks"]] == [[0, 0], [1, 5]]
    assert [block["sigma_max"] for block in figures["blocks"]] == pytest.approx([10, 1])
    assert [block["overlap_sigma_max"] for block in figures["blocks"]] == pytest.approx([10, 1])
    assert [call["block"] for call in figures["walk"]] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("words", [["--layer_split", "12"], ["--layer-split=12"], ["--layer_split", "[12]"]])
def test_a_list_may_have_one_number(words: list[str]) -> None:
    assert main(["partition", "--blocks=1", *words]) == 0


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "diffusionblocks.cli", "partition", "--blocks", "13"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "diffusionblocks: 12 layers can't be cut into 13 blocks: choose 1 to 12 blocks\n"


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["--p-mean -1", "--p-mean=-1", "--p_mean -1", "--p_mean=-1", "--noise.p_mean -1", "--noise.p-mean=-1.0"],
)
def test_spellings_of_an_option(jobs: list[BlockJob], words: str) -> None:
    assert main(["train", *TINY, *words.split()]) == 0
    assert [job.recipe.noise.p_mean for job in jobs] == [-1.0] * 3


@pytest.mark.parametrize("words", [["--layer_split", "3,6,3"], ["--layer-split=3,6,3"], ["--layer_split=[3,6,3]"]])
def test_a_list_may_be_bare(jobs: list[BlockJob], words: list[str]) -> None:
    assert main(["train", "vit-digits", *words]) == 0
    assert jobs[0].recipe.layer_split == (3, 6, 3)


def test_commas_in_paths_stay(jobs: list[BlockJob]) -> None:
    assert main(["train", "vit-digits", "--out", "a,b"]) == 0
    assert jobs[0].folder == "a,b"


def test_config_file_sets_what_the_command_does_not(jobs: list[BlockJob]) -> None:
    Path("run.yaml").write_text("seed: 7\nnoise:\n  p_mean: -1.0\n  overlap: 0.1\nlayer_split: [3, 6, 3]\n")
    assert main(["train", "vit-digits", "--config", "run.yaml", "--overlap", "0.2"]) == 0
    recipe, named = jobs[0].recipe, RECIPES["vit-digits"]
    noise = dataclasses.replace(named.noise, p_mean=-1.0, overlap=0.2)
    assert recipe == dataclasses.replace(named, seed=7, layer_split=(3, 6, 3), noise=noise)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_own_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Recipe] = []

    class Stop(Exception):
        pass

    def of(recipe: Recipe) -> None:
        found.append(recipe)
        raise Stop

    monkeypatch.setattr(cli.Run, "of", of)
    with pytest.raises(Stop):
        main(["train", name])
    assert found == [RECIPES[name]]


@pytest.mark.parametrize("family", FAMILIES)
def test_short_spellings_are_unambiguous(family: str) -> None:
    own = [field.name for field in dataclasses.fields(Recipe)]
    leaves = [field.name for section in sections(family).values() for field in dataclasses.fields(section)]
    of_commands = ["json", "out", "config", "block", "executor", "rotate", "methods", "quick", "recipe", "data_root"]
    of_commands += ["page_to", "budget", "chart"]
    assert [name for name, times in Counter([*own, *leaves, *of_commands]).items() if times > 1] == []


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_options(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, flag])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    expected = {
        "partition": ["--layers", "--blocks", "--overlap", "--steps", "--p_mean", "--p_std", "--sigma_min", "--json"],
        "merge": ["folder", "--out", "--json"],
        "evaluate": ["folder", "--steps", "--start", "--starts", "--solver", "--answer", "--data_root", "--json"],
        "report": ["folder", "--json"],
    }
    kinds = sections("vit").items()
    leaves = [f"--{name}.{field.name}" for name, kind in kinds for field in dataclasses.fields(kind)]
    recipe = ["RECIPE", "--seed", "--blocks", "--layer_split", "--shell", "--weight", "--config", *leaves]
    expected["plan"] = [*recipe, "--budget", "--methods", "--chart"]
    expected["train"] = [*recipe, "--out", "--block", "--rotate", "--page_to", "--executor"]
    expected["compare"] = [*recipe, "--out", "--methods", "--quick"]
    assert [option for option in expected[command] if option.lower() not in text.lower()] == []


def test_help_without_a_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in ((["--help"], 0), (["-h"], 0), ([], 2)):
        assert main(words) == code
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in cli.COMMANDS)
        assert all(name in text for name in RECIPES)


# -- train, merge, evaluate ---------------------------------------------------------------------------------------


def weights(folder: Path | str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}


@pytest.fixture
def walk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the evaluation all but its walk."""
    for name in ("step_sweep", "contributions", "block_report"):
        monkeypatch.setattr(cli, name, lambda *_: [])


def test_blocks_trained_apart_and_merged_are_the_run_trained_at_once(trained: Path, walk_only: None) -> None:
    assert main(["train", *TINY, "--out=a", "--block=2"]) == 0
    assert main(["train", *TINY, "--out=a", "--block=0"]) == 0
    assert main(["train", *TINY, "--out=b", "--block", "1"]) == 0
    assert set(weights("a")) == {"block-0.safetensors", "block-2.safetensors"}
    assert main(["merge", "a", "b", "--out", "joined", "--json=merge.json"]) == 0
    assert weights("joined") == weights(trained)
    merged = read("merge.json")
    assert merged["folder"] == "joined"
    assert set(merged["owners"].values()) == {"block-0", "block-1", "block-2"}
    assert main(["evaluate", "joined", "--json=joined.json"]) == 0
    assert main(["evaluate", str(trained), "--json=trained.json"]) == 0
    assert read("joined.json") == read("trained.json")
    assert 0 < read("joined.json")["walk"]["accuracy"] < 1


def test_evaluation_writes_every_part_of_its_report(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(trained), "--json=figures.json"]) == 0
    found = read("figures.json")
    assert set(found) == {"recipe", "seed", "test_samples", "walk", "step_sweep", "contributions", "blocks"}
    assert (found["recipe"], found["seed"], found["test_samples"]) == ("vit-digits", 0, 360)
    assert [call["block"] for call in found["walk"]["calls"]] == [0, 1, 2]
    assert {row["steps"] for row in found["step_sweep"]} == {1, 3, 6, 12}
    assert [row["block"] for row in found["contributions"]] == [0, 1, 2]
    assert {row["block"] for row in found["blocks"]} == {0, 1, 2}
    printed = f"test accuracy {100 * found['walk']['accuracy']:.2f} % of 360 samples (average)"
    assert printed in capsys.readouterr().out


def test_rotation_gives_the_same_bits(trained: Path) -> None:
    assert main(["train", *TINY, "--out=turns", "--rotate=2"]) == 0
    assert weights("turns") == weights(trained)


def test_train_writes_its_figures(trained: Path) -> None:
    # The run is finished: nothing is trained again, its figures are read.
    before = weights(trained)
    assert main(["train", *TINY, f"--out={trained}", "--json=figures.json"]) == 0
    assert weights(trained) == before
    figures = read("figures.json")
    assert (figures["recipe"], figures["seed"]) == ("vit-digits", 0)
    assert [part["part"] for part in figures["parts"]] == ["block-0", "block-1", "block-2"]
    for part in figures["parts"]:
        assert part["updates"] == 3
        assert part["layer_evaluations"] == 3 * 8 * 1
        assert_bytes(part["peak_bytes"])
        assert next(iter(part["validation"])) == "loss_at_sigma_max"


def assert_bytes(peak: dict[str, Any]) -> None:
    assert set(peak) == {"parameters", "gradients", "optimizer", "activations", "total"} == {*KINDS, "total"}
    assert all(type(value) is int and value >= 0 for value in peak.values())
    assert min(peak["parameters"], peak["optimizer"], peak["activations"]) > 0
    assert peak["total"] == sum(peak[kind] for kind in KINDS)


def test_evaluation_takes_the_stored_inference_and_other_ones(trained: Path, walk_only: None) -> None:
    words = ["--start=random", "--starts=2", "--answer=last", "--steps=6"]
    shutil.copytree(trained, "other")
    stored = read("other/manifest.json")
    stored["inference"].update(start="random", starts=2, answer="last", steps=6)
    Path("other/manifest.json").write_text(json.dumps(stored))
    asked = [
        ["evaluate", "other", "--json=stored.json"],
        ["evaluate", str(trained), *words, "--json=given.json"],
        ["evaluate", str(trained), "--json=default.json"],
    ]
    assert [main(command) for command in asked] == [0, 0, 0]
    assert read("stored.json") == read("given.json")
    assert [call["block"] for call in read("given.json")["walk"]["calls"]] == [0, 0, 1, 1, 2, 2]
    assert read("given.json")["walk"] != read("default.json")["walk"]


# -- compare, report ----------------------------------------------------------------------------------------------


def test_comparison_keeps_its_contract(compared: Path) -> None:
    found = read(compared / "comparison.json")
    assert found == read(compared.parent / "copy.json")
    assert (found["recipe"], found["seed"]) == ("vit-digits", 0)
    assert [row["method"] for row in found["rows"]] == list(DEFAULT_METHODS)
    assert {"end_to_end", "end_to_end_checkpointed", "blocks", "blocks_checkpointed"} <= set(DEFAULT_METHODS)
    for row in found["rows"]:
        assert_bytes(row["peak_bytes"])
        # 20 updates of 8 examples through 3 layers, however they are cut.
        assert row["layer_evaluations"] == found["settings"]["training"]["updates"] * 8 * 3
        assert 0 <= row["test_accuracy"] <= 1
        assert row["seconds"] > 0
        assert row["seconds_per_step"] > 0
        assert math.isfinite(row["test_cross_entropy"])
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["blocks"]["peak_bytes"]["total"] < rows["end_to_end"]["peak_bytes"]["total"]
    for method in ("blocks", "end_to_end"):  # checkpointing changes memory, not results
        assert rows[method]["test_accuracy"] == rows[f"{method}_checkpointed"]["test_accuracy"]
    with Image.open(compared / "comparison.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300


def test_quick_is_20_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[Recipe, list[str]]] = []

    class Stop(Exception):
        pass

    def compare(recipe: Recipe, methods: list[str], *_: Any) -> None:
        found.append((recipe, methods))
        raise Stop

    monkeypatch.setattr(cli, "compare", compare)
    for words in (["--quick"], ["--methods", "blocks"], ["--methods=blocks,end_to_end"]):
        with pytest.raises(Stop):
            main(["compare", "vit-digits", *words])
    assert [recipe.training.updates for recipe, _ in found] == [20, 400, 400]
    assert [methods for _, methods in found] == [list(DEFAULT_METHODS), ["blocks"], ["blocks", "end_to_end"]]


class Page(HTMLParser):
    """Cells of each table row, pictures' sources, the settings' text, and tags left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: list[str] = []
        self.settings = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "img":
            self.pictures.append(dict(attributes)["src"] or "")
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += text
        elif self._open and self._open[-1] == "pre":
            self.settings += text


def test_report_is_one_page_with_all_of_it(compared: Path) -> None:
    shutil.copytree(compared, "copy")
    Path("copy/comparison.png").unlink()  # it is drawn again
    assert main(["report", "copy", "--json=figures.json"]) == 0
    comparison = read(compared / "comparison.json")
    assert read("figures.json") == comparison
    page = Page(Path("copy/report.html").read_text())
    head, *rows = page.rows
    assert head[:2] == ["method", "test accuracy"]
    assert set(KINDS) <= set(head)
    assert [row[0] for row in rows] == [method.replace("_", " ") for method in DEFAULT_METHODS]
    assert [row[1] for row in rows] == [f"{100 * row['test_accuracy']:.1f} %" for row in comparison["rows"]]
    assert all(len(row) == len(head) for row in rows)
    assert json.loads(page.settings) == comparison["settings"]
    (picture,) = page.pictures
    content = base64.b64decode(picture.removeprefix("data:image/png;base64,"), validate=True)
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"


# -- refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    # words: what the line must say
    "fly": "unknown command 'fly': choose partition, plan, train",
    "train": "needs a recipe: choose vit-digits",
    "train --seed 1": "needs a recipe",
    "train vit-foo": "unknown recipe 'vit-foo': choose vit-digits",
    "compare vit-foo": "unknown recipe",
    "train vit-digits --foo 1": "unknown option '--foo'",
    "train vit-digits --noise.foo 1": "unknown option '--noise.foo'",
    "train vit-digits --noise.updates 1": "unknown option '--noise.updates'",
    "train vit-digits extra": "extra",
    "partition extra": "extra",
    "partition --blocks": "--blocks",
    "merge a": "out",
    "merge --out a": "folders",
    "evaluate": "folder",
    "report": "folder",
    # values of another type
    "train vit-digits --seed 1.5": '"seed"',
    "train vit-digits --width wide": "width",
    "train vit-digits --layer_split 3,x": "layer_split",
    "train vit-digits --learning_rate nan": "learning_rate",
    "train vit-digits --noise 3": "noise",
    "partition --blocks three": '"blocks"',
    "partition --sigma_max inf": "sigma_max",
    # layers and blocks
    "partition --blocks 13": "12 layers can't be cut into 13 blocks: choose 1 to 12",
    "partition --blocks 0": "into 0 blocks",
    "partition --blocks=-1": "into -1 blocks",
    "partition --layer_split 3,6,4": "[3, 6, 4]",
    "partition --layer_split 6,6": "[6, 6]",
    "partition --layer_split 12,0,0": "[12, 0, 0]",
    "train vit-digits --blocks 13": "into 13 blocks",
    "train vit-digits --blocks 0": "into 0 blocks",
    "train vit-digits --layer_split 3,6,4": "[3, 6, 4]",
    "train vit-digits --block 3": "choose 0 to 2",
    "train vit-digits --block=-1": "choose 0 to 2",
    # noise
    "partition --sigma_min 80": "sigma_min 80.0 and sigma_max 80.0",
    "partition --sigma_min 90": "sigma_min 90.0",
    "partition --sigma_min 0": "sigma_min 0.0",
    "partition --sigma_min=-1": "sigma_min -1.0",
    "train vit-digits --sigma_min 0": "sigma_min 0.0",
    "partition --p_std 0": "p_std 0.0",
    "partition --overlap 2": "overlap 2.0",
    "partition --overlap=-0.1": "overlap -0.1",
    "partition --steps 0": "0 steps",
    "partition --grid fine": "mass",
    "partition --cut fine": "equal_mass",
    "train vit-digits --cut fine": "unknown cut 'fine'",
    "train vit-digits --law cauchy": "unknown noise law 'cauchy'",
    "train vit-digits --sigma_data 0": "sigma_data 0.0",
    # the network and the loop
    "train vit-digits --patch 3": "8 pixels can't be cut into patches of 3",
    "train vit-digits --patch 0": "patch 0",
    "train vit-digits --heads 3": "heads 3",
    "train vit-digits --width 0": "width 0",
    "train vit-digits --context some": "isolated",
    "train vit-digits --readout all": "cls, z, mix",
    "train vit-digits --codes learned": "shell 'joint'",
    "train vit-digits --shell shared": "per_block or joint",
    "train vit-digits --weight snr": "unknown weight 'snr'",
    "train vit-digits --updates 0": "updates 0",
    "train vit-digits --batch_size 0": "batch_size 0",
    "train vit-digits --learning_rate=-1": "learning_rate -1.0",
    "train vit-digits --warmup=-1": "warmup -1",
    "train vit-digits --clip=-1": "clip",
    "train vit-digits --ema 1": "ema",
    "train vit-digits --precision fp8": "32-true",
    "train vit-digits --logger wandb": "csv, tensorboard",
    "train vit-digits --rotate 0": "0 updates",
    "train vit-digits --executor cluster": "local",
    # inference: found before anything is trained
    "train vit-digits --grid fine": "mass or karras",
    "train vit-digits --steps 0": "steps 0",
    "train vit-digits --solver rk4": "euler or heun",
    "train vit-digits --start one": "zero or random",
    "train vit-digits --answer first": "last or average",
    # data
    "train vit-digits --source imagenet": "unknown data source 'imagenet'",
    "train vit-mnist": "DIFFUSIONBLOCKS_DATA",
    "train vit-mnist --root absent": "absent isn't a folder",
    "train vit-digits --train_examples 3": "train_examples 3",
    "train vit-digits --augment mixup": "unknown augmentation 'mixup'",
    # options without effect
    "train vit-digits --law equal_information --p_mean 0": "no effect",
    "train vit-digits --law equal_information --p_std 1": "no effect",
    "train vit-digits --code_dim 8": "no effect",
    "train vit-digits --starts 4": "no effect without --start random",
    "train vit-digits --shell joint --block 0": "no block trains alone",
    # comparisons
    "compare vit-digits --methods magic": "unknown method 'magic'",
    "compare vit-digits --methods []": "nothing to compare",
    "compare vit-digits --block 0": "unknown option '--block'",
    # files
    "train vit-digits --config absent.yaml": "absent.yaml",
    "partition --json absent/figures.json": "absent/figures.json",
    "train vit-digits --json absent/figures.json": "absent/figures.json",
    "merge absent --out b": "absent/manifest.json is missing",
    "evaluate absent": "absent/manifest.json is missing",
    "report absent": "no comparison.json",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert REFUSED[words] in refused(capsys, *words.split())
    assert not list(Path().rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("noise: {p_meen: 1}", "p_meen"),
        ("noise: [", "parsing config"),
        ("nois: {p_mean: 1}", "nois"),
        ("seed: many", "seed"),
        ("network: {patch: 3}", "patches of 3"),
    ],
)
def test_faults_of_a_config_file_are_named(text: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(text)
    assert part in refused(capsys, "train", "vit-digits", "--config=run.yaml")


def test_a_diverging_run_names_block_and_update(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", *TINY, "--learning_rate=1e30", "--out=run")
    assert "block-0" in line
    assert "at update 1;" in line
    assert not list(Path("run").glob("*.safetensors"))


def test_faults_of_output_folders_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained, "run")
    before = weights("run")
    for word, field in (
        ("--width=16", "recipe.network.width = 8, not 16"),
        ("--seed=1", "recipe.seed = 0, not 1"),
        ("--p_mean=0", "noise"),
        ("--updates=4", "recipe.training.updates"),
    ):
        assert field in refused(capsys, "train", *TINY, word, "--out=run")
    assert weights("run") == before
    Path("file").touch()
    assert "is a file" in refused(capsys, "train", *TINY, "--out=file")
    Path("other").mkdir()
    Path("other/thesis.tex").touch()
    assert "holds other things" in refused(capsys, "train", *TINY, "--out=other")


def test_faults_of_trained_folders_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read(trained / "manifest.json")

    def foreign(name: str) -> str:
        return json.dumps({**manifest, "recipe": {**manifest["recipe"], name: 1}})

    faults = {
        "missing": ("block-1.safetensors", None, "block-1.safetensors is missing"),
        "truncated": ("block-1.safetensors", (trained / "block-1.safetensors").read_bytes()[:-9], "block-1"),
        "empty": ("block-1.safetensors", b"", "block-1"),
        "foreign": ("block-1.safetensors", (trained / "block-0.safetensors").read_bytes(), "block-1"),
        "torn sidecar": ("block-1.json", b'{"part": ', "block-1.json isn't readable"),
        "no manifest": ("manifest.json", None, "manifest.json is missing"),
        "torn manifest": ("manifest.json", b"{", "manifest.json isn't readable"),
        "other json": ("manifest.json", b"{}", "lacks 'recipe'"),
        "a list": ("manifest.json", b"[]", "lacks 'recipe'"),
        "newer": ("manifest.json", foreign("moe").encode(), "unknown recipe field 'moe'"),
    }
    for fault, (name, content, part) in faults.items():
        shutil.copytree(trained, fault)
        (Path(fault) / name).unlink()
        if content is not None:
            (Path(fault) / name).write_bytes(content)
        assert part in refused(capsys, "evaluate", fault), fault
    assert "block-1" in refused(capsys, "merge", "missing", "--out=joined")
    assert "block-1" in refused(capsys, "merge", "foreign", "--out=joined2")


def test_options_of_evaluate_without_effect_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, part in (
        ("--starts=3", "no effect without --start random"),
        ("--steps=0", "steps 0"),
        ("--grid=fine", "mass or karras"),
        ("--p_mean=1", "unknown option"),
        ("--json=absent/figures.json", "absent/figures.json"),
    ):
        assert part in refused(capsys, "evaluate", str(trained), word)


def test_runs_that_do_not_fit_are_not_merged(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--seed=1", "--block=1", "--out=seed-1"]) == 0
    assert "recipe.seed = 1, not 0" in refused(capsys, "merge", str(trained), "seed-1", "--out=joined")
    assert "none of the folders has block-0" in refused(capsys, "merge", "seed-1", "--out=joined")


def test_baselines_have_no_chain_to_evaluate(compared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the baseline end_to_end" in refused(capsys, "evaluate", str(compared / "end_to_end"))


def test_faults_of_a_comparison_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{", "{}", "[]", '{"rows": []}'):
        Path("comparison.json").write_text(content)
        assert "comparison.json" in refused(capsys, "report", ".")


def test_faults_of_data_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    good = {
        "train_x": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "train_y": np.arange(40) % 2,
        "test_x": rng.integers(0, 256, (10, 8, 8), dtype=np.uint8),
        "test_y": np.arange(10) % 2,
    }
    faults = {
        "nan": ("train_x", np.full((40, 8, 8), np.nan), "NaN"),
        "float": ("train_x", good["train_x"] / 255, "float64"),
        "label": ("train_y", good["train_y"] - 1, "from -1"),
        "class": ("train_y", good["train_y"] * 2, "none of class 1"),
        "one class": ("train_y", good["train_y"] * 0, "only 1 classes to train on"),
        "length": ("test_y", good["test_y"][:-1], "10 images and 9 labels"),
        "empty": ("test_x", good["test_x"][:0], "0 images"),
    }
    for fault, (name, array, part) in faults.items():
        Path(fault).mkdir()
        np.savez(Path(fault) / "mnist.npz", **{**good, name: array})
        words = ["--source=mnist", f"--root={fault}", "--out=run"]
        assert part in refused(capsys, "train", *TINY, *words), fault
    one_class = {**good, "train_y": good["train_y"] * 0, "test_y": good["test_y"] * 0}
    Path("single").mkdir()
    np.savez(Path("single/mnist.npz"), **one_class)
    assert "2 or more" in refused(capsys, "train", *TINY, "--source=mnist", "--root=single", "--out=run")
    assert not Path("run").exists()


def test_evaluation_finds_moved_data_and_refuses_other_data(
    walk_only: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    content = {"train_y": np.arange(40) % 2, "test_y": np.arange(10) % 2}
    content |= {f"{s}_x": rng.integers(0, 256, (n, 8, 8), dtype=np.uint8) for s, n in (("train", 40), ("test", 10))}
    for folder in ("data", "other"):
        Path(folder).mkdir()
        np.savez(Path(folder) / "mnist.npz", **content)
        content["test_x"] = content["test_x"] ^ 1
    assert main(["train", *TINY, "--source=mnist", "--root=data", "--out=run"]) == 0
    Path("data").rename("moved")
    cli_cache_clear()
    assert "data isn't a folder" in refused(capsys, "evaluate", "run")
    assert main(["evaluate", "run", "--data-root=moved", "--json=figures.json"]) == 0
    assert read("figures.json")["test_samples"] == 10
    assert "data.checksum" in refused(capsys, "evaluate", "run", "--data-root=other")


def cli_cache_clear() -> None:
    """As a new process would start: without the data set in memory."""
    from diffusionblocks import run

    run._load_data.cache_clear()
