"""Files: atomic writes, strict loads with one clear sentence, and merging."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diffusionblocks import checkpoint, files, train
from diffusionblocks.checkpoint import RunFolder, State, check_same, load_slices, merge
from diffusionblocks.cli import main
from diffusionblocks.compare import test_figures as figures_of_the_test_split
from diffusionblocks.config import DataSettings, InferenceSettings, NoiseSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.files import read_json, write_atomic, write_json
from diffusionblocks.memory import MemoryMeter
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import TrainSettings, make_average, make_optimizer

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


def own_tensors_of(part: str) -> dict[str, Tensor]:
    return checkpoint.own_tensors(Run.of(RECIPE).family.build_block(int(part[-1])))


def load(path: Path, part: str = "block-0", recipe: Recipe = RECIPE) -> None:
    run = Run.of(recipe)
    run.folder(path).load(part, run.family.build_block(int(part[-1])))


# Atomic writes


def test_an_exception_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half_written(draft: Path) -> None:
        draft.write_text("ne")
        raise OSError(errno.ENOSPC, "full")

    refused(lambda: write_atomic(path, half_written), str(path), "No space left on device", "make room")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_exception_before_the_file_moves_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_json(path, {"old": 1})

    def no_move(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", no_move)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_reaches_the_disk_before_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda number: (events.append("sync"), sync(number)))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (events.append("move"), move(*paths)))
    write_json(tmp_path / "file", [1])
    # The file, and then the folder's entry.
    assert events == ["sync", "move", "sync"]
    assert read_json(tmp_path / "file") == [1]


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
    ],
    ids=["0.8", "0.4"],
)
def test_what_safetensors_says_of_a_full_disk_is_understood(tmp_path: Path, text: str) -> None:
    def full(draft: Path) -> None:
        raise SafetensorError(text)

    refused(lambda: write_atomic(tmp_path / "file", full), "(No space left on device)", "make room")


def test_an_error_of_ours_stays_one(tmp_path: Path) -> None:
    def wrong(draft: Path) -> None:
        raise SafetensorError("no such kind of numbers")

    with pytest.raises(SafetensorError, match="no such kind"):
        write_atomic(tmp_path / "file", wrong)
    assert not os.listdir(tmp_path)


def test_a_file_may_be_read_by_whom_the_folder_allows(tmp_path: Path) -> None:
    """safetensors makes files for the owner alone."""
    folder = RunFolder(tmp_path, {})
    folder.finish("block-0", {"a": torch.zeros(2)}, {})
    by_hand = tmp_path / "by-hand"
    by_hand.touch()
    assert (tmp_path / "block-0.safetensors").stat().st_mode == by_hand.stat().st_mode


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


@pytest.mark.parametrize("how", ["truncated", "in the header", "empty", "noise", "flipped"])
def test_a_damaged_state_is_refused(tmp_path: Path, how: str) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path), until=1))
    spoil(tmp_path / "states" / "block-0.safetensors", how)
    before = sorted(tmp_path.iterdir())
    text = refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), "states/block-0.safetensors", "damaged")
    assert text.endswith(": delete it to train block-0 from the start, or restore it")
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def twice(tmp_path: Path) -> RunFolder:
    """A folder with the states of updates 2 and 5 of block-0."""
    folder = RunFolder(tmp_path / "twice", {})
    for update in (2, 5):
        folder.save_state("block-0", State(update, {"a": torch.full((3,), float(update))}, {"seconds": 0.5}))
    return folder


def update_of(folder: RunFolder) -> int:
    state = folder.load_state("block-0")
    assert state is not None
    assert state.tensors["a"].tolist() == [state.update] * 3
    return state.update


def test_the_state_before_is_kept(twice: RunFolder) -> None:
    assert update_of(twice) == 5
    twice.state_file("block-0").unlink()
    # As a kill between two moves leaves it: nothing to warn of.
    assert update_of(twice) == 2


def test_a_damaged_state_gives_way_to_the_one_before(twice: RunFolder) -> None:
    spoil(twice.state_file("block-0"), "flipped")
    with pytest.warns(UserWarning, match="is damaged") as caught:
        assert update_of(twice) == 2
    assert str(caught[0].message) == (
        f"{twice.state_file('block-0')} is damaged (its checksum doesn't fit): update 2 of "
        "states/block-0.previous.safetensors is used, and at most 3 later updates are lost"
    )
    # It doesn't push out the whole one, which a kill could otherwise leave as the only one.
    twice.save_state("block-0", State(4, {"a": torch.full((3,), 4.0)}, {}))
    assert update_of(twice) == 4
    twice.state_file("block-0").unlink()
    assert update_of(twice) == 2


def test_the_figures_of_a_state_are_checked_too(twice: RunFolder) -> None:
    path = twice.state_file("block-0")
    content = path.read_bytes()
    assert b"0.5" in content
    path.write_bytes(content.replace(b"0.5", b"0.6"))
    with pytest.warns(UserWarning, match="its checksum doesn't fit"):
        assert update_of(twice) == 2


def test_where_the_header_is_gone_nobody_knows_how_much_is_lost(twice: RunFolder) -> None:
    spoil(twice.state_file("block-0"), "empty")
    with pytest.warns(UserWarning, match=r"\(no readable header\): update 2 of .* is used$"):
        assert update_of(twice) == 2


def test_a_damaged_state_before_the_last_does_not_matter(twice: RunFolder) -> None:
    spoil(twice.previous_state_file("block-0"), "flipped")
    assert update_of(twice) == 5


def test_two_damaged_states_are_refused(twice: RunFolder) -> None:
    spoil(twice.state_file("block-0"), "truncated")
    spoil(twice.previous_state_file("block-0"), "flipped")
    refused(
        lambda: twice.load_state("block-0"),
        "states/block-0.safetensors is damaged",
        "states/block-0.previous.safetensors is damaged",
        "delete them to train block-0 from the start",
    )


def test_finishing_keeps_the_last_state_alone(twice: RunFolder) -> None:
    twice.finish("block-0", {"a": torch.zeros(1)}, {})
    assert twice.state_file("block-0").exists()
    assert not twice.previous_state_file("block-0").exists()


def test_a_damaged_finished_part_is_written_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, facts = (whole / "block-0.safetensors").read_bytes(), read_json(whole / "block-0.json")
    spoil(whole / "block-0.safetensors", "flipped")
    assert not folder_of(whole).intact("block-0")
    assert folder_of(whole).intact("block-1")
    monkeypatch.setattr(train, "train_step", lambda *_: pytest.fail("it trained again"))
    with pytest.warns(UserWarning, match="is damaged: it is written again"):
        assert run_job(BlockJob(RECIPE, "block-0", str(whole))) == facts
    assert (whole / "block-0.safetensors").read_bytes() == content
    assert folder_of(whole).intact("block-0")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_restoring_holds_one_tensor_beside_the_state(tmp_path: Path, optimizer: str) -> None:
    def network() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def restore(tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        """The bytes it added at most, and what was restored."""
        module = network()
        average = make_average(module, settings)
        maker = make_optimizer(module, settings)
        meter, before = MemoryMeter(), MemoryMeter()
        with before:
            pass
        with meter:
            checkpoint.restore_training_state(tensors, module, maker, average)
        return meter.peak["total"] - before.peak["total"], checkpoint.training_state(module, maker, average)

    settings = TrainSettings(optimizer=optimizer, ema=0.5)
    module = network()
    average, maker = make_average(module, settings), make_optimizer(module, settings)
    module(torch.randn(3, 64)).sum().backward()
    maker.step()
    assert average is not None
    average.update_parameters(module)
    saved = {name: tensor.clone() for name, tensor in checkpoint.training_state(module, maker, average).items()}
    folder = RunFolder(tmp_path, {})
    folder.save_state("block-0", State(1, saved, {}))
    state = folder.load_state("block-0")
    assert state is not None
    added, restored = restore(state.tensors)
    # Nothing looks into the file any more.
    with open(folder.state_file("block-0"), "r+b") as file:
        file.write(bytes(folder.state_file("block-0").stat().st_size))
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
    # Networks and average stand already; the optimizer's states come into being.
    states = sum(tensor.nbytes for name, tensor in saved.items() if name.startswith("optimizer/"))
    assert states <= added <= states + 64 * 64 * 4


def test_an_optimizers_own_count_comes_back_as_a_number() -> None:
    module = nn.Linear(2, 2)
    optimizer = make_optimizer(module, TrainSettings(optimizer="sgd"))
    optimizer.state[module.weight]["step"] = 7
    tensors = checkpoint.training_state(module, optimizer, None)
    checkpoint.restore_training_state(tensors, module, optimizer, None)
    assert optimizer.state[module.weight]["step"] == 7
    assert type(optimizer.state[module.weight]["step"]) is int


def test_another_parts_state_is_refused(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-1", str(tmp_path), until=1))
    (tmp_path / "states" / "block-1.safetensors").rename(tmp_path / "states" / "block-0.safetensors")
    refused(
        lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))),
        "states/block-0.safetensors is a state of block-1, not of block-0",
    )


def test_a_plain_safetensors_file_is_no_state(tmp_path: Path) -> None:
    folder_of(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "states" / "block-0.safetensors")
    refused(lambda: run_job(BlockJob(RECIPE, "block-0", str(tmp_path))), "states/block-0.safetensors")


def test_drafts_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    run_job(BlockJob(RECIPE, "block-0", str(tmp_path), until=1))
    mine, other = tmp_path / ".block-0.safetensors.1.tmp", tmp_path / ".block-1.safetensors.1.tmp"
    mine.mkdir()
    (mine / "half").write_text("half")
    other.write_text("half")
    # Only who trains a part may do so.
    Run.of(RECIPE).folder(tmp_path).load_state("block-0")
    assert mine.exists()
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
    refused(lambda: load(whole), "block-0.safetensors isn't the file", "run `train` again")


def test_without_a_state_a_damaged_file_asks_for_training(whole: Path) -> None:
    (whole / "states" / "block-0.safetensors").unlink()
    spoil(whole / "block-0.safetensors", "flipped")
    refused(lambda: load(whole), "restore it, or train block-0 again")


@pytest.mark.parametrize("position", [0, 8, 100, 1000, 5000, -1])
def test_any_flipped_bit_is_refused(whole: Path, position: int) -> None:
    path = whole / "block-0.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    refused(lambda: load(whole), "block-0.safetensors isn't the file", "run `train` again")


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
    folder_of(whole).finish("block-0", {}, {})
    refused(lambda: load(whole), "another network", "missing")
    other_numbers = {name: torch.zeros(tensor.shape).half() for name, tensor in own_tensors_of("block-0").items()}
    folder_of(whole).finish("block-0", other_numbers, {})
    refused(lambda: load(whole), "another network", "float16 there and", "float32 here")


def test_a_torn_sidecar_is_refused(whole: Path) -> None:
    (whole / "block-0.json").write_text('{"part": "bl')
    refused(lambda: load(whole), "block-0.json", "JSON", "delete it and run `train` again")
    (whole / "block-0.json").write_text("[]")
    refused(lambda: load(whole), "block-0.json", "no figures", "delete it and run `train` again")
    (whole / "block-0.json").unlink()
    run_job(BlockJob(RECIPE, "block-0", str(whole)))
    load(whole)


def test_weights_are_never_loaded_in_part() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tensors = checkpoint.own_tensors(network)
    del tensors["1.bias"]
    with pytest.raises(ValueError, match="names"):
        checkpoint.load_own_tensors(network, tensors)
    # Nor stretched.
    tensors["1.bias"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'1.bias' is \(1,\) float32, not \(2,\) float32"):
        checkpoint.load_own_tensors(network, tensors)
    assert not torch.equal(network[1].bias, torch.ones(2))


# Slices of a larger checkpoint


@pytest.fixture
def large(tmp_path: Path) -> dict[str, Tensor]:
    """Tensors of a network with more than block 1."""
    tensors = {f"model.{name}": torch.randn(tensor.shape) for name, tensor in own_tensors_of("block-1").items()}
    tensors["model.head"] = torch.randn(3)
    return tensors


def in_one_file(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "any.safetensors")
    return tmp_path / "any.safetensors"


def in_one_piece(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def in_shards(tensors: dict[str, Tensor], tmp_path: Path) -> Path:
    """The shard that the block doesn't need isn't even there."""
    weight_map = {name: f"model-0000{len(name) % 2 + 1}-of-00003.safetensors" for name in tensors}
    weight_map["model.head"] = "model-00003-of-00003.safetensors"
    for shard in {*weight_map.values()} - {weight_map["model.head"]}:
        save_file({name: tensors[name] for name, owner in weight_map.items() if owner == shard}, tmp_path / shard)
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of all tensors that are asked for."""
    names: set[str] = set()
    get = files.SavedTensors.__getitem__

    def noted(tensors: files.SavedTensors, name: str) -> Tensor:
        names.add(name)
        return get(tensors, name)

    monkeypatch.setattr(files.SavedTensors, "__getitem__", noted)
    return names


@pytest.mark.parametrize("written", [in_one_file, in_one_piece, in_shards])
def test_a_block_starts_from_a_larger_checkpoint(
    large: dict[str, Tensor], tmp_path: Path, asked: set[str], written: Callable[[dict[str, Tensor], Path], Path]
) -> None:
    block = Run.of(RECIPE).family.build_block(1)
    assert load_slices(written(large, tmp_path), block, lambda name: f"model.{name}") == []
    for name, tensor in checkpoint.own_tensors(block).items():
        assert torch.equal(tensor, large[f"model.{name}"])
    assert asked == large.keys() - {"model.head"}


def test_a_block_starts_from_a_run(whole: Path, asked: set[str]) -> None:
    (whole / "block-0.safetensors").unlink()
    block = Run.of(RECIPE).family.build_block(1)
    load_slices(whole, block)
    saved = load_file(whole / "block-1.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in checkpoint.own_tensors(block).items())
    assert asked == saved.keys()
    spoil(whole / "block-1.safetensors", "flipped")
    refused(lambda: load_slices(whole, block), "block-1.safetensors", "isn't the file")


def test_slices_take_the_precision_of_the_network(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    half_precision = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    load_slices(in_one_file(half_precision, tmp_path), layer)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, half_precision["weight"].float())


def test_two_layers_may_start_from_one(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = in_one_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path)
    assert load_slices(path, network, lambda name: name.split(".")[1]) == []
    assert all(torch.equal(layer.weight, torch.ones(2, 2)) for layer in network)


def test_what_a_checkpoint_lacks_is_named_or_left(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    tensors = {name: torch.ones(tensor.shape) for name, tensor in network.state_dict().items()}
    del tensors["1.bias"], tensors["2.weight"]
    path = in_one_file(tensors, tmp_path)
    before = checkpoint.own_tensors(network)["1.bias"].clone()
    refused(lambda: load_slices(path, network), str(path), "'1.bias', one of 2")
    assert not torch.equal(network[0].bias, torch.ones(2))
    assert load_slices(path, network, strict=False) == ["1.bias", "2.weight"]
    assert torch.equal(network[0].bias, torch.ones(2))
    assert torch.equal(network[1].bias, before)


@pytest.mark.parametrize("wrong", [torch.ones(3, 2), torch.ones(1, 2), torch.ones(2, 2).to(torch.int8)])
def test_a_slice_of_another_shape_or_kind_is_named(tmp_path: Path, wrong: Tensor) -> None:
    layer = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    path = in_one_file({"weight": wrong, "bias": torch.ones(2)}, tmp_path)
    refused(lambda: load_slices(path, layer), "'weight' is", str(tuple(wrong.shape)), "(2, 2) float32 here")
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    refused(lambda: load_slices(tmp_path / "nothing", layer), "nothing holds no checkpoint")
    refused(lambda: load_slices(tmp_path, layer), "holds no checkpoint")
    (tmp_path / "model.safetensors").write_text("noise")
    refused(lambda: load_slices(tmp_path, layer), "model.safetensors is damaged")
    index = tmp_path / "model.safetensors.index.json"
    write_json(index, {"weight_map": {"weight": "../model.safetensors", "bias": "model.safetensors"}})
    refused(lambda: load_slices(tmp_path, layer), "outside its folder")
    write_json(index, {"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}})
    refused(lambda: load_slices(tmp_path, layer), "a.safetensors is damaged", "restore it")
    save_file({"bias": torch.ones(2)}, tmp_path / "a.safetensors")
    refused(lambda: load_slices(tmp_path, layer), "'weight' is in a.safetensors, where it isn't")


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
    (tmp_path / ".manifest.json.1.tmp").mkdir()
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "manifest.lock").write_text("1")
    folder_of(tmp_path)
    assert (tmp_path / "manifest.json").exists()


def test_a_folder_whose_manifest_another_process_just_wrote_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Run.of(RECIPE).manifest
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
    assert not list(merged.path.glob("states/block-*"))
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


def test_logs_that_cannot_be_copied_are_named(whole: Path, tmp_path: Path) -> None:
    """shutil joins what went wrong into one error without a number."""
    (tmp_path / "merged" / "logs" / "block-0").mkdir(parents=True)
    (tmp_path / "merged" / "logs" / "block-0" / "from-0000000").write_text("in the way")
    write_json(tmp_path / "merged" / "manifest.json", read_json(whole / "manifest.json"))
    text = refused(lambda: merge([whole], tmp_path / "merged", PARTS), str(tmp_path / "merged" / "logs" / "block-0"))
    assert "can't be written (File exists)" in text


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
