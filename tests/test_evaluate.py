"""Evaluation with beliefs that are known in closed form, and with a random network."""

import gc
import math
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusionblocks import evaluate, metrics
from diffusionblocks.config import Recipe
from diffusionblocks.data import ImageData, Split, evaluation_batches
from diffusionblocks.evaluate import (
    answer,
    baseline_beliefs,
    block_report,
    block_validation,
    chain_report,
    contributions,
    labels_of,
    one_call,
    probe,
    probe_levels,
    step_sweep,
    walk_beliefs,
)
from diffusionblocks.families.base import Block
from diffusionblocks.families.vit import ViT
from diffusionblocks.model import Denoiser
from diffusionblocks.noise import log_posterior_from_z
from diffusionblocks.partition import Call, Draw, plan_walk
from diffusionblocks.run import Run
from diffusionblocks.sample import start_state, walk


@pytest.fixture
def run(tiny: Recipe) -> Run:
    return Run.of(tiny)


def random_block(family: ViT, number: int) -> Block:
    """An untrained block whose parameters, the zero ones too, are random: its beliefs depend on z, x and sigma."""
    block, generator = family.build_block(number), torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return block.eval()


def random_denoiser(run: Run) -> Denoiser:
    return Denoiser(run.family, lambda number: random_block(run.family, number))


class FromZ(Denoiser):
    """Believes what Bayes' rule says about z alone, and keeps the record of what it was asked."""

    def __init__(self, family: ViT) -> None:
        super().__init__(family, lambda _: pytest.fail("no block is needed"))
        self.asked: list[tuple[int, float, Tensor]] = []

    def log_probs(self, z: Tensor, x: Tensor, number: int, sigma: float) -> Tensor:
        assert len(z) == len(x)
        self.asked.append((number, sigma, z))
        return log_posterior_from_z(z, sigma, self.family.table, self.family.frequencies)  # type: ignore[attr-defined]

    def denoised(self, log_probs: Tensor, number: int) -> Tensor:
        return log_probs.exp() @ self.family.table  # type: ignore[attr-defined]


class FromX(Denoiser):
    """Block `knowing` has learned every label by heart; the others believe in class 0 with 0.19, else 0.09."""

    def __init__(self, run: Run, knowing: int) -> None:
        super().__init__(run.family, lambda _: pytest.fail("no block is needed"))
        self.knowing, self.table, self.asked = knowing, run.family.table, list[tuple[int, float, int]]()
        self.labels = {
            x.numpy().tobytes(): int(y)
            for batch in evaluation_batches(run.data, "test", 64)
            for x, y in zip(batch.x, batch.y, strict=True)
        }

    def log_probs(self, z: Tensor, x: Tensor, number: int, sigma: float) -> Tensor:
        self.asked.append((number, sigma, len(z)))
        beliefs = torch.full((len(x), 10), 0.09)
        for row, image in enumerate(x):
            if number == self.knowing:
                beliefs[row] = 0.01
                beliefs[row, self.labels[image.numpy().tobytes()]] = 0.91
            else:
                beliefs[row, 0] = 0.19
        return beliefs.log()

    def denoised(self, log_probs: Tensor, number: int) -> Tensor:
        return log_probs.exp() @ self.table


def share_of(data: ImageData, label: int, split: str = "test") -> float:
    return float((labels_of(data, split) == label).float().mean())


# -- walks --------------------------------------------------------------------------------------------------------


def test_the_exact_posterior_walks_from_noise_to_a_code(run: Run) -> None:
    # One more call at sigma_min, where the walk has ended, shows the state there.
    grid = plan_walk(run.family.partition, 48, "karras")
    oracle, plan = FromZ(run.family), (*grid, Call(48, 2, 0.002, 0.001))
    beliefs = walk_beliefs(oracle, run.data, plan, start="random", seed=3)
    assert float(beliefs[-1].exp().max(1).values.min()) > 0.999
    z = torch.cat([z for _, sigma, z in oracle.asked if sigma == plan[-1].sigma])
    nearest = torch.cdist(z, run.family.table).min(1)
    assert torch.equal(nearest.indices, beliefs[-1].argmax(1))
    assert float(nearest.values.max()) < 0.02
    # It starts by knowing nothing, and ends in every class: x plays no part, so its accuracy is chance.
    prior = run.family.frequencies
    torch.testing.assert_close(beliefs[0].exp(), prior.expand(360, 10), atol=0.02, rtol=0)
    counts = torch.bincount(beliefs[-1].argmax(1), minlength=10)
    assert counts.min() > 36 - 5 * math.sqrt(36)
    assert counts.max() < 36 + 5 * math.sqrt(36)
    assert metrics.accuracy(beliefs[-1], labels_of(run.data, "test")) == pytest.approx(0.1, abs=0.08)


def test_the_zero_start_answers_with_the_prior(run: Run) -> None:
    prior, plan = run.family.frequencies, plan_walk(run.family.partition, 3)
    report = chain_report(FromZ(run.family), run.data, plan, "last")
    first = report["calls"][0]
    assert first["accuracy"] == pytest.approx(share_of(run.data, int(prior.argmax())))
    labels = labels_of(run.data, "test")
    assert first["cross_entropy"] == pytest.approx(float(-prior.log()[labels].mean()), rel=1e-5)


def test_figures_by_call_are_each_calls_own(run: Run) -> None:
    plan = plan_walk(run.family.partition, 6)
    report = chain_report(FromX(run, knowing=1), run.data, plan, "last")
    chance = share_of(run.data, 0)
    assert [call["accuracy"] for call in report["calls"]] == pytest.approx([chance, chance, 1, 1, chance, chance])
    assert [call["cross_entropy"] for call in report["calls"][2:4]] == pytest.approx([-math.log(0.91)] * 2)
    assert [call["calibration_error"] for call in report["calls"][2:4]] == pytest.approx([0.09] * 2, abs=1e-5)
    assert [call["calibration_error"] for call in report["calls"][:2]] == pytest.approx(
        [abs(0.19 - chance)] * 2, abs=1e-5
    )
    found = [(call["call"], call["block"], call["sigma"]) for call in report["calls"]]
    assert found == [(call.index, call.block, call.sigma) for call in plan]
    # The answer: the last call's knows nothing, the average of all has been told.
    assert report["accuracy"] == pytest.approx(chance)
    assert chain_report(FromX(run, knowing=1), run.data, plan, "average")["accuracy"] == 1.0


def test_answers_are_the_last_or_the_average() -> None:
    beliefs = torch.tensor([[[0.8, 0.1, 0.1]], [[0.2, 0.4, 0.4]]]).log()
    assert torch.equal(answer(beliefs, "last"), beliefs[1])
    torch.testing.assert_close(answer(beliefs, "average").exp(), torch.tensor([[0.5, 0.25, 0.25]]))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_walks_use_every_example_in_order(run: Run, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 50)
    plan, denoiser = plan_walk(run.family.partition, 3), random_denoiser(run)
    beliefs = walk_beliefs(denoiser, run.data, plan, split)
    n = len(getattr(run.data, split))
    assert n % 50
    assert beliefs.shape == (3, n, 10)
    # Example i's belief is the one it gets alone.
    for index in (0, 49, 50, n - 1):
        alone = replace(run.data, **{split: getattr(run.data, split).take(np.array([index]))})
        torch.testing.assert_close(walk_beliefs(denoiser, alone, plan, split)[:, 0], beliefs[:, index])
    assert len({tuple(row.tolist()) for row in beliefs[-1]}) > 0.9 * n


@pytest.mark.parametrize(("start", "starts"), [("zero", 1), ("random", 1), ("random", 3)])
def test_walks_do_not_depend_on_the_batch_size(
    run: Run, start: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, denoiser, found = plan_walk(run.family.partition, 6), random_denoiser(run), []
    for batch in (1000, 256, 37):
        monkeypatch.setattr(evaluate, "BATCH", batch)
        found.append(walk_beliefs(denoiser, run.data, plan, "test", start, starts).exp())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-5)


def test_random_starts_are_repeatable_and_seeded(run: Run) -> None:
    plan, denoiser = plan_walk(run.family.partition, 3), random_denoiser(run)

    def beliefs(seed: int) -> Tensor:
        return walk_beliefs(denoiser, run.data, plan, start="random", starts=2, seed=seed)

    torch.manual_seed(0)
    first, state = beliefs(0), torch.random.get_rng_state()
    torch.rand(5)
    assert torch.equal(beliefs(0), first)
    torch.random.set_rng_state(state)
    assert not torch.equal(beliefs(1), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_several_starts_give_the_mean_of_their_probabilities(run: Run) -> None:
    plan, denoiser = plan_walk(run.family.partition, 3), random_denoiser(run)
    mean = walk_beliefs(denoiser, run.data, plan, start="random", starts=4, seed=5)
    runs = []
    for number in range(4):
        z = start_state("random", 360, 9, 80.0, 5, number)
        steps = walk(denoiser, plan, z, lambda: (batch.x for batch in evaluation_batches(run.data, "test", 256)))
        runs.append(torch.stack([beliefs.exp() for _, beliefs in steps]))
    assert not torch.equal(runs[0], runs[1])
    torch.testing.assert_close(mean.exp(), torch.stack(runs).mean(0))
    torch.testing.assert_close(mean.exp().sum(2), torch.ones(3, 360))


def test_heun_is_another_walk(run: Run) -> None:
    plan, denoiser = plan_walk(run.family.partition, 3), random_denoiser(run)
    euler, heun = (walk_beliefs(denoiser, run.data, plan, solver=solver) for solver in ("euler", "heun"))
    assert torch.equal(euler[0], heun[0])
    assert not torch.equal(euler[1], heun[1])


# -- step sweep and contributions ---------------------------------------------------------------------------------


def test_step_sweep_tries_every_kind_of_walk(run: Run) -> None:
    denoiser = FromX(run, knowing=0)
    rows = step_sweep(denoiser, run.data, "mass", seed=0)
    kinds = [(row["steps"], row["start"], row["starts"]) for row in rows]
    starts = [("zero", 1), ("random", 1), ("random", 8)]
    assert kinds == [(steps, *start) for steps in (1, 3, 6, 12) for start in starts]
    chance = share_of(run.data, 0)
    for row in rows:
        assert row["average"] == 1.0  # block 0 knows, the others hardly object
        assert row["last"] == pytest.approx(1.0 if row["steps"] == 1 else chance)
    # 360 examples in two batches, ten starts in all, 1 + 3 + 6 + 12 calls; one step is block 0's alone.
    assert len(denoiser.asked) == 2 * 10 * 22
    assert {asked[:2] for asked in denoiser.asked[:20]} == {(0, 80.0)}
    assert sum(n for _, _, n in denoiser.asked) == 360 * 10 * 22


def test_step_sweep_of_one_block(tiny: Recipe) -> None:
    run = Run.of(replace(tiny, blocks=1))
    assert {row["steps"] for row in step_sweep(FromX(run, 0), run.data, "mass", seed=0)} == {1, 2, 4}


def test_one_call_is_block_0_at_sigma_max(run: Run) -> None:
    assert one_call(random_denoiser(run)) == (Call(0, 0, 80.0, 0.002),)


def test_contributions_of_the_only_block_that_knows(run: Run) -> None:
    plan, chance = plan_walk(run.family.partition, 6), share_of(run.data, 0)
    for kind in ("last", "average"):
        rows = contributions(FromX(run, knowing=2), run.data, plan, kind)
        assert [row["block"] for row in rows] == [0, 1, 2]
        assert [row["alone"] for row in rows] == pytest.approx([chance, chance, 1])
        assert [row["left_out"] for row in rows] == pytest.approx([1, 1, chance])


def test_contributions_of_blocks_that_are_not_called(run: Run) -> None:
    plan = (Call(0, 2, 80.0, 0.002),)
    rows = contributions(FromX(run, knowing=2), run.data, plan, "average")
    assert rows == [
        {"block": 0, "alone": None, "left_out": 1.0},
        {"block": 1, "alone": None, "left_out": 1.0},
        {"block": 2, "alone": 1.0, "left_out": None},
    ]


# -- probes -------------------------------------------------------------------------------------------------------


class BayesBlock(Block):
    """A block that reads nothing but z, and that perfectly."""

    def __init__(self, family: ViT, number: int) -> None:
        whole = family.build_block(number)
        super().__init__(number, whole.shell, whole.stack, str(number))
        self.frequencies = family.frequencies

    def forward(self, z: Tensor, x: Tensor, draw: Draw) -> Tensor:
        return log_posterior_from_z(z, draw.sigma, self.shell.codes(), self.frequencies)


@pytest.mark.parametrize("block", [0, 2])
def test_z_alone_tells_all_at_low_noise_and_nothing_at_high(run: Run, block: int) -> None:
    module = random_block(run.family, block)
    low = probe(run.family, module, block, run.data, 0.05, "test")
    assert low["z_alone_accuracy"] == 1.0
    assert low["z_alone_cross_entropy"] == pytest.approx(0, abs=1e-6)
    high = probe(run.family, module, block, run.data, 80.0, "test")
    assert high["z_alone_accuracy"] == pytest.approx(0.1, abs=0.08)  # five standard errors of 360
    assert high["z_alone_cross_entropy"] == pytest.approx(math.log(10), abs=0.02)
    between = [probe(run.family, module, block, run.data, s, "test")["z_alone_accuracy"] for s in (2.0, 0.7, 0.3)]
    assert high["z_alone_accuracy"] < between[0] < between[1] < between[2] <= 1


def test_scrambled_inputs_leave_z_alone_as_it_is(run: Run) -> None:
    module = random_block(run.family, 1)
    for sigma in (80.0, 1.0):
        own, scrambled = (probe(run.family, module, 1, run.data, sigma, "test", flag) for flag in (False, True))
        assert own["z_alone_cross_entropy"] == scrambled["z_alone_cross_entropy"]
        assert own["z_alone_accuracy"] == scrambled["z_alone_accuracy"]
        assert own["cross_entropy"] != scrambled["cross_entropy"]


def test_scrambling_hides_what_x_says(run: Run) -> None:
    knowing = FromX(run, knowing=0)

    class KnowingBlock(BayesBlock):
        def forward(self, z: Tensor, x: Tensor, draw: Draw) -> Tensor:
            return knowing.log_probs(z, x, 0, 1.0)

    module = KnowingBlock(run.family, 0)
    own, scrambled = (probe(run.family, module, 0, run.data, 80.0, "test", flag) for flag in (False, True))
    assert own["accuracy"] == 1.0
    assert own["cross_entropy"] == pytest.approx(-math.log(0.91), rel=1e-5)
    assert scrambled["accuracy"] == pytest.approx(0.1, abs=0.08)


def test_a_block_that_reads_z_alone_gains_nothing_over_it(run: Run) -> None:
    module = BayesBlock(run.family, 1)
    figures = block_validation(run.family, module, 1, run.data)
    gains = [value for name, value in figures.items() if name.startswith("gain_over_z")]
    assert len(gains) == 5
    assert gains == pytest.approx([0] * 5, abs=1e-6)
    for row in (probe(run.family, module, 1, run.data, 1.0, "test", flag) for flag in (False, True)):
        assert row["accuracy"] == row["z_alone_accuracy"]


def test_probes_are_repeatable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    module, state = random_block(run.family, 1), torch.random.get_rng_state()
    first = probe(run.family, module, 1, run.data, 1.0, "test")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    assert probe(run.family, module, 1, run.data, 1.0, "test") == first


def test_probe_levels_are_sigma_max_and_shares_of_the_training_range(run: Run) -> None:
    partition = run.family.partition
    for block in range(3):
        low, high = partition.training_range(block)
        levels = probe_levels(run.family, block)
        assert levels[0] == 80.0
        own = levels if block == 0 else levels[1:]
        assert len(own) == evaluate.SIGMAS_PER_BLOCK
        assert own[0] == pytest.approx(high)
        masses = partition.law.mass([*own, low])
        assert np.diff(masses) == pytest.approx([float(masses[-1] - masses[0]) / len(own)] * len(own))


def test_validation_is_headed_by_the_loss_at_sigma_max(run: Run) -> None:
    for block in range(3):
        module = random_block(run.family, block)
        figures = block_validation(run.family, module, block, run.data)
        names = [name for sigma in probe_levels(run.family, block) for name in (f"loss_at_{sigma:.4g}",)]
        assert list(figures)[:2] == ["loss_at_sigma_max", "accuracy_at_sigma_max"]
        assert set(figures) == {
            "loss_at_sigma_max",
            "accuracy_at_sigma_max",
            *names,
            *(name.replace("loss_at", "gain_over_z_at") for name in names),
        }
        expected = probe(run.family, module, block, run.data, 80.0, "validation")
        assert figures["loss_at_sigma_max"] == figures["loss_at_80"] == expected["cross_entropy"]
        assert figures["accuracy_at_sigma_max"] == expected["accuracy"]


def test_validation_sees_the_validation_split_only(run: Run) -> None:
    module, data = random_block(run.family, 0), run.data
    figures = block_validation(run.family, module, 0, data)
    nothing = Split(data.test.images[:0], data.test.labels[:0])
    assert block_validation(run.family, module, 0, replace(data, train=nothing, test=nothing)) == figures
    fewer = replace(data, validation=data.validation.take(np.arange(100)))
    assert block_validation(run.family, module, 0, fewer) != figures


def test_block_report_has_each_block_at_each_level(run: Run) -> None:
    nothing = Split(run.data.train.images[:0], run.data.train.labels[:0])
    rows = block_report(random_denoiser(run), replace(run.data, train=nothing, validation=nothing))
    expected = [(block, sigma) for block in range(3) for sigma in probe_levels(run.family, block)]
    assert [(row["block"], row["sigma"]) for row in rows] == expected
    names = ["cross_entropy", "accuracy"]
    kinds = [f"{kind}{name}" for kind in ("", "z_alone_", "scrambled_") for name in names]
    assert all(set(row) == {"block", "sigma", *kinds} for row in rows)
    first = probe(run.family, random_block(run.family, 1), 1, run.data, rows[5]["sigma"], "test", True)
    assert rows[5]["scrambled_cross_entropy"] == first["cross_entropy"]


# -- one block at a time ------------------------------------------------------------------------------------------


class Loader:
    """Counts loads, and looks whether a block that was let go is still alive when the next is asked for."""

    def __init__(self, make: Callable[[int], Block]) -> None:
        self.make, self.loaded = make, list[int]()
        self.previous: Any = None

    def __call__(self, number: int) -> Block:
        gc.collect()
        assert self.previous is None or self.previous() is None
        block = self.make(number).train()
        self.loaded.append(number)
        self.previous = weakref.ref(block)
        return block


@pytest.mark.parametrize(("steps", "starts", "loads"), [(3, 1, [0, 1, 2]), (12, 1, [0, 1, 2]), (3, 2, [0, 1, 2] * 2)])
def test_a_walk_holds_one_block_at_a_time(
    run: Run, steps: int, starts: int, loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 100)
    loader = Loader(lambda number: random_block(run.family, number))
    denoiser, plan = Denoiser(run.family, loader), plan_walk(run.family.partition, steps)
    walk_beliefs(denoiser, run.data, plan, start="random", starts=starts)
    assert loader.loaded == loads


def test_a_report_holds_one_block_at_a_time(run: Run) -> None:
    loader = Loader(lambda number: random_block(run.family, number))
    block_report(Denoiser(run.family, loader), run.data)
    assert loader.loaded == [0, 1, 2]


def test_blocks_are_asked_in_evaluation_mode_and_kept_while_needed(run: Run) -> None:
    loader = Loader(lambda number: random_block(run.family, number))
    denoiser = Denoiser(run.family, loader)
    assert not denoiser.block(1).training
    assert denoiser.block(1) is denoiser.block(1)
    assert loader.loaded == [1]
    assert denoiser.block(0).number == 0
    assert denoiser.block(1).number == 1
    assert loader.loaded == [1, 0, 1]


# -- baselines ----------------------------------------------------------------------------------------------------


def test_baselines_are_asked_about_every_example(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "BATCH", 50)
    knowing = FromX(run, knowing=0)
    module = types.SimpleNamespace(log_probs=lambda networks, x: knowing.log_probs(x, x, 0, 1.0))
    beliefs = baseline_beliefs(module, [], run.data)
    assert beliefs.shape == (360, 10)
    assert metrics.accuracy(beliefs, labels_of(run.data, "test")) == 1.0
