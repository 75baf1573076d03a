"""Readers of labelled image files: npz, IDX, a folder of images by class, Hugging Face `datasets`.

Each returns {"train": (images, labels), "test": (images, labels)} as they stand in the files; `data.py` checks them.
"""

import gzip
import hashlib
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusionblocks.errors import InputError

Arrays = dict[str, tuple[NDArray[Any], NDArray[Any]]]
NPZ_NAMES = {"mnist": ("mnist.npz",), "fashion-mnist": ("fashion-mnist.npz",), "cifar10": ("cifar10.npz",)}
JPEG_NPZ = {"cifar10": "cifar10_full_jpeg.npz"}
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp")


def read_named(source: str, root: Path) -> Arrays:
    """A named data set from its usual files below `root`: npz, npz of JPEG bytes, or IDX (plain or gzip)."""
    for name in NPZ_NAMES[source]:
        if (root / name).exists():
            return _read_npz(root / name)
    if source in JPEG_NPZ and (root / JPEG_NPZ[source]).exists():
        return _read_jpeg_npz(root / JPEG_NPZ[source])
    if source != "cifar10":
        return _read_idx_folder(source, root)
    raise InputError(f"{root} holds neither cifar10.npz nor {JPEG_NPZ[source]}: give the folder that does as data.root")


@contextmanager
def _open_npz(path: Path) -> Iterator[Any]:
    try:
        if not zipfile.is_zipfile(path):  # np.load would leave such a file open
            raise zipfile.BadZipFile
        with np.load(path, allow_pickle=False) as file:
            yield file
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged or isn't an npz of plain arrays: get the file again") from error


def _read_npz(path: Path) -> Arrays:
    with _open_npz(path) as file:
        _need(path, file, [f"{split}_{kind}" for split in ("train", "test") for kind in "xy"])
        return {split: (file[f"{split}_x"], file[f"{split}_y"]) for split in ("train", "test")}


def _need(path: Path, file: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in file]
    if missing:
        raise InputError(f"{path} lacks the array '{missing[0]}': it must hold {', '.join(names)}")


def _read_jpeg_npz(path: Path) -> Arrays:
    """Images as JPEG bytes end to end; image i is bytes offsets[i]:offsets[i+1]. Decoded once, then cached."""
    facts = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    cached = cache_folder() / f"{path.stem}-{key}.npz"
    if not cached.exists():
        with _open_npz(path) as file:
            kinds = ("jpeg", "offsets", "y")
            _need(path, file, [f"{split}_{kind}" for split in ("train", "test") for kind in kinds])
            arrays: dict[str, Any] = {}
            for split in ("train", "test"):
                arrays[f"{split}_x"] = _decode(file[f"{split}_jpeg"], file[f"{split}_offsets"], path)
                arrays[f"{split}_y"] = file[f"{split}_y"]
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft = cached.with_name(f".{os.getpid()}-{cached.name}")
        np.savez(draft, **arrays)
        os.replace(draft, cached)
    return _read_npz(cached)


def cache_folder() -> Path:
    """Where decoded images are kept: DIFFUSIONBLOCKS_CACHE, or the user's cache."""
    return Path(os.environ.get("DIFFUSIONBLOCKS_CACHE", Path.home() / ".cache" / "diffusionblocks"))


def _decode(stream: NDArray[np.uint8], offsets: NDArray[np.integer], path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    content, images = stream.tobytes(), []
    for index, (start, end) in enumerate(pairwise(offsets)):
        try:
            with Image.open(io.BytesIO(content[int(start) : int(end)])) as image:
                images.append(np.asarray(image.convert("RGB")))
        except OSError as error:
            raise InputError(f"image {index} in {path} can't be decoded: the file is damaged, get it again") from error
        if images[-1].shape != images[0].shape:
            raise InputError(f"image {index} in {path} has another size than the first: give all images one size")
    return np.stack(images) if images else np.empty((0, 1, 1, 3), np.uint8)


def _read_idx_folder(source: str, root: Path) -> Arrays:
    arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = (_find_idx(source, root, f"{stem}-{kind}") for kind in ("images-idx3", "labels-idx1"))
        arrays[split] = (read_idx(images), read_idx(labels))
    return arrays


def _find_idx(source: str, root: Path, stem: str) -> Path:
    for name in (stem, stem.replace("-idx", ".idx")):
        for ending in ("-ubyte", "-ubyte.gz"):
            if (root / f"{name}{ending}").exists():
                return root / f"{name}{ending}"
    raise InputError(
        f"{root} holds neither {source}.npz nor {stem}-ubyte(.gz): give the folder that holds {source} as data.root"
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
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not names:
        raise InputError(f"{folder} has no class folders: put images into ROOT/train/CLASS and ROOT/test/CLASS")
    return names


def _read_class_folder(folder: Path, classes: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from PIL import Image

    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).iterdir()):
            if path.suffix.lower() not in IMAGE_ENDINGS:
                continue
            try:
                with Image.open(path) as image:
                    pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
            except OSError as error:
                raise InputError(f"{path} can't be read as an image: remove it or get it again") from error
            pixels = pixels[..., None] if pixels.ndim == 2 else pixels
            if images and pixels.shape != images[0].shape:
                raise InputError(
                    f"{path} is {pixels.shape}, others are {images[0].shape}: give all images one size and mode"
                )
            images.append(pixels)
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
    except (OSError, ValueError) as error:  # not found, no network, or several configurations
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"hf:{name} can't be loaded ({reason}): check its name and the network") from error
    held_out = "test" if "test" in found else "validation"
    arrays = {}
    for split, stored in (("train", "train"), ("test", held_out)):
        if stored not in found:
            raise InputError(f"hf:{name} has no split '{stored}': choose a data set with train and test")
        columns = found[stored].column_names
        image = next((column for column in ("image", "img") if column in columns), None)
        label = next((column for column in ("label", "labels", "fine_label") if column in columns), None)
        if image is None or label is None:
            raise InputError(f"hf:{name} has columns {', '.join(columns)}: an image and a label column are needed")
        pixels = [np.asarray(picture) for picture in found[stored][image]]
        if len({picture.shape for picture in pixels}) != 1:
            raise InputError(f"hf:{name} has images of different sizes: choose a data set with one size")
        arrays[split] = (np.stack(pixels), np.array(found[stored][label]))
    return arrays
