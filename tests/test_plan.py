"""Planned against counted bytes, deep stacks against simulated ones, recommendations, and bad input."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from diffusionblocks import cli, recipes
from diffusionblocks import plan as planner
from diffusionblocks.baselines import end_to_end
from diffusionblocks.checkpoint import RunFolder, read_json
from diffusionblocks.cli import main
from diffusionblocks.compare import method_run
from diffusionblocks.config import Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.causal_lm import CausalLMSettings, TokenBatch
from diffusionblocks.memory import KINDS
from diffusionblocks.plan import Row, plan, read_bytes, recommend
from diffusionblocks.run import shaped_family
from diffusionblocks.train import Job, TrainSettings, fit

pytestmark = pytest.mark.usefixtures("little_to_sweep")
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


@pytest.mark.filterwarnings("ignore:sigma_data")
def test_planned_is_counted_for_the_published_recipe(tmp_path: Path) -> None:
    assert_planned_is_counted(recipes.paper(recipe_of(updates=6, **SIZES["small"])), "blocks", tmp_path)


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("vocabulary", [256, 32_000])
@pytest.mark.parametrize("method", ["blocks", "blocks_checkpointed", "end_to_end"])
def test_planned_is_counted_for_a_language_head(method: str, vocabulary: int, chunk: int, tmp_path: Path) -> None:
    network = CausalLMSettings(
        layers=4, width=64, heads=4, kv_heads=2, mlp=128, vocabulary=vocabulary, tokens=32, chunk=chunk
    )
    training = TrainSettings(updates=2, batch_size=2, gradient_checkpointing=method.endswith("checkpointed"))
    recipe = Recipe("text", "causal_lm", blocks=2, network=network, training=training)
    family = shaped_family(recipe)

    def batches(step: int) -> TokenBatch:
        generator = torch.Generator().manual_seed(step)
        return TokenBatch(torch.randint(vocabulary, (2, 33), generator=generator))

    if method == "end_to_end":
        (job,) = end_to_end.jobs(family, lambda block: batches, training)
    else:
        build = partial(family.build_block, 0)
        job = Job("block-0", 2, build, batches, lambda m, batch, step: family.step_losses(m, batch, 0, step))
    figures = fit(job, training, RunFolder(tmp_path, {}))
    assert figures is not None
    prediction, measurement = planned(recipe, method), figures["peak_bytes"]
    for kind in ("parameters", "gradients", "optimizer"):
        assert prediction[kind] == measurement[kind], kind
    assert prediction["total"] == pytest.approx(measurement["total"], rel=0.05)


def test_chunks_of_the_head_are_planned() -> None:
    network = CausalLMSettings(layers=2, width=64, vocabulary=32_000, tokens=64, chunk=0)
    recipe = Recipe("text", "causal_lm", blocks=2, network=network, training=TrainSettings(batch_size=4))
    (whole,) = plan(recipe, [2], ["blocks"])
    (chunked,) = plan(replace(recipe, network=replace(network, chunk=32)), [2], ["blocks"])
    assert whole.of_which["logits"] >= 4 * 64 * 32_000 * 4
    assert chunked.of_which["logits"] <= whole.of_which["logits"] / 7
    assert chunked.peak_bytes["total"] < whole.peak_bytes["total"]


@pytest.mark.parametrize(("layers", "blocks", "split"), [(17, 4, None), (14, 3, (2, 8, 4)), (7, 1, None)])
def test_deep_stacks_are_what_simulating_them_gives(
    layers: int, blocks: int, split: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(recipe_of(blocks, layers=layers, width=32, heads=2, mlp=64), layer_split=split)
    found = plan(recipe, [blocks])
    monkeypatch.setattr(planner, "SHALLOW", 1000)
    assert found == plan(recipe, [blocks])


def test_accumulated_batches_of_deep_stacks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(2, layers=14, width=64, heads=2, mlp=256, batch_size=2)
    recipe = replace(recipe, training=replace(recipe.training, accumulate=3))
    found = plan(recipe, [2])
    monkeypatch.setattr(planner, "SHALLOW", 1000)
    assert found == plan(recipe, [2])


@pytest.mark.parametrize("split", [(1, 8, 1), (1, 1, 6)])
def test_the_largest_turn_of_block_coordinate_descent_is_planned(split: tuple[int, ...], tmp_path: Path) -> None:
    recipe = recipe_of(3, updates=12, batch_size=1, layers=sum(split), width=64, heads=2, mlp=512)
    assert_planned_is_counted(replace(recipe, layer_split=split), "block_coordinate_checkpointed", tmp_path)


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
        (149, None, None, "nothing fits into 0.1 KiB: the least is blocks checkpointed with 4 block(s)"),
    ],
)
def test_the_cheapest_that_fits_is_recommended(budget: int, method: str | None, blocks: int | None, says: str) -> None:
    found = recommend(ROWS, budget)
    assert (found["method"], found["blocks"]) == (method, blocks)
    assert says in found["why"]


def test_nothing_is_said_of_methods_that_were_not_planned() -> None:
    assert "end to end" not in recommend([row("blocks", 2, 10)], 100)["why"]
    assert recommend([row("block_coordinate", 2, 10)], 100)["method"] == "block_coordinate"


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


# The command

NARROW = ["plan", "vit-digits", "--layers=4", "--width=32", "--heads=2", "--mlp=64", "--methods=end_to_end,blocks"]


def test_command_writes_table_figures_and_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart, figures = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main([*NARROW, "--budget=8GiB", f"--chart={chart}", f"--json={figures}"]) == 0
    found = read_json(figures)
    assert found["budget"] == 8 * 2**30
    assert [(row["method"], row["blocks"]) for row in found["rows"]] == [("end_to_end", 1)] + [
        ("blocks", blocks) for blocks in (1, 2, 3, 4)
    ]
    assert all(row["peak_bytes"].keys() == {*KINDS, "total"} for row in found["rows"])
    assert found["recommended"]["method"] == "end_to_end"
    assert "recommended: end to end, 1 block(s): the cheapest that fits into 8.00 GiB" in capsys.readouterr().out
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_without_a_budget_this_machine_is_the_budget(tmp_path: Path) -> None:
    assert main([*NARROW, f"--json={tmp_path / 'plan.json'}"]) == 0
    assert read_json(tmp_path / "plan.json")["budget"] == planner.machine_memory() > 2**28


def test_a_budget_that_nothing_fits_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NARROW, "--budget=1KiB"]) == 0
    assert (
        "recommended: nothing: nothing fits into 1.0 KiB: the least is blocks with 4 block(s)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "llama-8b"], "unknown recipe 'llama-8b': choose vit-digits"),
        (["train", "llama-7b"], "is a size to plan, with no data to train on"),
        ([*NARROW, "--budget=much"], "budget 'much' isn't a size"),
        (["plan", "vit-digits", "--methods=magic"], "unknown method 'magic'"),
        (["plan", "vit-digits", "--methods=[]"], "there is nothing to plan: choose methods of end_to_end"),
        (["plan", "vit-digits", "--out=folder"], "unknown option '--out=folder'"),
        (["plan", "llama-7b", "--patch=4"], "unknown option '--patch=4'"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1


def test_published_sizes_have_their_parameters() -> None:
    """Llama 2's 6.74 and 69 billion, and what the norms' count leaves open."""
    for name, billions in (("llama-7b", 6.74), ("llama-70b", 68.98)):
        recipe = recipes.find_to_plan(name)
        (whole,) = plan(recipe, methods=["end_to_end_checkpointed"])
        assert whole.peak_bytes["parameters"] / 4e9 == pytest.approx(billions, rel=1e-3)


# Running out of memory


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError(), torch.OutOfMemoryError("x")],
)
def test_running_out_of_memory_points_to_the_plan(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starved(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "run_job", starved)
    assert main(["train", "vit-digits", f"--out={tmp_path / 'run'}"]) == 2
    assert "`diffusionblocks plan RECIPE` shows what fits" in capsys.readouterr().err


def test_other_errors_of_ours_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes don't fit")

    monkeypatch.setattr(cli, "run_job", broken)
    with pytest.raises(RuntimeError, match="shapes don't fit"):
        main(["train", "vit-digits", f"--out={tmp_path / 'run'}"])
