"""Images and their classes: stated splits, a checksum, and training batches as a pure function of the update.

Images stay unsigned bytes in numpy; only a batch becomes floating-point tensors.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from diffusionblocks import seeds
from diffusionblocks.errors import InputError
from diffusionblocks.image_files import NPZ_NAMES, Arrays, read_class_folders, read_hugging_face, read_named

AUGMENTATIONS = ("none", "crop-flip", "randaugment")
# The splits are part of the data, not of a run: every seed is tested on the same examples.
SPLIT_SEED = 20260101
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Split:
    """images [n, height, width, channels] as unsigned bytes, labels [n]."""

    images: UInt8[np.ndarray, "n height width channels"]
    labels: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.intp]) -> "Split":
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Batch:
    """Normalised images and their classes."""

    x: Float[Tensor, "n channels height width"]
    y: Int[Tensor, " n"]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class ImageData:
    """A data set. `checksum` covers every byte of every split; mean and std are the train split's, for each channel."""

    name: str
    classes: int
    train: Split
    validation: Split
    test: Split
    checksum: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def image_size(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[3])

    def normalise(self, images: Float[Tensor, "n channels h w"]) -> Float[Tensor, "n channels h w"]:
        """Images in [0, 1] to mean 0 and standard deviation 1 over the train split."""
        return (images - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


def load_images(source: str, root: str | None = None, train_examples: int | None = None) -> ImageData:
    """Reads a data set, checks it and splits it.

    Args:
        source: "digits" (scikit-learn's, carried by a dependency), "mnist", "fashion-mnist", "cifar10", "folder"
            (ROOT/train/CLASS/*.png and ROOT/test/...), or "hf:NAME".
        root: the folder with the files.
        train_examples: a stratified subset of the training split, for short budgets.

    The test split is the data set's own (digits: 360 images). A fixed tenth of the training images is set aside for
    validation.

    Raises:
        InputError: unknown source, missing or damaged files, NaN, empty or mismatched data, labels that aren't 0..C-1.
    """
    arrays = _read(source, root)
    splits = {split: _checked(f"{source} {split}", *arrays[split]) for split in ("train", "test")}
    if splits["train"].images.shape[1:] != splits["test"].images.shape[1:]:
        raise InputError(f"{source} has train and test images of different sizes: give both the same")
    classes = int(splits["train"].labels.max()) + 1
    if splits["test"].labels.max() >= classes:
        largest = splits["test"].labels.max()
        raise InputError(f"{source} has test labels up to {largest}, but trains {classes} classes: give both the same")
    validation, train = _cut(splits["train"], max(1, len(splits["train"]) // 10), "validation")
    if train_examples is not None:
        if not classes <= train_examples <= len(train):
            raise InputError(f"train_examples {train_examples} is out of range: choose {classes} to {len(train)}")
        train, _ = _cut(train, train_examples, "subset")
    pixels = train.images.reshape(-1, train.images.shape[-1])
    std = pixels.std(axis=0) / 255
    return ImageData(
        name=source,
        classes=classes,
        train=train,
        validation=validation,
        test=splits["test"],
        checksum=_checksum(train, validation, splits["test"]),
        mean=tuple(float(m) for m in pixels.mean(axis=0) / 255),
        std=tuple(float(s) if s > 0 else 1.0 for s in std),
    )


def _read(source: str, root: str | None) -> Arrays:
    if source == "digits":
        return _digits()
    if source.startswith("hf:"):
        return read_hugging_face(source[3:])
    if source not in (*NPZ_NAMES, "folder"):
        raise InputError(f"unknown data source '{source}': choose digits, {', '.join(NPZ_NAMES)}, folder or hf:NAME")
    if root is None and source == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        root = str(DEBIAN_FASHION_MNIST)
    if root is None:
        raise InputError(f"{source} needs its files: give their folder as data.root, or set DIFFUSIONBLOCKS_DATA")
    if not Path(root).is_dir():
        raise InputError(f"data.root {root} isn't a folder: give the folder that holds {source}")
    return read_class_folders(Path(root)) if source == "folder" else read_named(source, Path(root))


def _digits() -> Arrays:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Grey levels 0..16: times 15 they use the byte's range and can be undone.
    whole = Split((bunch.images * 15).astype(np.uint8)[..., None], bunch.target.astype(np.int64))
    test, train = _cut(whole, 360, "test")
    return {"train": (train.images, train.labels), "test": (test.images, test.labels)}


def _checked(name: str, images: NDArray[Any], labels: NDArray[Any]) -> Split:
    if len(images) == 0 or len(images) != len(labels) or len(labels) != labels.size:
        raise InputError(f"{name} has {len(images)} images and {labels.size} labels: it needs one label for each image")
    if np.issubdtype(images.dtype, np.inexact) and not np.isfinite(images).all():
        raise InputError(f"{name} has NaN or infinite pixels: clean the images")
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] not in (1, 3):
        raise InputError(f"{name} has images of shape {images.shape[1:]}: square ones with 1 or 3 channels are needed")
    if images.dtype != np.uint8:
        raise InputError(f"{name} has pixels of type {images.dtype}: store them as unsigned bytes, 0 to 255")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
        lowest = labels.min() if np.issubdtype(labels.dtype, np.number) else labels.flat[0]
        raise InputError(f"{name} has labels of type {labels.dtype} from {lowest}: number the classes 0, 1, 2, ...")
    # Widened first: the next integer after a byte's 255 would be 0.
    labels = labels.reshape(-1).astype(np.int64)
    present = np.unique(labels)
    if name.endswith("train") and len(present) != present[-1] + 1:
        missing = np.argmax(present != np.arange(len(present)))
        raise InputError(
            f"{name} has labels up to {present[-1]} but none of class {missing}: number the classes 0, 1, 2, ..."
        )
    return Split(np.ascontiguousarray(images), labels)


def _cut(whole: Split, n: int, purpose: str) -> tuple[Split, Split]:
    """n examples with every class in its share, and the rest; both in the file's order."""
    order = torch.randperm(len(whole), generator=seeds.generator(SPLIT_SEED, seeds.NO_BLOCK, purpose)).numpy()
    # Ranked within its class, an example stands at (rank + 1/2) / class size; the n lowest hold each class's share.
    place = np.empty(len(whole))
    for label in np.unique(whole.labels):
        members = order[whole.labels[order] == label]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    chosen = np.zeros(len(whole), dtype=bool)
    chosen[np.lexsort((order, place))[:n]] = True
    return whole.take(np.flatnonzero(chosen)), whole.take(np.flatnonzero(~chosen))


def _checksum(*splits: Split) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(str(split.images.shape).encode())
        digest.update(split.images.tobytes())
        digest.update(split.labels.tobytes())
    return digest.hexdigest()


def _unit(images: UInt8[np.ndarray, "n height width channels"]) -> Float[Tensor, "n channels height width"]:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def evaluation_batches(data: ImageData, split: str, batch_size: int) -> Iterator[Batch]:
    """All examples of a split in order, the last partial batch included."""
    whole: Split = getattr(data, split)
    for start in range(0, len(whole), batch_size):
        part = slice(start, start + batch_size)
        yield Batch(data.normalise(_unit(whole.images[part])), torch.from_numpy(whole.labels[part]))


class Batches:
    """Training batches as a function of the step alone: a run that resumes needs nothing but its step's number.

    The stream is one permutation of the training split after another, each from (seed, block, "order", epoch); batches
    are cut from it without a gap, so that no example is dropped at an epoch's end.
    """

    def __init__(self, data: ImageData, batch_size: int, seed: int, block: int, augment: str = "none") -> None:
        if augment not in AUGMENTATIONS:
            raise InputError(f"unknown augmentation '{augment}': choose {', '.join(AUGMENTATIONS)}")
        self.data, self.batch_size, self.seed, self.block, self.augment = data, batch_size, seed, block, augment
        # Two epochs: a batch may straddle them.
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        generator = seeds.generator(self.seed, self.block, "order", epoch)
        return torch.randperm(len(self.data.train), generator=generator).numpy()

    def indices(self, step: int) -> NDArray[np.intp]:
        """Which training examples make up the batch of a step."""
        n, start, found = len(self.data.train), step * self.batch_size, []
        while start < (step + 1) * self.batch_size:
            epoch, offset = divmod(start, n)
            taken = self._epoch(epoch)[offset : offset + (step + 1) * self.batch_size - start]
            found.append(taken)
            start += len(taken)
        return np.concatenate(found)

    def __call__(self, step: int) -> Batch:
        chosen = self.data.train.take(self.indices(step))
        images = _unit(chosen.images)
        if self.augment != "none":
            generator = seeds.generator(self.seed, self.block, "augment", step)
            images = crop_and_flip(images, generator)
            if self.augment == "randaugment":
                images = rand_augment(images, generator)
        return Batch(self.data.normalise(images), torch.from_numpy(chosen.labels))


def crop_and_flip(
    images: Float[Tensor, "n channels size size"], generator: torch.Generator, pad: int = 4
) -> Float[Tensor, "n channels size size"]:
    """Each image shifted by up to `pad` pixels (black beyond its border) and mirrored half of the time."""
    n, _, size, _ = images.shape
    padded = torch.nn.functional.pad(images, (pad,) * 4)
    rows, columns = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=generator) + torch.arange(size)
    mirrored = torch.rand(n, generator=generator) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def rand_augment(
    images: Float[Tensor, "n channels size size"], generator: torch.Generator
) -> Float[Tensor, "n channels size size"]:
    """RandAugment (Cubuk et al. 2020) with two operations of magnitude 9, through kornia."""
    try:
        from kornia.augmentation.auto import RandAugment
    except ModuleNotFoundError as error:
        raise InputError("augment randaugment needs a package: pip install 'diffusionblocks[images]'") from error
    seed = int(torch.randint(2**62, (), generator=generator))
    # kornia draws from the global generator: seeded for this batch, and put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        colour = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        augmented: Tensor = RandAugment(n=2, m=9)(colour)
    return augmented[:, : images.shape[1]]
