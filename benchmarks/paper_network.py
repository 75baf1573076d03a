"""The network of the published code's memory figures: ViT 128 wide, 4 heads, MLP 3072, 64 patches and CLS, batch 32.

Memory and time don't depend on what the images show, so they are noise here.
"""

import numpy as np

from diffusionblocks.config import DataSettings, Recipe
from diffusionblocks.data import ImageData, Split
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.run import Run, make_family
from diffusionblocks.train import TrainSettings

LAYERS_PER_BLOCK = 4


def noise_images(classes: int = 100, n: int = 128) -> ImageData:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    split = Split(images, np.arange(n, dtype=np.int64) % classes)
    return ImageData("noise", classes, split, split, split, "none", (0.5,) * 3, (0.25,) * 3)


def paper_network(depth: int, checkpointing: bool, updates: int = 2, blocks: int | None = None) -> Recipe:
    network = ViTSettings(layers=depth, width=128, heads=4, mlp=3072, patch=4, condition_width=32)
    training = TrainSettings(updates=updates, batch_size=32, warmup=0, gradient_checkpointing=checkpointing)
    # The source tells `plan` the shape of the images; `run_of` reads none of them.
    data = DataSettings(source="hf:cifar100")
    blocks = blocks or depth // LAYERS_PER_BLOCK
    return Recipe(name="paper-network", network=network, data=data, training=training, blocks=blocks)


def run_of(recipe: Recipe, method: str) -> Run:
    data = noise_images()
    return Run(recipe, method, data, make_family(recipe, data))
