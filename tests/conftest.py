"""Fixtures that several files share."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffusionblocks.config import Recipe
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.train import TrainSettings

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the number of threads, and tiny networks are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def little_to_sweep() -> Iterator[None]:
    """The memory meter looks at every object: hide those of the test session, for speed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def tiny() -> Recipe:
    """Digits in seconds: three blocks of one narrow layer, six updates."""
    return Recipe(
        name="tiny",
        network=ViTSettings(layers=3, width=16, heads=2, mlp=32, patch=4, condition_width=4),
        training=TrainSettings(updates=6, batch_size=16, warmup=1, checkpoint_every=2),
    )


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the team's real data; tests that need it are skipped where it is absent."""
    path = Path(os.environ.get("DIFFUSIONBLOCKS_TEST_DATA", DATA))
    if not path.is_dir():
        pytest.skip(f"no data at {path}: set DIFFUSIONBLOCKS_TEST_DATA")
    return path
