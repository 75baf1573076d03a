"""Planned against counted bytes, deep stacks against simulated ones, recommendations, and bad input."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffusionblocks import plan as planner
from diffusionblocks import recipes
from diffusionblocks.compare import method_run
from diffusionblocks.config import Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.memory import KINDS
from diffusionblocks.plan import Row, plan, read_bytes, recommend
from diffusionblocks.train import fit

SIZES = {
    "small": {"layers": 12, "width": 32, "heads": 2, "mlp": 64},
    "wide": {"layers": 6, "width": 128, "heads": 4, "mlp": 1024, "condition_width": 32},
    "deep": {"layers": 24, "width": 48, "heads": 4, "mlp": 96},
}


def recipe_of(blocks: int = 3, updates: int = 4, batch_size: int = 16, **network: int) -> Recipe:
    recipe = recipes.find("vit-digits")
    training = replace(recipe.training, updates=updates, batch_size=batch_size, warmup=0)
    return replace(recipe, network=replace(recipe.network, **network), training=training, blocks=blocks)


def planned(recipe: Recipe, method: str) -> dict[str, int]:
    (row,) = plan(recipe, [recipe.blocks], [method])
    return row.peak_bytes


def counted(recipe: Recipe, method: str, folder: Path) -> dict[str, int]:
    """The largest part's peak, in real training."""
    run = method_run(recipe, method)
    figures = [fit(job, run.settings, run.folder(folder)) for job in run.jobs()]
    return max((part["peak_bytes"] for part in figures if part is not None), key=lambda peak: peak["total"])


def assert_planned_is_counted(recipe: Recipe, method: str, folder: Path) -> None:
    prediction, measurement = planned(recipe, method), counted(recipe, method, folder)
    for kind in ("parameters", "gradients", "optimizer"):
        assert prediction[kind] == measurement[kind], kind
    assert prediction["total"] == pytest.approx(measurement["total"], rel=0.05)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_planned_is_counted_for_blocks(size: str, blocks: int, tmp_path: Path) -> None:
    assert_planned_is_counted(recipe_of(blocks, **SIZES[size]), "blocks", tmp_path / "plain")
    assert_planned_is_counted(recipe_of(blocks, **SIZES[size]), "blocks_checkpointed", tmp_path / "checkpointed")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["end_to_end", "end_to_end_checkpointed"])
def test_planned_is_counted_end_to_end(size: str, method: str, tmp_path: Path) -> None:
    assert_planned_is_counted(recipe_of(**SIZES[size]), method, tmp_path)


@pytest.mark.parametrize("method", ["block_coordinate", "block_coordinate_checkpointed"])
def test_planned_is_counted_for_block_coordinate_descent(method: str, tmp_path: Path) -> None:
    # Four updates each: every block has its turn, and an update with states.
    assert_planned_is_counted(recipe_of(updates=12, **SIZES["small"]), method, tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_planned_is_counted_with_other_settings(optimizer: str, precision: str, tmp_path: Path) -> None:
    recipe = recipe_of(**SIZES["wide"])
    training = replace(recipe.training, optimizer=optimizer, precision=precision, ema=0.9)
    assert_planned_is_counted(replace(recipe, training=training), "blocks", tmp_path)


def test_planned_is_counted_for_accumulated_batches_and_momentum_free_sgd(tmp_path: Path) -> None:
    recipe = recipe_of(**SIZES["wide"])
    training = replace(recipe.training, accumulate=2, optimizer="sgd", beta1=0.0)
    assert_planned_is_counted(replace(recipe, training=training), "blocks", tmp_path)


def test_planned_is_counted_for_a_joint_shell(tmp_path: Path) -> None:
    recipe = recipe_of(updates=6, **SIZES["small"])
    assert_planned_is_counted(replace(recipe, shell="joint"), "blocks", tmp_path)


def test_planned_is_counted_for_a_large_head(tmp_path: Path) -> None:
    recipe = recipe_of(**SIZES["small"])
    network = replace(recipe.network, codes="random", code_dim=8, readout="z")
    assert_planned_is_counted(replace(recipe, network=network), "blocks", tmp_path)


@pytest.mark.parametrize(("layers", "blocks", "split"), [(17, 4, None), (14, 3, (2, 8, 4)), (7, 1, None)])
def test_deep_stacks_are_what_simulating_them_gives(
    layers: int, blocks: int, split: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe_of(blocks, layers=layers, width=32, heads=2, mlp=64), layer_split=split)
    found = plan(recipe, [blocks])
    monkeypatch.setattr(planner, "SHALLOW", 1000)
    assert found == plan(recipe, [blocks])


def test_rows_cover_every_method_and_every_divisor_of_the_layers() -> None:
    rows = plan(recipe_of(5, layers=6, width=32, heads=2, mlp=64))
    of = {method: [row.blocks for row in rows if row.method == method] for method in planner.METHODS}
    assert of["end_to_end"] == of["end_to_end_checkpointed"] == [1]
    assert of["blocks"] == of["blocks_checkpointed"] == [1, 2, 3, 5, 6]
    assert of["block_coordinate"] == of["block_coordinate_checkpointed"] == [2, 3, 5, 6]
    assert all(row.peak_bytes["total"] == sum(row.peak_bytes[kind] for kind in KINDS) for row in rows)


def test_shares_say_what_the_bytes_are_for() -> None:
    rows = {(row.method, row.blocks): row for row in plan(recipe_of(3, layers=6, width=32, heads=2, mlp=64), [3])}
    run = method_run(recipe_of(3, layers=6, width=32, heads=2, mlp=64), "blocks")
    shell = run.family.build_block(0).shell
    n = sum(parameter.numel() for parameter in shell.parameters())
    count = len(list(shell.parameters()))
    # Weights, gradients, two moments; and a step for each tensor.
    assert rows["blocks", 3].of_which["shell"] == 4 * 4 * n + 4 * count
    assert rows["blocks", 3].of_which["logits"] >= 16 * 10 * 4
    assert 0 < rows["blocks", 3].of_which["noisy_stream"] < rows["blocks", 3].peak_bytes["activations"]


def test_nothing_is_allocated_for_a_network_of_tens_of_billions() -> None:
    recipe = replace(recipes.find("vit-cifar10"), blocks=40)
    network = replace(recipe.network, layers=80, width=8192, heads=64, mlp=32768, condition_width=64)
    rows = plan(replace(recipe, network=network), [40], ["end_to_end", "blocks", "blocks_checkpointed"])
    whole = rows[0].peak_bytes
    assert whole["parameters"] > 4 * 60e9
    # AdamW: two moments and a step for each tensor.
    assert 2 * whole["parameters"] < whole["optimizer"] < 2.001 * whole["parameters"]
    assert min(row.peak_bytes["total"] for row in rows) < whole["total"] / 20


def test_eight_bit_states_are_planned_without_cuda() -> None:
    recipe = recipe_of(2, **SIZES["wide"])
    eight = replace(recipe, training=replace(recipe.training, optimizer="adamw8bit"))
    assert 0.25 < planned(eight, "blocks")["optimizer"] / planned(recipe, "blocks")["optimizer"] < 0.32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to train on")
def test_eight_bit_training_needs_cuda(tmp_path: Path) -> None:
    recipe = recipe_of(2, **SIZES["wide"])
    eight = replace(recipe, training=replace(recipe.training, optimizer="adamw8bit"))
    with pytest.raises(InputError, match="needs a CUDA device"):
        counted(eight, "blocks", tmp_path)


def row(method: str, blocks: int, total: int) -> Row:
    return Row(method, blocks, {**dict.fromkeys(KINDS, 0), "activations": total, "total": total})


ROWS = [
    row("end_to_end", 1, 1000),
    row("end_to_end_checkpointed", 1, 400),
    row("block_coordinate", 2, 10),
    row("blocks", 2, 500),
    row("blocks", 4, 260),
    row("blocks_checkpointed", 2, 300),
    row("blocks_checkpointed", 4, 150),
]


@pytest.mark.parametrize(
    ("budget", "method", "blocks", "says"),
    [
        (1000, "end_to_end", 1, "nothing has to be cut"),
        (999, "blocks", 2, "checkpointing end to end fits as well"),
        (400, "blocks", 4, "checkpointing end to end fits as well"),
        (399, "blocks", 4, "end to end doesn't"),
        (259, "blocks_checkpointed", 4, "end to end doesn't"),
        (149, None, None, "nothing fits"),
    ],
)
def test_the_cheapest_that_fits_is_recommended(budget: int, method: str | None, blocks: int | None, says: str) -> None:
    found = recommend(ROWS, budget)
    assert (found["method"], found["blocks"]) == (method, blocks)
    assert says in found["why"]


def test_checkpointing_end_to_end_is_recommended_where_no_block_fits_without() -> None:
    rows = [row("end_to_end", 1, 1000), row("end_to_end_checkpointed", 1, 100), row("blocks", 2, 600)]
    assert recommend(rows, 100)["method"] == "end_to_end_checkpointed"


@pytest.mark.parametrize(
    ("text", "n"), [("8GiB", 8 * 2**30), ("1.5 MB", 1_500_000), ("123", 123), ("2gib", 2 * 2**30), ("1kb", 1000)]
)
def test_sizes_are_read(text: str, n: int) -> None:
    assert read_bytes(text) == n


@pytest.mark.parametrize("text", ["", "8 pounds", "GiB", "1.2.3GB", "-1GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="8GiB or 500MB"):
        read_bytes(text)


def test_data_need_not_be_there_to_plan() -> None:
    recipe = recipes.find("vit-cifar100")
    assert plan(replace(recipe, network=replace(recipe.network, layers=2)), [2], ["blocks"])


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(InputError, match="unknown method 'magic': choose end_to_end"):
        plan(recipe_of(), [2], ["magic"])
