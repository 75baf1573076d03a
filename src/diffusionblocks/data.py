"""Images and their classes: stated splits, a checksum, and training batches as a pure function of the update.

Images stay unsigned bytes in numpy; only a batch becomes floating-point tensors.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from diffusionblocks import seeds
from diffusionblocks.errors import InputError
from diffusionblocks.image_files import NAMED, Arrays, check, read_class_folders, read_hugging_face, read_named

AUGMENTATIONS = ("none", "crop-flip", "randaugment")
# [size, channels, classes] of data sets that need not be read to plan a network for them.
SHAPES = {
    "digits": (8, 1, 10),
    "mnist": (28, 1, 10),
    "fashion-mnist": (28, 1, 10),
    "cifar10": (32, 3, 10),
    "hf:cifar100": (32, 3, 100),
}
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

    def to(self, device: torch.device | str) -> "Batch":
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
        mean, std = images.new_tensor(self.mean), images.new_tensor(self.std)
        return (images - mean[:, None, None]) / std[:, None, None]

    def to_tensor(
        self, images: UInt8[np.ndarray, "n height width channels"]
    ) -> Float[Tensor, "n channels height width"]:
        """Images as they are stored to normalised ones, as a network takes them."""
        return self.normalise(_unit(images))


def load_images(
    source: str, root: str | None = None, train_examples: int | None = None, *, test_examples: int | None = None
) -> ImageData:
    """Reads a data set, checks it and splits it.

    Args:
        source: "digits" (scikit-learn's, carried by a dependency), "mnist", "fashion-mnist", "cifar10", "folder"
            (ROOT/train/CLASS/*.png and ROOT/test/...), or "hf:NAME".
        root: the folder with the files.
        train_examples: a stratified subset of the training split, for short budgets.
        test_examples: a stratified subset of the test split, for smoke tests only: no figure from it can be compared.

    The test split is the data set's own (digits: 360 images). A fixed tenth of the training images is set aside for
    validation.

    Raises:
        InputError: unknown source, missing or damaged files, NaN, empty or mismatched data, labels that aren't 0..C-1.
    """
    arrays = _read(source, root)
    checked = {split: Split(*check(f"{source} {split}", *arrays[split])) for split in ("train", "test")}
    whole, test = checked["train"], checked["test"]
    classes = int(whole.labels.max()) + 1
    if whole.images.shape[1:] != test.images.shape[1:]:
        raise InputError(f"{source} has train and test images of different sizes: give both the same size and channels")
    if test.labels.max() >= classes:
        raise InputError(
            f"{source} has test labels up to {test.labels.max()}, but only {classes} classes to train on: "
            "number both splits' classes alike"
        )
    validation, train = _cut(whole, max(1, len(whole) // 10), "validation")
    if len(np.unique(train.labels)) < classes:
        raise InputError(f"{source} has a class without training images, once a tenth is set aside: add images to it")
    train = _subset("train_examples", train, train_examples, classes)
    test = _subset("test_examples", test, test_examples, 1)
    mean, std = _statistics(train.images)
    return ImageData(source, classes, train, validation, test, _checksum(train, validation, test), mean, std)


def _subset(name: str, whole: Split, n: int | None, least: int) -> Split:
    if n is None:
        return whole
    if not least <= n <= len(whole):
        raise InputError(f"{name} {n} is out of range: choose {least} to {len(whole)}, or leave it out")
    return _cut(whole, n, "subset")[0]


def _statistics(
    images: UInt8[np.ndarray, "n height width channels"],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, from exact sums: no floating-point copy of the images."""
    n = images[..., 0].size
    sums = images.sum(axis=(0, 1, 2), dtype=np.int64).tolist()
    squares = np.einsum("nhwc,nhwc->c", images, images, dtype=np.int64).tolist()
    variances = [(n * square - total**2) / n**2 for total, square in zip(sums, squares, strict=True)]
    # A channel without spread is only shifted.
    std = tuple(math.sqrt(variance) / 255 if variance > 0 else 1.0 for variance in variances)
    return tuple(total / n / 255 for total in sums), std


def _read(source: str, root: str | None) -> Arrays:
    if source == "digits":
        return _digits()
    if source.startswith("hf:"):
        return read_hugging_face(source[3:])
    if source not in (*NAMED, "folder"):
        raise InputError(f"unknown data source '{source}': choose digits, {', '.join(NAMED)}, folder or hf:NAME")
    if root is None and source == "fashion-mnist" and DEBIAN_FASHION_MNIST.is_dir():
        root = str(DEBIAN_FASHION_MNIST)
    if root is None:
        raise InputError(f"{source} needs its files: give their folder as data.root, or set DIFFUSIONBLOCKS_DATA")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise InputError(f"data.root {root} isn't a folder: give the folder that holds {source}")
    return read_class_folders(folder) if source == "folder" else read_named(source, folder)


def _digits() -> Arrays:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Grey levels 0..16: times 15 they use the byte's range and can be undone.
    whole = Split((bunch.images * 15).astype(np.uint8)[..., None], bunch.target.astype(np.int64))
    test, train = _cut(whole, 360, "test")
    return {"train": (train.images, train.labels), "test": (test.images, test.labels)}


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
        digest.update(np.ascontiguousarray(split.images).data)
        digest.update(np.ascontiguousarray(split.labels).data)
    return digest.hexdigest()


def _unit(images: UInt8[np.ndarray, "n height width channels"]) -> Float[Tensor, "n channels height width"]:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def evaluation_batches(data: ImageData, split: str, batch_size: int) -> Iterator[Batch]:
    """All examples of a split ("train", "validation" or "test") in order, the last partial batch included.

    Raises:
        InputError: another split, or a batch size below 1.
    """
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    if split not in splits:
        raise InputError(f"unknown split '{split}': choose {', '.join(splits)}")
    _check_batch_size(batch_size)
    whole = splits[split]
    for start in range(0, len(whole), batch_size):
        part = slice(start, start + batch_size)
        yield Batch(data.to_tensor(whole.images[part]), torch.from_numpy(whole.labels[part]))


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} is out of range: choose 1 or more")


class Batches:
    """Training batches as a function of the update alone: a run that resumes needs nothing but its update's number.

    The stream is one permutation of the training split after another, each from (seed, block, "order", epoch); batches
    are cut from it without a gap, so that no example is dropped at an epoch's end.

    Raises:
        InputError: an unknown augmentation, or a batch size below 1.
    """

    def __init__(self, data: ImageData, batch_size: int, seed: int, block: int, augment: str = "none") -> None:
        if augment not in AUGMENTATIONS:
            raise InputError(f"unknown augmentation '{augment}': choose {', '.join(AUGMENTATIONS)}")
        _check_batch_size(batch_size)
        self.data, self.batch_size, self.seed, self.block, self.augment = data, batch_size, seed, block, augment
        # Two epochs: a batch may straddle them.
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        generator = seeds.generator(self.seed, self.block, "order", epoch)
        return torch.randperm(len(self.data.train), generator=generator).numpy()

    def indices(self, update: int) -> NDArray[np.intp]:
        """Which training examples make up the batch of an update."""
        n, start, found = len(self.data.train), update * self.batch_size, []
        while start < (update + 1) * self.batch_size:
            epoch, offset = divmod(start, n)
            taken = self._epoch(epoch)[offset : offset + (update + 1) * self.batch_size - start]
            found.append(taken)
            start += len(taken)
        return np.concatenate(found)

    def __call__(self, update: int) -> Batch:
        chosen = self.data.train.take(self.indices(update))
        images = _unit(chosen.images)
        if self.augment != "none":
            generator = seeds.generator(self.seed, self.block, "augment", update)
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
    """RandAugment (Cubuk et al. 2020): two of kornia's operations, of magnitude 9, on each image.

    kornia's own class draws the operations once for a whole batch; the paper's draws them for each image, as here.
    """
    try:
        from kornia.augmentation.auto.rand_augment.rand_augment import RandAugment, default_policy
    except ModuleNotFoundError as error:
        raise InputError("augment randaugment needs a package: pip install 'diffusionblocks[images]'") from error
    operations = [RandAugment(n=1, m=9, policy=[operation]) for operation in default_policy]
    # Some operations take three channels only.
    augmented = images.expand(-1, 3, -1, -1).clone() if images.shape[1] == 1 else images.clone()
    # kornia draws from the global generator, which is put back. Not torch.manual_seed: it would seed accelerators too.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        for chosen in torch.randint(len(operations), (2, len(images)), generator=generator):
            for number in chosen.unique().tolist():
                augmented[chosen == number] = operations[number](augmented[chosen == number])
    return augmented[:, : images.shape[1]]
