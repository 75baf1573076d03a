"""From a recipe to objects, and from a method to the jobs that train it.

A `BlockJob` is a plain value and `run_job` a plain function: executors only decide where and in which order they run.
"""

import importlib
import os
import platform
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from diffusionblocks import seeds
from diffusionblocks.checkpoint import (
    FORMAT,
    RunFolder,
    checkpoint_checksum,
    load_own_tensors,
    load_slices,
    own_tensors,
    read_json,
)
from diffusionblocks.config import Recipe
from diffusionblocks.data import SHAPES, Batches, ImageData, load_images
from diffusionblocks.errors import InputError
from diffusionblocks.evaluate import block_validation
from diffusionblocks.families.base import Block, Family
from diffusionblocks.families.causal_lm import CausalLM, CausalLMSettings
from diffusionblocks.families.vit import Images, ViT, ViTSettings, make_codes
from diffusionblocks.model import Denoiser
from diffusionblocks.noise import EqualInformation, LogNormal, NoiseLaw
from diffusionblocks.partition import NOISE_MAP_VERSION, make_partition
from diffusionblocks.residency import HostMemory
from diffusionblocks.train import Job, Progress, TrainSettings, fit, never

BASELINES = ("end_to_end", "shallow_ensemble", "block_coordinate")


@lru_cache(maxsize=2)
def _load_data(source: str, root: str | None, train_examples: int | None) -> ImageData:
    return load_images(source, root, train_examples=train_examples)


def make_data(recipe: Recipe) -> ImageData:
    root = recipe.data.root or os.environ.get("DIFFUSIONBLOCKS_DATA")
    return _load_data(recipe.data.source, root, recipe.data.train_examples)


def make_family(recipe: Recipe, data: ImageData) -> ViT:
    """The family of a recipe on its data; refuses settings that don't fit each other."""
    counts = torch.bincount(torch.as_tensor(data.train.labels), minlength=data.classes).double()
    frequencies = tuple(float(share) for share in counts / counts.sum())
    return _family(recipe, Images(data.image_size, data.channels, frequencies))


def shaped_family(recipe: Recipe) -> Family:
    """The family of a recipe on data of the right shape: enough for its memory. Known data sets aren't read."""
    if isinstance(recipe.network, CausalLMSettings):
        noise = recipe.noise
        law = LogNormal(sigma_min=noise.sigma_min, sigma_max=noise.sigma_max)
        partition = make_partition(law, recipe.network.layers, recipe.blocks, recipe.layer_split)
        return CausalLM(recipe.network, partition, recipe.seed, recipe.shell, recipe.weight)
    if recipe.data.source not in SHAPES:
        return make_family(recipe, make_data(recipe))
    size, channels, classes = SHAPES[recipe.data.source]
    return _family(recipe, Images(size, channels, (1 / classes,) * classes))


def _family(recipe: Recipe, images: Images) -> ViT:
    assert isinstance(recipe.network, ViTSettings)
    partition = make_partition(
        make_law(recipe, images),
        recipe.network.layers,
        recipe.blocks,
        recipe.layer_split,
        recipe.noise.cut,
        recipe.noise.overlap,
    )
    return ViT(recipe.network, images, partition, recipe.seed, recipe.shell, recipe.weight, recipe.noise.sigma_data)


def make_law(recipe: Recipe, images: Images) -> NoiseLaw:
    noise = recipe.noise
    if noise.law == "equal_information":
        assert isinstance(recipe.network, ViTSettings)
        codes = make_codes(recipe.network, images.classes, recipe.seed).double().numpy()
        return EqualInformation(codes, np.array(images.frequencies), noise.sigma_min, noise.sigma_max)
    p_mean = 0.5 if noise.p_mean is None else noise.p_mean
    p_std = 1.2 if noise.p_std is None else noise.p_std
    return LogNormal(p_mean, p_std, noise.sigma_min, noise.sigma_max)


@dataclass(frozen=True)
class Run:
    """A recipe with its data and family, and the method that trains it ("blocks" or a baseline's name)."""

    recipe: Recipe
    method: str
    data: ImageData
    family: ViT

    @classmethod
    def of(cls, recipe: Recipe, method: str = "blocks") -> "Run":
        if recipe.family != "vit":
            raise InputError(f"family {recipe.family} can be planned, not trained from a recipe yet: choose vit")
        data = make_data(recipe)
        return cls(with_start(recipe), method, data, make_family(recipe, data))

    @property
    def settings(self) -> TrainSettings:
        """A joint network trains one block an update: B times the updates give each block its share."""
        training = self.recipe.training
        if self.method == "blocks" and self.recipe.shell == "joint":
            times = self.family.partition.blocks
            return replace(training, updates=training.updates * times, warmup=training.warmup * times)
        return training

    def batches(self, block: int) -> Batches:
        training = self.recipe.training
        return Batches(self.data, training.batch_size, self.recipe.seed, block, self.recipe.data.augment)

    def jobs(self) -> list[Job]:
        """One job for each part of the network that is trained alone."""
        if self.method != "blocks":
            return baseline(self.method).jobs(self.family, self.batches, self.settings)
        if self.recipe.shell == "joint":
            return [self._joint_job()]
        return [self._block_job(block) for block in range(self.family.partition.blocks)]

    def _block_job(self, block: int) -> Job:
        return Job(
            part=f"block-{block}",
            layers=len(self.family.partition.layers[block]),
            build=lambda: self.family.build_block(block),
            batches=self.batches(block),
            losses=lambda module, batch, step: self.family.step_losses(module, batch, block, step),
            start=partial(start_block, self.recipe.training.start_from),
            validate=lambda module: block_validation(self.family, module, block, self.data),
        )

    def _joint_job(self) -> Job:
        blocks, seed = self.family.partition.blocks, self.recipe.seed
        evaluations = sum(map(len, self.family.partition.layers)) / blocks
        if evaluations != int(evaluations):
            raise InputError(
                "a joint shell counts equal work only for blocks of equal size: choose an even layer split"
            )

        def drawn(step: int) -> int:
            return int(torch.randint(blocks, (), generator=seeds.generator(seed, seeds.NO_BLOCK, "block", step)))

        def idle(module: nn.Module, update: int) -> Iterator[nn.Parameter]:
            for block in module.modules():
                if isinstance(block, Block) and block.number != drawn(update):
                    yield from block.stack.parameters()

        return Job(
            part="joint",
            layers=int(evaluations),
            build=self.family.build_joint,
            # The draw is per update: accumulated batches train the same block.
            losses=lambda module, batch, step: self.family.step_losses(
                module, batch, drawn(step // self.recipe.training.accumulate), step
            ),
            batches=self.batches(seeds.NO_BLOCK),
            idle=idle,
        )

    def owners(self) -> dict[str, str]:
        """Which part owns each parameter. Built on the meta device: no weights are made."""
        owners = {}
        for job in self.jobs():
            with torch.device("meta"):
                owners.update(dict.fromkeys(own_tensors(job.build()), job.part))
        return owners

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What the run's folder must hold; everything that tells one run from another."""
        partition = self.family.partition
        return {
            "format": FORMAT,
            "method": self.method,
            "recipe": self.recipe.identity(),
            "inference": asdict(self.recipe.inference),
            "noise_map": {
                "version": NOISE_MAP_VERSION,
                "edges": list(partition.edges),
                "layers": [list(group) for group in partition.layers],
                "overlap": partition.overlap,
            },
            "owners": self.owners(),
            "data": {"name": self.data.name, "checksum": self.data.checksum},
            "environment": {
                "torch": torch.__version__,
                "diffusionblocks": diffusionblocks_version(),
                "threads": torch.get_num_threads(),
                "machine": platform.machine(),
                "data_root": self.recipe.data.root,
            },
        }

    def folder(self, path: Path | str) -> RunFolder:
        return RunFolder(path, self.manifest)

    def denoiser(self, folder: RunFolder) -> Denoiser:
        """The chain as it stands; blocks are read from the folder one at a time, unfinished ones as last saved."""

        def load(number: int) -> Block:
            if self.recipe.shell == "joint":
                joint = self.family.build_joint()
                load_latest(folder, "joint", joint)
                block = joint.blocks[number]
                assert isinstance(block, Block)
                return block
            block = self.family.build_block(number)
            load_latest(folder, f"block-{number}", block)
            return block

        return Denoiser(self.family, load)

    def networks(self, folder: RunFolder) -> list[nn.Module]:
        """A baseline's trained networks."""
        networks = []
        for job in self.jobs():
            network = job.build()
            folder.load(job.part, network)
            networks.append(network.eval())
        return networks


def with_start(recipe: Recipe) -> Recipe:
    """The recipe with the checksum of the checkpoint it starts from: another one would make it another run.

    Raises:
        InputError: no checkpoint there, or not the one that the recipe names.
    """
    training = recipe.training
    if training.start_from is None:
        return recipe
    found = checkpoint_checksum(training.start_from)
    if training.start_checksum not in (None, found):
        raise InputError(f"{training.start_from} isn't the checkpoint that this run started from: give that one")
    return replace(recipe, training=replace(training, start_checksum=found))


def start_block(checkpoint: str | None, block: nn.Module) -> None:
    """Fills a block's layers, and what its shell has in common with the checkpoint's network; warns of the rest.

    Only this block's tensors are read. A plain network (an end-to-end run, say) has no shells: there the block's stem
    and head are looked up without theirs.
    """
    if checkpoint is None:
        return
    manifest = Path(checkpoint) / "manifest.json"
    plain = not manifest.exists() or read_json(manifest)["method"] != "blocks"
    names = partial(re.sub, r"^shells\.\w+\.", "") if plain else str
    lacking = load_slices(checkpoint, block, names, strict=False)
    if not any(name.startswith("stack.") for name in block.state_dict() if name not in lacking):
        raise InputError(f"{checkpoint} has none of this block's layers: give a checkpoint of the same network")
    if lacking:
        warnings.warn(f"{checkpoint} lacks {len(lacking)} tensors, e.g. {lacking[0]}: they start anew", stacklevel=2)


def load_latest(folder: RunFolder, part: str, module: nn.Module) -> None:
    """Loads a finished part, or what its last saved state would be finished with; warns of the latter."""
    state = None if (folder.path / f"{part}.json").exists() else folder.load_state(part)
    if state is None:
        folder.load(part, module)
        return
    warnings.warn(f"{part} isn't finished: its weights after update {state.update} are used", stacklevel=2)
    averaged = any(name.startswith("average/") for name in state.tensors)
    prefix = "average/module." if averaged else "module/"
    load_own_tensors(module, state.tensors, prefix)


def baseline(name: str) -> ModuleType:
    """A baseline's module, imported when it is asked for: the core works without any."""
    if name not in BASELINES:
        raise InputError(f"unknown method '{name}': choose blocks, {', '.join(BASELINES)}")
    return importlib.import_module(f"diffusionblocks.baselines.{name}")


def diffusionblocks_version() -> str:
    try:
        return version("diffusionblocks")
    except PackageNotFoundError:  # run from a source tree that isn't installed
        return "source"


@dataclass(frozen=True)
class BlockJob:
    """What an executor runs: one part of a run, up to an update (None: to the end), into a folder."""

    recipe: Recipe
    part: str
    folder: str
    method: str = "blocks"
    until: int | None = None


def run_job(
    job: BlockJob,
    progress: Progress | None = None,
    stop: Callable[[], bool] = never,
    host: HostMemory | None = None,
) -> dict[str, Any] | None:
    """Trains one part and returns its figures; None where it stopped before the end. `stop` and `host` as in `fit`."""
    run = _run(job.recipe, job.method, os.environ.get("DIFFUSIONBLOCKS_DATA"))
    parts = {candidate.part: candidate for candidate in run.jobs()}
    if job.part not in parts:
        raise InputError(f"there is no {job.part}: this run trains {', '.join(parts)}")
    return fit(parts[job.part], run.settings, run.folder(job.folder), job.until, progress, stop, host)


# A rotation comes back to the same run at every visit, and its manifest takes longer to make than a short visit.
@lru_cache(maxsize=2)
def _run(recipe: Recipe, method: str, data_root: str | None) -> Run:
    return Run.of(recipe, method)
