"""Named runs: ours, sized for two CPU cores but for vit-cifar100, and `paper-*`, the published recipe of each."""

from dataclasses import replace

from diffusionblocks.config import DataSettings, InferenceSettings, NoiseSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.causal_lm import CausalLMSettings
from diffusionblocks.families.vit import ViTSettings
from diffusionblocks.train import TrainSettings


def paper(recipe: Recipe) -> Recipe:
    """The same run with the published choices: shared stem, learned codes and head, read-out from the preconditioned
    mix, full-width conditioning with gates at 0, edm-weighted cross-entropy, P_mean -1.2, a random start and the last
    call's answer. sigma_data stays 0.5 as published, though unit codes have a smaller rms: hence the warning."""
    assert isinstance(recipe.network, ViTSettings)
    network = replace(
        recipe.network,
        condition_width=recipe.network.width,
        gates=0.0,
        context="joint",
        readout="mix",
        codes="learned",
    )
    return replace(
        recipe,
        name=f"paper-{recipe.name}",
        shell="joint",
        weight="edm",
        network=network,
        noise=NoiseSettings(p_mean=-1.2, sigma_data=0.5),
        inference=InferenceSettings(start="random", answer="last"),
    )


VIT_DIGITS = Recipe(name="vit-digits")
VIT_MNIST = Recipe(
    name="vit-mnist",
    network=ViTSettings(patch=4),
    data=DataSettings(source="mnist"),
    training=TrainSettings(updates=1500),
)
VIT_FASHION = replace(VIT_MNIST, name="vit-fashion-mnist", data=DataSettings(source="fashion-mnist"))
VIT_CIFAR10 = Recipe(
    name="vit-cifar10",
    network=ViTSettings(width=96, patch=4, mlp=384, heads=4, condition_width=24),
    data=DataSettings(source="cifar10", augment="crop-flip"),
    training=TrainSettings(updates=2000),
)
# Paper, table 1: CIFAR-100, 12 layers, 128 wide, 4 heads, patch 4, B = 3, RandAugment.
VIT_CIFAR100 = Recipe(
    name="vit-cifar100",
    network=ViTSettings(width=128, heads=4, mlp=512, patch=4, condition_width=32),
    data=DataSettings(source="hf:cifar100", augment="randaugment"),
    training=TrainSettings(updates=100_000, batch_size=512, warmup=1000, checkpoint_every=1000),
)

_OURS = (VIT_DIGITS, VIT_MNIST, VIT_FASHION, VIT_CIFAR10, VIT_CIFAR100)
RECIPES = {recipe.name: recipe for recipe in (*_OURS, *map(paper, _OURS))}


# Published sizes (Touvron et al. 2023, Llama 2) to plan memory for: no data belong to them.
_7B = CausalLMSettings(
    layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocabulary=32000, tokens=2048, condition_width=64
)
_70B = replace(_7B, layers=80, width=8192, heads=64, kv_heads=8, mlp=28672)
LLAMA_7B = Recipe("llama-7b", "causal_lm", blocks=8, network=_7B, training=TrainSettings(batch_size=1))
LLAMA_70B = Recipe("llama-70b", "causal_lm", blocks=40, network=_70B, training=TrainSettings(batch_size=1))
SIZES = {recipe.name: recipe for recipe in (LLAMA_7B, LLAMA_70B)}


def find(name: str) -> Recipe:
    """A recipe by name.

    Raises:
        InputError: no such recipe, or a size that can be planned only; it lists the names.
    """
    if name in SIZES:
        raise InputError(f"'{name}' is a size to plan, with no data to train on: choose {', '.join(RECIPES)}")
    return _find(name, RECIPES)


def find_to_plan(name: str) -> Recipe:
    """A recipe or a size by name; `InputError` lists the names."""
    return _find(name, {**RECIPES, **SIZES})


def _find(name: str, known: dict[str, Recipe]) -> Recipe:
    if name not in known:
        raise InputError(f"unknown recipe '{name}': choose {', '.join(known)}")
    return known[name]


def quick(recipe: Recipe) -> Recipe:
    """The same run cut to 20 updates at most: it shows that everything works, not how good it gets."""
    training = recipe.training
    return replace(
        recipe, training=replace(training, updates=min(20, training.updates), warmup=min(2, training.warmup))
    )
