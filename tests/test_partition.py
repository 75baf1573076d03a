"""Which block owns a level, which levels it trains on, and which it is called at."""

import json
import math
import pathlib
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusionblocks.errors import InputError
from diffusionblocks.noise import LogNormal
from diffusionblocks.partition import (
    CUTS,
    Partition,
    karras_levels,
    make_partition,
    plan_walk,
    split_layers,
)
from test_noise import log_normals, share_error

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
DIGITS = 1e-9  # golden.json holds ten digits


def published(blocks: int, cut: str = "equal_mass", overlap: float = 0.05) -> Partition:
    """The paper's law, a layer a block."""
    return make_partition(LogNormal(), blocks, blocks, cut=cut, overlap=overlap)


# -- owner --------------------------------------------------------------------------------------------------------


def test_owner_of_given_levels() -> None:
    partition = published(3)
    assert [partition.owner(sigma) for sigma in (80.0, 10.0, 0.3, 0.05, 0.002)] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 12])
def test_an_edge_belongs_to_the_block_below_it(blocks: int, cut: str) -> None:
    partition = published(blocks, cut)
    for block, edge in enumerate(partition.edges[:-1]):
        assert partition.owner(edge) == block
        if block > 0:
            assert partition.owner(math.nextafter(edge, math.inf)) == block - 1
        assert partition.owner(math.nextafter(edge, 0)) == block
    assert partition.owner(partition.edges[-1]) == blocks - 1


def test_a_block_owns_what_its_range_says() -> None:
    partition = published(4)
    for sigma in np.geomspace(0.002, 80, 301)[1:-1]:
        low, high = partition.range(partition.owner(float(sigma)))
        assert low < sigma <= high


@pytest.mark.parametrize("sigma", [0.00199, 80.01, 0.0, -1.0, math.inf, math.nan])
def test_levels_outside_are_nobodys(sigma: float) -> None:
    with pytest.raises(InputError, match="outside"):
        published(3).owner(sigma)


@pytest.mark.parametrize("block", [-1, 3])
def test_blocks_that_do_not_exist_are_refused(block: int) -> None:
    partition = published(3)
    for ask in (partition.range, partition.training_range, partition.mass):
        with pytest.raises(InputError, match="blocks 0 to 2"):
            ask(block)
    with pytest.raises(InputError, match="blocks 0 to 2"):
        partition.draw(block, 1, torch.Generator())


# -- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [int(b) for b in GOLDEN["block_boundaries"]])
def test_edges_are_the_recorded_boundaries(blocks: int) -> None:
    edges = published(blocks).edges
    np.testing.assert_allclose(edges[::-1], GOLDEN["block_boundaries"][str(blocks)], rtol=DIGITS)


@pytest.mark.parametrize("name", list(GOLDEN["overlap_extended_ranges"]))
def test_ranges_are_the_recorded_ones(name: str) -> None:
    overlap, blocks = name.removeprefix("gamma=").split(",B=")
    partition = published(int(blocks), overlap=float(overlap))
    cdf = LogNormal().cdf
    for row in GOLDEN["overlap_extended_ranges"][name]:
        low, high = partition.range(row["block"])
        wide_low, wide_high = partition.training_range(row["block"])
        alpha = (high / low) ** float(overlap)
        ours = {
            "block": row["block"],
            "lo": low,
            "hi": high,
            "ext_lo_clamped": wide_low,
            "ext_hi_clamped": wide_high,
            "ext_lo_unclamped_paper": low / alpha,
            "ext_hi_unclamped_paper": high * alpha,
            "prob_mass_ext": float(cdf(wide_high) - cdf(wide_low)),
            "cdf_lo": float(cdf(wide_low)),
            "cdf_hi": float(cdf(wide_high)),
        }
        assert ours.keys() == row.keys()
        for key, expected in row.items():
            assert ours[key] == pytest.approx(expected, rel=DIGITS), (name, row["block"], key)


def test_uniform_cut_takes_equal_steps_of_log_sigma() -> None:
    edges = np.array(published(4, "uniform").edges)
    np.testing.assert_allclose(np.diff(np.log(edges)), math.log(0.002 / 80) / 4, rtol=1e-12)
    assert (edges[0], edges[-1]) == (80.0, 0.002)


def test_masses_of_the_blocks_are_equal_or_sum_to_one() -> None:
    np.testing.assert_allclose([published(7).mass(b) for b in range(7)], 1 / 7, atol=1e-12)
    uniform = [published(7, "uniform").mass(b) for b in range(7)]
    assert sum(uniform) == pytest.approx(1, abs=1e-12)
    assert max(uniform) > 0.3


def test_draws_name_their_block_and_repeat() -> None:
    partition = published(3)
    first, again = (partition.draw(1, 100, torch.Generator().manual_seed(5)) for _ in range(2))
    assert first.block == again.block == 1
    assert torch.equal(first.sigma, again.sigma)
    assert not torch.equal(first.sigma, partition.draw(1, 100, torch.Generator().manual_seed(6)).sigma)
    assert first.sigma.dtype == torch.float32
    # The overlap is drawn from too: some of a block's levels belong to its neighbours.
    owners = [
        partition.owner(float(sigma)) for sigma in partition.draw(1, 2000, torch.Generator().manual_seed(0)).sigma
    ]
    assert set(owners) == {0, 1, 2}


def test_unknown_cuts_and_overlaps_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="equal_mass or uniform"):
        published(3, "equal")
    for overlap in (-0.01, 1.01, math.nan):
        with pytest.raises(InputError, match="overlap"):
            published(3, overlap=overlap)


def test_a_law_too_narrow_for_its_blocks_is_refused() -> None:
    law = LogNormal(sigma_min=1.0, sigma_max=math.nextafter(1.0, 2))
    for cut in CUTS:
        assert make_partition(law, 1, 1, cut=cut).edges == (law.sigma_max, 1.0)
        with pytest.raises(InputError, match="too narrow"):
            make_partition(law, 3, 3, cut=cut)


@settings(deadline=None, max_examples=200)
@given(log_normals(), st.integers(1, 64), st.integers(0, 100), st.floats(0, 1), st.sampled_from(CUTS))
def test_partitions_of_any_law_hold_together(law: LogNormal, blocks: int, more: int, overlap: float, cut: str) -> None:
    try:
        partition = make_partition(law, blocks + more, blocks, cut=cut, overlap=overlap)
    except InputError as error:
        assert "too narrow" in str(error)  # noqa: PT017 - hypothesis decides whether it is raised
        assert blocks > 1
        return
    edges = np.array(partition.edges)
    assert (edges[0], edges[-1]) == (law.sigma_max, law.sigma_min)
    assert (np.diff(edges) < 0).all()
    masses = [partition.mass(block) for block in range(blocks)]
    assert sum(masses) == pytest.approx(1, abs=1e-12)
    if cut == "equal_mass":
        # An edge is a float64: where the law is steep, its last digit alone moves the mass.
        step = np.abs(law.mass(edges * (1 + 4e-16)) - law.mass(edges * (1 - 4e-16))).max()
        np.testing.assert_allclose(masses, 1 / blocks, atol=2 * (share_error(law) + float(step)))
    for block in {0, blocks // 2, blocks - 1}:
        low, high = partition.range(block)
        wide_low, wide_high = partition.training_range(block)
        assert law.sigma_min <= wide_low <= low < high <= wide_high <= law.sigma_max
        sigma = partition.draw(block, 50, torch.Generator().manual_seed(block)).sigma.double().numpy()
        assert np.isfinite(sigma).all()
        # float32 rounds a level by half a unit in its 24th bit.
        assert (sigma >= wide_low * (1 - 2.0**-24 - 1e-12)).all()
        assert (sigma <= wide_high * (1 + 2.0**-24 + 1e-12)).all()
        for edge in (low, high):
            assert 0 <= partition.owner(edge) < blocks


# -- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "blocks"), [(12, 5), (28, 8), (14, 4), (12, 3), (7, 7), (5, 1)])
def test_each_layer_is_in_one_block(layers: int, blocks: int) -> None:
    groups = split_layers(layers, blocks)
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert len(groups) == blocks
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_explicit_sizes_are_kept() -> None:
    assert split_layers(12, 3, (3, 6, 3)) == ((0, 1, 2), (3, 4, 5, 6, 7, 8), (9, 10, 11))
    assert make_partition(LogNormal(), 12, 3, sizes=(3, 6, 3)).layers[1] == (3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("layers", "blocks", "sizes"),
    [
        (3, 4, None),
        (3, 0, None),
        (3, -1, None),
        (0, 1, None),
        (12, 3, (4, 4)),
        (12, 3, (4, 4, 5)),
        (12, 3, (4, 4, 3)),
        (12, 3, (6, 6, 0)),
        (12, 3, (8, 8, -4)),
    ],
)
def test_splits_that_do_not_fit_are_refused(layers: int, blocks: int, sizes: tuple[int, ...] | None) -> None:
    with pytest.raises(InputError):
        split_layers(layers, blocks, sizes)


# -- walks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(GOLDEN["walk"]))
def test_walks_are_the_recorded_ones(name: str) -> None:
    blocks, steps = (int(part[2:]) for part in name.split(","))
    plan, expected = plan_walk(published(blocks), steps), GOLDEN["walk"][name]
    np.testing.assert_allclose([call.sigma for call in plan], expected["levels"], rtol=DIGITS)
    assert plan[-1].next_sigma == expected["end"]
    assert [call.block for call in plan] == expected["blocks"]
    assert [call.index for call in plan] == list(range(steps))


@pytest.mark.parametrize("points", [int(n) for n in GOLDEN["karras_rho7_levels"]])
def test_karras_grid_is_the_recorded_one(points: int) -> None:
    levels = karras_levels(0.002, 80.0, points)
    np.testing.assert_allclose(levels, GOLDEN["karras_rho7_levels"][str(points)], rtol=DIGITS)
    assert (levels[0], levels[-1]) == (80.0, 0.002)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", range(2, 13))
def test_calls_are_shared_out_to_within_one(blocks: int, cut: str) -> None:
    partition = published(blocks, cut)
    for steps in range(blocks, 4 * blocks + 1):
        plan = plan_walk(partition, steps)
        counts = np.bincount([call.block for call in plan], minlength=blocks)
        assert counts.min() >= 1
        assert counts.max() - counts.min() <= 1
        levels = [call.sigma for call in plan] + [plan[-1].next_sigma]
        assert (levels[0], levels[-1]) == (80.0, 0.002)
        assert (np.diff(levels) < 0).all()
        assert levels[1:] == [call.next_sigma for call in plan]
        # Planned by index, and yet each level lies in the range of the block that is called.
        assert [partition.owner(call.sigma) for call in plan] == [call.block for call in plan]


def test_each_block_is_called_first_at_its_own_edge() -> None:
    # The published grid in float32 ran blocks [0, 0, 2, 2] for B = 3, T = 4: an edge was taken for the block above.
    partition = published(3)
    firsts = {call.block: call.sigma for call in reversed(plan_walk(partition, 6))}
    assert firsts == dict(enumerate(partition.edges[:-1]))


def test_one_step_is_one_call_at_the_top() -> None:
    (call,) = plan_walk(published(1), 1)
    assert (call.block, call.sigma, call.next_sigma) == (0, 80.0, 0.002)
    with pytest.warns(UserWarning, match=r"\[1, 2\]"):
        (call,) = plan_walk(published(3), 1)
    assert (call.block, call.sigma, call.next_sigma) == (0, 80.0, 0.002)


def test_karras_grid_calls_the_owner_and_warns_of_idle_blocks() -> None:
    partition = published(4)
    # 80, 9.72 and 0.47 belong to blocks 0, 0 and 1.
    with pytest.warns(UserWarning, match=r"karras.*\[2, 3\]"):
        plan = plan_walk(partition, 3, "karras")
    assert [call.block for call in plan] == [0, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_walk(partition, 49, "karras")
    np.testing.assert_allclose([call.sigma for call in plan], GOLDEN["karras_rho7_levels"]["50"][:-1], rtol=DIGITS)
    assert [call.block for call in plan] == [partition.owner(call.sigma) for call in plan]


@pytest.mark.parametrize("steps", [0, -1])
def test_walks_without_steps_are_refused(steps: int) -> None:
    with pytest.raises(InputError, match="1 or more"):
        plan_walk(published(3), steps)


def test_unknown_grids_are_refused() -> None:
    with pytest.raises(InputError, match="mass or karras"):
        plan_walk(published(3), 3, "linear")
