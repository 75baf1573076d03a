"""Files: atomic writes, strict loads with one clear sentence, and merging."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from diffusionblocks import checkpoint
from diffusionblocks.checkpoint import RunFolder, State, check_same, merge, read_json, write_atomic, write_json
from diffusionblocks.cli import main
from diffusionblocks.compare import test_figures as figures_of_the_test_split
from diffusionblocks.config import DataSettings, InferenceSettings, NoiseSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import TrainSettings

PARTS = ("block-0", "block-1")
RECIPE = Recipe(
    name="files",
    blocks=2,
    network=ViTSettings(layers=4, width=16, heads=2, mlp=32, patch=4, condition_width=4),
    training=TrainSettings(updates=2, batch_size=16, warmup=0, checkpoint_every=1),
)


pytestmark = pytest.mark.usefixtures("little_to_sweep")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both blocks, trained into one folder. Not to be changed: copy it."""
    folder = tmp_path_factory.mktemp("files") / "whole"
    for part in PARTS:
        run_job(BlockJob(RECIPE, part, str(folder)))
    return folder


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "whole"))


def half(whole: Path, part: str, target: Path) -> Path:
    """A folder in which only `part` was trained."""
    shutil.copytree(whole, target)
    for file in target.glob(f"{'block-1' if part == 'block-0' else 'block-0'}.*"):
        file.unlink()
    return target


def folder_of(path: Path, recipe: Recipe = RECIPE) -> RunFolder:
    return Run.of(recipe).folder(path)


def refused(action: Callable[[], Any], *words: str) -> str:
    """The one sentence of an InputError; it must say what was wrong and, after a colon or semicolon, what to do."""
    with pytest.raises(InputError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"[:;] \w+", text)
    for word in words:
        assert word in text
    return text


def load(path: Path, part: str = "block-0", recipe: Recipe = RECIPE) -> None:
    run = Run.of(recipe)
    run.folder(path).load(part, run.family.build_block(int(part[-1])))


# Atomic writes


def test_an_exception_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half_written(draft: Path) -> None:
        draft.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, half_written)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_exception_before_the_file_moves_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_json(path, {"old": 1})

    def no_move(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", no_move)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_reaches_the_disk_before_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(checkpoint.os, "fsync", lambda number: (events.append("sync"), sync(number)))
    monkeypatch.setattr(checkpoint.os, "replace", lambda *paths: (events.append("move"), move(*paths)))
    write_json(tmp_path / "file", [1])
    assert events == ["sync", "move"]
    assert read_json(tmp_path / "file") == [1]


# States


def test_state_comes_back_with_every_bit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(7), "c": torch.randn(5).bfloat16()}
    figures = {"seconds": 0.1 + 0.2, "last_steps": [0.1], "peak_bytes": None}
    folder.save_state("block-0", State(5, dict(tensors), figures))
    state = folder.load_state("block-0")
    assert state is not None
    assert (state.update, state.figures) == (5, figures)
    assert state.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor)
    assert folder.load_state("block-1") is None


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-1] ^= 1
    path.write_bytes(
        {
            "truncated": content[:-10],
            "in the header": content[:40],
            "empty": b"",
            "noise": bytes(range(256)) * 4,
            "flipped": bytes(flipped),
        }[how]
    )


@pytest.mark.parametrize("how", ["truncated", "in the header", "empty", "noise"])
def test_a_damaged_state_is_refused(tmp_path: Path, how: str) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path), until=1))
    spoil(tmp_path / "block-0.state.safetensors", how)
    before = sorted(tmp_path.iterdir())
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), "block-0.state.safetensors", "damaged")
    assert sorted(tmp_path.iterdir()) == before


def test_another_parts_state_is_refused(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-1", str(tmp_path), until=1))
    (tmp_path / "block-1.state.safetensors").rename(tmp_path / "block-0.state.safetensors")
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), "block-0.state.safetensors", "block-0")


def test_a_plain_safetensors_file_is_no_state(tmp_path: Path) -> None:
    folder_of(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "block-0.state.safetensors")
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), "block-0.state.safetensors")


def test_drafts_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path), until=1))
    mine, other = tmp_path / ".block-0.state.safetensors.1.tmp", tmp_path / ".block-1.state.safetensors.1.tmp"
    mine.write_text("half")
    other.write_text("half")
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path)))
    # The other part may be in training elsewhere.
    assert not mine.exists()
    assert other.exists()


# Strict loads


def test_a_finished_part_loads(whole: Path) -> None:
    block = Run.of(RECIPE).family.build_block(1)
    folder_of(whole).load("block-1", block)
    saved = load_file(whole / "block-1.safetensors")
    assert block.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in block.state_dict().items())


def test_a_missing_file_is_refused(whole: Path) -> None:
    (whole / "block-0.safetensors").unlink()
    refused(lambda: load(whole), "block-0.safetensors", "missing or unfinished")


def test_an_unfinished_part_is_refused(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path), until=1))
    refused(lambda: load(tmp_path), "block-0.safetensors", "missing or unfinished", "train block-0")


@pytest.mark.parametrize("how", ["truncated", "in the header", "empty", "noise", "flipped"])
def test_a_damaged_file_is_refused(whole: Path, how: str) -> None:
    spoil(whole / "block-0.safetensors", how)
    refused(lambda: load(whole), "block-0.safetensors", "restore it or train block-0 again")


@pytest.mark.parametrize("position", [0, 8, 100, 1000, 5000, -1])
def test_any_flipped_bit_is_refused(whole: Path, position: int) -> None:
    path = whole / "block-0.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    refused(lambda: load(whole), "block-0.safetensors", "restore it or train block-0 again")


def test_another_blocks_file_is_refused(whole: Path) -> None:
    shutil.copy(whole / "block-1.safetensors", whole / "block-0.safetensors")
    refused(lambda: load(whole), "block-0.safetensors", "isn't the file")
    # With its sidecar, too.
    shutil.copy(whole / "block-1.json", whole / "block-0.json")
    refused(lambda: load(whole), "block-0.safetensors", "isn't the file")


def test_a_foreign_file_with_a_right_checksum_is_refused(whole: Path) -> None:
    """The names and shapes are compared too, not only checksums."""
    save_file({"weight": torch.zeros(2, 2)}, whole / "block-0.safetensors")
    facts = read_json(whole / "block-0.json")
    write_json(whole / "block-0.json", {**facts, "sha256": checkpoint.sha256(whole / "block-0.safetensors")})
    refused(lambda: load(whole), "block-0.safetensors", "another network", "missing")
    tensors = load_file(whole / "block-1.safetensors")
    name = min(tensors)
    tensors[name] = torch.zeros(7)
    folder_of(whole).finish("block-1", tensors, {})
    refused(lambda: load(whole, "block-1"), "block-1.safetensors", "another network", name, "(7,)")


def test_a_torn_sidecar_is_refused(whole: Path) -> None:
    (whole / "block-0.json").write_text('{"part": "bl')
    refused(lambda: load(whole), "block-0.json", "JSON")


def test_weights_are_never_loaded_in_part() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tensors = checkpoint.own_tensors(network)
    del tensors["1.bias"]
    with pytest.raises(ValueError, match="names"):
        checkpoint.load_own_tensors(network, tensors)


# Folders


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (replace(RECIPE, seed=1), "recipe.seed"),
        (replace(RECIPE, blocks=4), "recipe.blocks"),
        (replace(RECIPE, layer_split=(1, 3)), "recipe.layer_split"),
        (replace(RECIPE, network=replace(RECIPE.network, mlp=48)), "recipe.network.mlp"),
        (replace(RECIPE, noise=NoiseSettings(p_mean=0.4)), "recipe.noise.p_mean"),
        (replace(RECIPE, training=replace(RECIPE.training, updates=3)), "recipe.training.updates"),
        (replace(RECIPE, training=replace(RECIPE.training, ema=0.5)), "recipe.training.ema"),
        (replace(RECIPE, data=DataSettings(train_examples=100)), "recipe.data.train_examples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_of_another_recipe_is_refused_by_the_fields_name(whole: Path, recipe: Recipe, field: str) -> None:
    before = {path: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    text = refused(lambda: run_job(BlockJob(recipe, "block-0", str(whole))), str(whole), " was made with ")
    assert text.split(" was made with ")[1].split(" = ")[0] == field
    assert before == {path: path.read_bytes() for path in whole.iterdir() if path.is_file()}


def test_the_first_differing_field_is_named_with_both_values(whole: Path) -> None:
    text = refused(lambda: folder_of(whole, replace(RECIPE, seed=41)))
    assert text.startswith(f"{whole} was made with recipe.seed = 0, not 41: ")


def test_a_folder_of_another_method_is_refused(whole: Path) -> None:
    refused(lambda: run_job(BlockJob(RECIPE, "network", str(whole), "end_to_end")), "method")


def test_other_data_under_the_same_name_is_refused(whole: Path) -> None:
    manifest = read_json(whole / "manifest.json")
    manifest["data"]["checksum"] = "0" * 64
    write_json(whole / "manifest.json", manifest)
    refused(lambda: folder_of(whole), "data.checksum")


def test_free_fields_may_differ(whole: Path) -> None:
    training = replace(RECIPE.training, checkpoint_every=7, validate_every=1, logger="tensorboard")
    changed = replace(RECIPE, training=training, inference=InferenceSettings(steps=8, answer="last"))
    before = (whole / "manifest.json").read_bytes()
    load(whole, recipe=changed)
    assert (whole / "manifest.json").read_bytes() == before


def test_the_datas_place_may_differ() -> None:
    here, there = (replace(RECIPE, data=DataSettings("mnist", root)) for root in ("here", "there"))
    assert here.identity() == there.identity()


def test_where_it_was_trained_may_differ(whole: Path) -> None:
    manifest = read_json(whole / "manifest.json")
    manifest["environment"] = {"torch": "0.1"}
    write_json(whole / "manifest.json", manifest)
    load(whole)


def test_a_field_that_is_gone_or_new_is_named() -> None:
    refused(lambda: check_same({"a": {"b": 1}}, {"a": {}}, "here"), "a.b", "null")
    refused(lambda: check_same({"a": {}}, {"a": {"c": 2}}, "here"), "a.c", "null")
    refused(lambda: check_same({"a": {"b": 1}}, {"a": 3}, "here"), " a = 3")


def test_a_filled_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), str(tmp_path), "holds other things")
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize("below", ["", "/runs/a"])
def test_a_file_for_a_folder_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", f"{tmp_path}/file{below}")), "is a file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_torn_manifest_is_refused(whole: Path) -> None:
    (whole / "manifest.json").write_text('{"format"')
    refused(lambda: folder_of(whole), "manifest.json", "JSON")


def test_a_run_killed_before_its_manifest_starts_anew(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.1.tmp").write_text("{")
    folder_of(tmp_path)
    assert (tmp_path / "manifest.json").exists()


def test_a_folder_whose_manifest_another_process_just_wrote_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Run.of(RECIPE).manifest()
    listing = Path.iterdir

    def slow_listing(path: Path) -> list[Path]:
        found = list(listing(path))
        write_json(tmp_path / "manifest.json", manifest)
        return found

    monkeypatch.setattr(Path, "iterdir", slow_listing)
    RunFolder(tmp_path, manifest)


# Manifest


@pytest.mark.parametrize(
    ("shell", "method"), [("per_block", "blocks"), ("joint", "blocks"), ("per_block", "end_to_end")]
)
def test_every_parameter_has_one_owner(tmp_path: Path, shell: str, method: str) -> None:
    run = Run.of(replace(RECIPE, shell=shell), method)
    found = []
    for job in run.jobs():
        run_job(BlockJob(run.recipe, job.part, str(tmp_path), method))
        found += [(name, job.part) for name in load_file(tmp_path / f"{job.part}.safetensors")]
        network = job.build()
        count = sum(tensor.numel() for tensor in load_file(tmp_path / f"{job.part}.safetensors").values())
        assert count == sum(parameter.numel() for parameter in network.parameters())
    assert len({name for name, _ in found}) == len(found)
    assert read_json(tmp_path / "manifest.json")["owners"] == dict(found)


def test_layers_keep_their_global_number(whole: Path) -> None:
    for part, layers in (("block-0", {0, 1}), ("block-1", {2, 3})):
        names = load_file(whole / f"{part}.safetensors")
        assert {int(name.split(".")[2]) for name in names if name.startswith("stack.layers.")} == layers
        shells = {name.split(".")[1] for name in names if name.startswith("shells.")}
        assert shells == {part[-1]}
        assert all(name.startswith(("stack.layers.", "shells.")) for name in names)


def test_manifest_tells_the_recipe_and_the_noise_map(whole: Path) -> None:
    manifest = read_json(whole / "manifest.json")
    partition = Run.of(RECIPE).family.partition
    assert Recipe.from_dict(manifest["recipe"]).identity() == RECIPE.identity()
    assert manifest["noise_map"]["edges"] == list(partition.edges)
    assert manifest["noise_map"]["layers"] == [[0, 1], [2, 3]]
    assert manifest["environment"]["torch"] == torch.__version__


def test_sidecar_has_checksum_and_size(whole: Path) -> None:
    facts = read_json(whole / "block-0.json")
    content = (whole / "block-0.safetensors").read_bytes()
    assert facts["bytes"] == len(content)
    assert facts["sha256"] == checkpoint.hashlib.sha256(content).hexdigest()
    assert facts["part"] == "block-0"


def test_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    """safetensors writes the fields of a header in an order that changes from call to call."""
    folder = RunFolder(tmp_path, {})
    written = set()
    for _ in range(20):
        folder.finish("block-0", {"b": torch.ones(3), "a": torch.zeros(2)}, {})
        written.add((tmp_path / "block-0.safetensors").read_bytes())
    assert len(written) == 1


# Merging


def test_merged_halves_are_the_whole(whole: Path, tmp_path: Path) -> None:
    halves = [half(whole, part, tmp_path / part) for part in PARTS]
    merged = merge(halves, tmp_path / "merged", PARTS)
    for part in PARTS:
        for name in (f"{part}.safetensors", f"{part}.json"):
            assert (merged.path / name).read_bytes() == (whole / name).read_bytes()
        logs = Path("logs", part, "from-0000000", "metrics.csv")
        assert (merged.path / logs).read_bytes() == (whole / logs).read_bytes()
    run = Run.of(RECIPE)
    assert figures_of_the_test_split(run, merged) == figures_of_the_test_split(run, folder_of(whole))
    # It's a run's folder like any other: nothing is left to train.
    facts = run_job(BlockJob(RECIPE, "block-1", str(merged.path)))
    assert facts == read_json(whole / "block-1.json")


def test_merging_into_one_of_the_sources(whole: Path, tmp_path: Path) -> None:
    halves = [half(whole, part, tmp_path / part) for part in PARTS]
    merge(halves, halves[0], PARTS)
    for part in PARTS:
        load(halves[0], part)


def test_the_same_block_twice_with_the_same_bytes_is_fine(whole: Path, tmp_path: Path) -> None:
    merge([whole, half(whole, "block-0", tmp_path / "half")], tmp_path / "merged", PARTS)
    load(tmp_path / "merged", "block-1")


def test_the_same_block_with_different_bytes_is_refused(whole: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    tensors = load_file(other / "block-1.safetensors")
    tensors[min(tensors)] += 1
    folder_of(other).finish("block-1", tensors, {})
    refused(lambda: merge([whole, other], tmp_path / "merged", PARTS), "block-1", str(whole), str(other))


def test_a_missing_block_is_refused(whole: Path, tmp_path: Path) -> None:
    source = half(whole, "block-0", tmp_path / "half")
    refused(lambda: merge([source], tmp_path / "merged", PARTS), "block-1", "train it")


def test_a_damaged_source_is_refused(whole: Path, tmp_path: Path) -> None:
    spoil(whole / "block-1.safetensors", "flipped")
    refused(lambda: merge([whole], tmp_path / "merged", PARTS), "block-1.safetensors")
    assert not (tmp_path / "merged" / "block-1.safetensors").exists()


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (replace(RECIPE, seed=1), "recipe.seed"),
        (replace(RECIPE, network=replace(RECIPE.network, mlp=48)), "recipe.network.mlp"),
        (replace(RECIPE, data=DataSettings(train_examples=100)), "recipe.data.train_examples"),
    ],
    ids=["seed", "recipe", "data"],
)
def test_folders_that_do_not_belong_together_are_refused(
    whole: Path, tmp_path: Path, recipe: Recipe, field: str
) -> None:
    folder_of(tmp_path / "other", recipe)
    text = refused(lambda: merge([whole, tmp_path / "other"], tmp_path / "merged", PARTS), str(tmp_path / "other"))
    assert text.split(" was made with ")[1].split(" = ")[0] == field
    assert not (tmp_path / "merged").exists()


def test_a_folder_without_a_run_is_refused(whole: Path, tmp_path: Path) -> None:
    refused(lambda: merge([whole, tmp_path / "nothing"], tmp_path / "merged", PARTS), "manifest.json is missing")
    assert not (tmp_path / "nothing").exists()


def test_parts_that_share_a_name_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "source", {})
    for part in PARTS:
        folder.finish(part, {"weight": torch.zeros(2)}, {})
    refused(lambda: merge([folder.path], tmp_path / "merged", PARTS), "'weight' is owned by block-0 and by block-1")


def test_evaluation_may_take_another_walk_than_the_run_was_made_for(tmp_path: Path) -> None:
    recipe = replace(RECIPE, inference=InferenceSettings(answer="last"))
    for part in PARTS:
        run_job(BlockJob(recipe, part, str(tmp_path / "run")))
    figures = tmp_path / "figures.json"
    assert main(["evaluate", str(tmp_path / "run"), "--answer", "average", "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())["test_samples"] == 360
