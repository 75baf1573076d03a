"""Readers of labelled image files: npz, IDX, a folder of images by class, Hugging Face `datasets`.

Each returns {"train": (images, labels), "test": (images, labels)} as they stand in the files; `check` refuses what
can't be trained on.
"""

import contextlib
import gzip
import hashlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from diffusionblocks.errors import InputError

Arrays = dict[str, tuple[NDArray[Any], NDArray[Any]]]
NAMED = ("mnist", "fashion-mnist", "cifar10")
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")


# What numpy and Pillow raise for a damaged file, between them.
DAMAGE = (OSError, EOFError, ValueError, SyntaxError, struct.error, zipfile.BadZipFile, zlib.error)


def check(
    name: str, images: NDArray[Any], labels: NDArray[Any]
) -> tuple[UInt8[np.ndarray, "n height width channels"], Int64[np.ndarray, " n"]]:
    """Images [n, size, size] or [n, size, size, channels] and labels [n] or [n, 1], in the one form that is used.

    Raises:
        InputError: no images, other shapes or types, NaN, mismatched lengths, a class below the highest without images.
    """
    if len(images) == 0 or labels.shape not in ((len(images),), (len(images), 1)):
        raise InputError(
            f"{name} has {len(images)} images and {' x '.join(map(str, labels.shape))} labels: "
            "give at least one image, and one label for each image"
        )
    if np.issubdtype(images.dtype, np.inexact) and not np.isfinite(images).all():
        raise InputError(f"{name} has NaN or infinite pixels: clean the images")
    if images.dtype != np.uint8:
        raise InputError(f"{name} has pixels of type {images.dtype}: store them as unsigned bytes, 0 to 255")
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] not in (1, 3):
        raise InputError(f"{name} has images of shape {images.shape[1:]}: square ones with 1 or 3 channels are needed")
    # Writeable, for torch warns of memory that isn't.
    return np.require(images, requirements=["C", "W"]), _check_labels(name, labels.reshape(-1))


def _check_labels(name: str, labels: NDArray[Any]) -> Int64[np.ndarray, " n"]:
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"{name} has labels of type {labels.dtype}: number the classes 0, 1, 2, ...")
    labels = labels.astype(np.int64)
    if labels.min() < 0:
        raise InputError(f"{name} has labels from {labels.min()}: number the classes 0, 1, 2, ...")
    present = np.unique(labels)
    if name.endswith("train") and present[-1] >= len(present):
        missing = np.flatnonzero(present != np.arange(len(present)))[0]
        raise InputError(
            f"{name} has labels up to {present[-1]} but none of class {missing}: number the classes 0, 1, 2, ..."
        )
    return labels


def read_named(source: str, root: Path) -> Arrays:
    """A named data set from its usual files below `root`: npz of pixels or of JPEG bytes, or IDX (plain or gzip)."""
    names = [f"{source}.npz", f"{source}_full_jpeg.npz"]
    for name in names:
        if (root / name).exists():
            return _read_npz(root / name)
    if source != "cifar10":
        return _read_idx_folder(source, root, names)
    raise InputError(f"{root} holds neither {' nor '.join(names)}: give the folder that does as data.root")


def _read_npz(path: Path) -> Arrays:
    """Pixels as `train_x`, or JPEG bytes end to end as `train_jpeg`: image i is bytes offsets[i]:offsets[i+1]."""
    facts = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    decoded = cache_folder() / f"{path.stem}-{key}.npz"
    if decoded.exists():
        return _pixels_and_labels(decoded, _load(decoded))
    stored = _load(path)
    if "train_jpeg" not in stored:
        return _pixels_and_labels(path, stored)
    kinds = ("jpeg", "offsets", "y")
    _need(path, stored, [f"{split}_{kind}" for split in ("train", "test") for kind in kinds])
    pixels: dict[str, NDArray[Any]] = {}
    for split in ("train", "test"):
        pixels[f"{split}_x"] = _decode(stored[f"{split}_jpeg"], stored[f"{split}_offsets"], path)
        pixels[f"{split}_y"] = stored[f"{split}_y"]
    _keep(decoded, pixels)
    return _pixels_and_labels(path, pixels)


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        # Opened here: numpy leaves the file open where the archive is damaged.
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise ValueError("one array, no archive")
            return {name: arrays[name] for name in arrays.files}
    except DAMAGE as error:
        raise InputError(f"{path} can't be read as an npz of plain arrays: remove it and get it again") from error


def _pixels_and_labels(path: Path, arrays: dict[str, NDArray[Any]]) -> Arrays:
    _need(path, arrays, [f"{split}_{kind}" for split in ("train", "test") for kind in "xy"])
    return {split: (arrays[f"{split}_x"], arrays[f"{split}_y"]) for split in ("train", "test")}


def _need(path: Path, arrays: dict[str, NDArray[Any]], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise InputError(f"{path} lacks the array '{missing[0]}': it must hold {', '.join(names)}")


def cache_folder() -> Path:
    """Where decoded images are kept: DIFFUSIONBLOCKS_CACHE, or the user's cache."""
    return Path(os.environ.get("DIFFUSIONBLOCKS_CACHE") or Path.home() / ".cache" / "diffusionblocks")


def _keep(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Written under another name first: another process must never see half a file."""
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(draft, **arrays)  # type: ignore[arg-type]  # takes allow_pickle for one of them
        os.replace(draft, path)
    except OSError as error:
        raise InputError(f"{path} can't be written: set DIFFUSIONBLOCKS_CACHE to a folder with space") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _decode(stream: NDArray[Any], offsets: NDArray[Any], path: Path) -> NDArray[np.uint8]:
    whole = stream.dtype == np.uint8 and stream.ndim == offsets.ndim == 1 and np.issubdtype(offsets.dtype, np.integer)
    if not whole or len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(stream):
        raise InputError(f"{path} has JPEG bytes that its offsets don't span: the file is damaged, get it again")
    content = stream.tobytes()
    images: list[NDArray[np.uint8]] = []
    for index, (start, end) in enumerate(pairwise(offsets.tolist())):
        images.append(_pixels(io.BytesIO(content[start:end]), f"image {index} in {path}", images))
    return np.stack(images)


def _pixels(file: Path | io.BytesIO, name: str, others: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One image file as [height, width, 1 or 3], of the size that the others have."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            pixels = _bytes(image, name)
    except InputError:
        raise
    except DAMAGE as error:
        raise InputError(f"{name} can't be read as an image: it is damaged, remove it or get it again") from error
    if others and pixels.shape != others[0].shape:
        raise InputError(f"{name} is {pixels.shape}, others are {others[0].shape}: give all images one size and mode")
    return pixels


def _bytes(image: Any, name: str) -> NDArray[np.uint8]:
    """A Pillow image as [height, width, 1] if it is grey and [height, width, 3] otherwise."""
    # Pillow would clip these to a byte in silence.
    if image.mode.startswith(("I", "F")):
        raise InputError(f"{name} has pixels wider than a byte (mode {image.mode}): store 8 bits a channel")
    return np.atleast_3d(np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")))


def _read_idx_folder(source: str, root: Path, others: Sequence[str]) -> Arrays:
    arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = (_find_idx(source, root, f"{stem}-{kind}", others) for kind in ("images-idx3", "labels-idx1"))
        arrays[split] = (read_idx(images), read_idx(labels))
    return arrays


def _find_idx(source: str, root: Path, stem: str, others: Sequence[str]) -> Path:
    for name in (stem, stem.replace("-idx", ".idx")):
        for ending in ("-ubyte", "-ubyte.gz"):
            if (root / f"{name}{ending}").exists():
                return root / f"{name}{ending}"
    raise InputError(
        f"{root} holds neither {', '.join(others)} nor {stem}-ubyte(.gz): "
        f"give the folder that holds {source} as data.root"
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes (the MNIST format): magic 0 0 8 rank, big-endian sizes, the bytes."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is cut short or isn't gzip: get the file again") from error
    rank = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * rank
    if content[:3] != b"\0\0\x08" or not rank or len(content) < start:
        raise InputError(f"{path} isn't an IDX file of unsigned bytes: get the file again")
    shape = struct.unpack(f">{rank}I", content[4:start])
    # Not numpy's product, which wraps around.
    if len(content) - start != math.prod(shape):
        raise InputError(
            f"{path} holds {len(content) - start} bytes, not the {math.prod(shape)} of its header: get it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_class_folders(root: Path) -> Arrays:
    """root/train/CLASS/*.png and root/test/CLASS/*.png; classes are numbered by name, all images of one size."""
    classes = _class_names(root / "train")
    if _class_names(root / "test") != classes:
        raise InputError(f"{root}/train and {root}/test have different class folders: give both the same")
    return {split: _read_class_folder(root / split, classes) for split in ("train", "test")}


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise InputError(f"{folder} isn't there and has no class folders: put images into {folder}/CLASS")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(f"{folder} has no class folders: put images into {folder}/CLASS")
    return names


def _read_class_folder(folder: Path, classes: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).iterdir()):
            if path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith("."):
                images.append(_pixels(path, str(path), images))
                labels.append(label)
    return (np.stack(images) if images else np.empty((0, 1, 1, 1), np.uint8)), np.array(labels, dtype=np.int64)


def read_hugging_face(name: str) -> Arrays:
    """A Hugging Face data set with an image and a label column, splits train and test (or validation)."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(f"hf:{name} needs a package: pip install 'diffusionblocks[hf]'") from error
    try:
        found = datasets.load_dataset(name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"hf:{name} can't be loaded ({reason}): check its name and the network") from error
    held_out = "test" if "test" in found else "validation"
    return {split: _read_hf_split(name, found, stored) for split, stored in (("train", "train"), ("test", held_out))}


def _read_hf_split(name: str, found: Any, stored: str) -> tuple[NDArray[Any], NDArray[Any]]:
    if stored not in found:
        raise InputError(f"hf:{name} has no split '{stored}': choose a data set with train and test")
    columns = found[stored].column_names
    image = next((column for column in ("image", "img") if column in columns), None)
    label = next((column for column in ("label", "labels", "fine_label") if column in columns), None)
    if image is None or label is None:
        raise InputError(f"hf:{name} has columns {', '.join(columns)}: an image and a label column are needed")
    pixels = [
        _bytes(picture, f"hf:{name} {stored} image {index}") if hasattr(picture, "mode") else np.asarray(picture)
        for index, picture in enumerate(found[stored][image])
    ]
    if len({picture.shape for picture in pixels}) > 1:
        raise InputError(f"hf:{name} has images of different sizes or modes: choose a data set with one size and mode")
    return (np.stack(pixels) if pixels else np.empty((0, 1, 1, 1), np.uint8)), np.array(found[stored][label])
