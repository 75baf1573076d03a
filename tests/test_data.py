"""Data sets: nothing lost, nothing seen twice, the same bytes for everybody, and faults named in one sentence."""

import gzip
import io
import struct
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from diffusionblocks import data as data_module
from diffusionblocks.config import Recipe
from diffusionblocks.data import (
    AUGMENTATIONS,
    Batches,
    ImageData,
    Split,
    crop_and_flip,
    evaluation_batches,
    load_images,
    rand_augment,
)
from diffusionblocks.errors import InputError
from diffusionblocks.image_files import read_idx
from diffusionblocks.run import make_data

SPLITS = ("train", "validation", "test")
# Of the digits' three splits: with another one, figures that were written down before can't be compared with.
DIGITS_CHECKSUM = "2c773b252a2ed07b033b42e0d93fe9957d66d0f082617b55cd3ea78b7da70201"


def refusal(call: Callable[[], Any]) -> str:
    """The one sentence that refuses; it says what was wrong and, behind a colon, what to do."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert 20 < len(text) < 300
    assert ": " in text
    return text


def numbered(n: int, *shape: int, first: int = 0) -> NDArray[np.uint8]:
    """n images that differ, each with its own number in its first two pixels."""
    images = np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)
    flat = images.reshape(n, -1)
    flat[:, 0], flat[:, 1] = np.divmod(np.arange(first, first + n), 256)
    return images


def number_of(split: Split) -> NDArray[np.intp]:
    flat = split.images.reshape(len(split), -1).astype(int)
    return flat[:, 0] * 256 + flat[:, 1]


def arrays(n_train: int = 60, n_test: int = 20, shape: tuple[int, ...] = (4, 4), classes: int = 3) -> dict[str, Any]:
    return {
        "train_x": numbered(n_train, *shape),
        "train_y": np.arange(n_train) % classes,
        "test_x": numbered(n_test, *shape, first=n_train),
        "test_y": np.arange(n_test) % classes,
    }


def load_npz(folder: Path, name: str = "mnist", train_examples: int | None = None, **content: Any) -> ImageData:
    np.savez(folder / f"{name}.npz", **content)
    return load_images(name, str(folder), train_examples)


def in_memory(n: int) -> ImageData:
    images = numbered(n, 8, 8, 1)
    split = Split(images, np.arange(n) % 2)
    return ImageData("memory", 2, split, split, split, "", (0.5,), (0.25,))


# -- splits -------------------------------------------------------------------------------------------------------


def test_digits_are_split_without_loss() -> None:
    from sklearn.datasets import load_digits

    data = load_images("digits")
    assert [len(getattr(data, split)) for split in SPLITS] == [1294, 143, 360]
    assert (data.classes, data.image_size, data.channels) == (10, 8, 1)
    original = load_digits()
    expected = sorted((image.astype(int).tobytes(), label) for image, label in zip(*_pair(original), strict=True))
    found = [
        ((image[..., 0] // 15).astype(int).tobytes(), label)
        for split in SPLITS
        for image, label in zip(getattr(data, split).images, getattr(data, split).labels, strict=True)
    ]
    assert sorted(found) == expected


def _pair(bunch: Any) -> tuple[Any, Any]:
    return bunch.images, bunch.target


def test_splits_share_no_example_and_lose_none(tmp_path: Path) -> None:
    data = load_npz(tmp_path, **arrays(607, 101, classes=7))
    train, validation, test = (number_of(getattr(data, split)) for split in SPLITS)
    assert sorted([*train, *validation]) == list(range(607))
    assert test.tolist() == list(range(607, 708))  # the test split is the file's own, in its order
    assert len(validation) == 60
    for split, numbers in (("train", train), ("validation", validation)):
        assert (getattr(data, split).labels == numbers % 7).all()
        assert (np.diff(numbers) > 0).all()


def test_validation_and_subsets_hold_each_class_in_its_share(tmp_path: Path) -> None:
    sizes = np.array([400, 100, 60, 40])
    content = arrays(600, 20)
    content["train_y"] = np.random.default_rng(0).permutation(np.repeat(np.arange(4), sizes))
    whole = load_npz(tmp_path, **content)
    assert np.bincount(whole.validation.labels).tolist() == [40, 10, 6, 4]
    for n in (4, 15, 90, 539, 540):
        data = load_images("mnist", str(tmp_path), n)
        assert len(data.train) == n
        assert np.abs(np.bincount(data.train.labels, minlength=4) - n * sizes / 600).max() <= 1
        assert set(number_of(data.train)) <= set(number_of(whole.train))
        assert (data.validation.images == whole.validation.images).all()
        assert (data.test.images == whole.test.images).all()


def test_a_subset_of_the_test_split_holds_each_class_in_its_share(tmp_path: Path) -> None:
    whole = load_npz(tmp_path, **arrays(600, 90))
    data = load_images("mnist", str(tmp_path), test_examples=30)
    assert np.bincount(data.test.labels).tolist() == [10, 10, 10]
    assert set(number_of(data.test)) < set(number_of(whole.test))
    assert (data.train.images == whole.train.images).all()
    assert data.checksum != whole.checksum
    for n in (0, 91):
        assert f"test_examples {n}" in refusal(lambda n=n: load_images("mnist", str(tmp_path), test_examples=n))


@pytest.mark.parametrize("n", [0, 9, 1295])
def test_subsets_out_of_range_are_refused(n: int) -> None:
    assert f"train_examples {n}" in refusal(lambda: load_images("digits", train_examples=n))


def test_the_split_is_the_same_for_every_seed(tiny: Recipe) -> None:
    torch.manual_seed(1)
    first = load_images("digits")
    torch.manual_seed(2)
    assert load_images("digits").checksum == first.checksum == DIGITS_CHECKSUM
    assert {make_data(replace(tiny, seed=seed)).checksum for seed in range(3)} == {DIGITS_CHECKSUM}


@pytest.mark.parametrize("array", ["train_x", "test_x", "train_y", "test_y"])
def test_checksum_covers_every_pixel_and_label(tmp_path: Path, array: str) -> None:
    content = arrays()
    checksum = load_npz(tmp_path, **content).checksum
    assert load_npz(tmp_path, **content).checksum == checksum
    for index in (3, 19):
        changed = {name: values.copy() for name, values in content.items()}
        if array.endswith("x"):
            changed[array][index, 2, 3] ^= 1
        else:
            changed[array][index] = (changed[array][index] + 1) % 3
        assert load_npz(tmp_path, **changed).checksum != checksum


# -- batches ------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 40), batch_size=st.integers(1, 100), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_example_once_an_epoch(n: int, batch_size: int, seed: int) -> None:
    batches = Batches(in_memory(n), batch_size, seed, block=1)
    steps = -(-3 * n // batch_size)
    taken = [batches.indices(step) for step in range(steps)]
    assert all(len(indices) == batch_size for indices in taken)  # none is cut short at an epoch's end
    stream = np.concatenate(taken)
    for epoch in range(3):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_are_shuffled_anew() -> None:
    stream = np.concatenate([Batches(in_memory(40), 40, 0, 0).indices(step) for step in range(3)]).reshape(3, 40)
    assert len({tuple(epoch) for epoch in stream} | {tuple(range(40))}) == 4


def test_batches_do_not_depend_on_the_order_of_calls() -> None:
    data = load_images("digits", train_examples=50)
    for augment in ("none", "crop-flip"):
        forward, backward = (Batches(data, 16, 0, 0, augment) for _ in range(2))
        expected = [forward(step) for step in range(9)]
        for step in reversed(range(9)):
            torch.manual_seed(step)
            found = backward(step)
            assert torch.equal(found.x, expected[step].x)
            assert torch.equal(found.y, expected[step].y)


def test_blocks_and_seeds_draw_different_batches() -> None:
    data = load_images("digits", train_examples=50)
    kinds = [(0, 0), (0, 1), (1, 0), (0, -1)]
    assert len({Batches(data, 50, seed, block).indices(0).tobytes() for seed, block in kinds}) == 4
    # The augmentation differs too, not only the order.
    flat = replace(data, train=Split(np.repeat(data.train.images[:1], 50, 0), data.train.labels))
    assert len({Batches(flat, 50, s, b, "crop-flip")(0).x.numpy().tobytes() for s, b in kinds}) == 4
    # And from one update to the next.
    assert len({Batches(flat, 50, 0, 0, "crop-flip")(update).x.numpy().tobytes() for update in range(4)}) == 4


def test_batches_keep_images_with_their_labels(tmp_path: Path) -> None:
    data = load_npz(tmp_path, **arrays(607, 20, classes=7))
    batches = Batches(data, 100, 0, 0)
    batch, chosen = batches(7), data.train.take(batches.indices(7))
    assert batch.y.tolist() == chosen.labels.tolist() == (number_of(chosen) % 7).tolist()
    pixels = torch.from_numpy(chosen.images).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(batch.x, (pixels - data.mean[0]) / data.std[0])


@given(batch_size=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_evaluation_covers_all_examples_in_order(batch_size: int) -> None:
    data = in_memory(47)
    batches = list(evaluation_batches(data, "test", batch_size))
    assert all(len(batch.x) == len(batch.y) <= batch_size for batch in batches)
    assert len(batches) == -(-47 // batch_size)
    found = torch.cat([batch.x for batch in batches])
    expected = (torch.from_numpy(data.test.images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    torch.testing.assert_close(found, expected)
    assert torch.cat([batch.y for batch in batches]).tolist() == data.test.labels.tolist()


def test_normalised_images_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    content = arrays(300, 20, (6, 6, 3))
    for split in ("train_x", "test_x"):
        content[split][..., 1] = content[split][..., 1] // 4 + 100
        content[split][..., 2] = 7  # without any spread
    data = load_npz(tmp_path, **content)
    x = torch.cat([batch.x for batch in evaluation_batches(data, "train", 64)]).double()
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.tensor([1, 1, 0]).double(), atol=1e-5, rtol=0)


def test_normalisation_is_the_train_splits_own(tmp_path: Path) -> None:
    content = arrays()
    statistics = load_npz(tmp_path, **content).mean
    content["test_x"] = content["test_x"] // 2
    assert load_npz(tmp_path, **content).mean == statistics


# -- augmentation -------------------------------------------------------------------------------------------------


def test_crop_and_flip_takes_its_pixels_from_the_padded_original() -> None:
    images = torch.rand(200, 3, 6, 6, generator=torch.Generator().manual_seed(0)) + 0.1
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    cropped = crop_and_flip(images, torch.Generator().manual_seed(1), pad=2)
    shifts = []
    for whole, image in zip(padded, cropped, strict=True):
        windows = {(y, x): whole[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5)}
        found = [(*at, False) for at, window in windows.items() if torch.equal(window, image)]
        found += [(*at, True) for at, window in windows.items() if torch.equal(window.flip(2), image)]
        assert len(found) == 1
        shifts += found
    assert {y for y, _, _ in shifts} == {x for _, x, _ in shifts} == set(range(5))
    assert any(y != x for y, x, _ in shifts)
    assert 70 < sum(flipped for _, _, flipped in shifts) < 130  # half of 200, to within four standard errors


def test_crop_and_flip_draws_from_its_generator_only() -> None:
    images = torch.rand(20, 1, 8, 8)
    before, original = torch.random.get_rng_state(), images.clone()
    first, again, other = (crop_and_flip(images, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, original)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("channels", [1, 3])
def test_rand_augment_is_a_function_of_its_generator(channels: int) -> None:
    pytest.importorskip("kornia", reason="the extra `images`")
    images = torch.rand(16, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = rand_augment(images, torch.Generator().manual_seed(5))
    torch.rand(3)
    again, other = (rand_augment(images, torch.Generator().manual_seed(seed)) for seed in (5, 6))
    torch.random.set_rng_state(before)
    rand_augment(images, torch.Generator().manual_seed(5))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.shape == images.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, images)
    assert first.isfinite().all()
    assert 0 <= float(first.min()) <= float(first.max()) <= 1


def test_rand_augment_reaches_the_batches() -> None:
    pytest.importorskip("kornia", reason="the extra `images`")
    data = load_images("digits", train_examples=50)
    batches = Batches(data, 20, 0, 0, "randaugment")
    assert torch.equal(batches(1).x, Batches(data, 20, 0, 0, "randaugment")(1).x)
    assert not torch.equal(batches(1).x, Batches(data, 20, 0, 0, "crop-flip")(1).x)


def test_rand_augment_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "kornia"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "kornia", None)
    text = refusal(lambda: rand_augment(torch.rand(2, 3, 8, 8), torch.Generator()))
    assert "diffusionblocks[images]" in text


def test_unknown_augmentations_are_refused() -> None:
    assert ", ".join(AUGMENTATIONS) in refusal(lambda: Batches(in_memory(4), 2, 0, 0, "mixup"))


# -- files --------------------------------------------------------------------------------------------------------


def assert_holds(data: ImageData, content: dict[str, Any]) -> None:
    """The splits hold the arrays' images and labels: test in order, train and validation together."""
    shape = (-1, data.image_size, data.image_size, data.channels)
    assert (data.test.images == content["test_x"].reshape(shape)).all()
    assert data.test.labels.tolist() == content["test_y"].tolist()
    both = [*zip(data.train.images, data.train.labels, strict=True)]
    both += zip(data.validation.images, data.validation.labels, strict=True)
    found = sorted((image.tobytes(), int(label)) for image, label in both)
    expected = zip(content["train_x"].reshape(shape), content["train_y"], strict=True)
    assert found == sorted((image.tobytes(), int(label)) for image, label in expected)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 1), (4, 4, 3)])
def test_npz_round_trip(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    content = arrays(shape=shape)
    data = load_npz(tmp_path, name, **content)
    assert (data.name, data.classes, data.channels) == (name, 3, shape[2] if len(shape) == 3 else 1)
    assert_holds(data, content)


def test_labels_in_a_column_are_read(tmp_path: Path) -> None:
    content = arrays()
    column = {**content, "train_y": content["train_y"][:, None].astype(np.uint8)}
    assert_holds(load_npz(tmp_path, **column), content)


def jpeg_bytes(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=75)
    return buffer.getvalue()


def jpeg_arrays(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a JPEG npz, and what a decoder must read from them."""
    stored: dict[str, Any] = {}
    decoded = dict(content)
    for split in ("train", "test"):
        files = [jpeg_bytes(image) for image in content[f"{split}_x"]]
        stored[f"{split}_jpeg"] = np.frombuffer(b"".join(files), np.uint8)
        stored[f"{split}_offsets"] = np.cumsum([0, *map(len, files)])
        stored[f"{split}_y"] = content[f"{split}_y"]
        decoded[f"{split}_x"] = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
    return stored, decoded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "below"
    monkeypatch.setenv("DIFFUSIONBLOCKS_CACHE", str(folder))
    return folder


def test_jpeg_npz_is_decoded_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, decoded = jpeg_arrays(arrays(shape=(8, 8, 3)))
    np.savez(tmp_path / "cifar10_full_jpeg.npz", **stored)
    assert_holds(load_images("cifar10", str(tmp_path)), decoded)
    (kept,) = cache.iterdir()  # the draft was moved into place
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        assert_holds(load_images("cifar10", str(tmp_path)), decoded)
    # Another file of the same name is decoded anew.
    stored, decoded = jpeg_arrays(arrays(50, 20, (8, 8, 3)))
    np.savez(tmp_path / "cifar10_full_jpeg.npz", **stored)
    assert_holds(load_images("cifar10", str(tmp_path)), decoded)
    assert kept in cache.iterdir()


@pytest.mark.parametrize("damage", ["noise", "cut"])
def test_damaged_jpegs_are_named_and_not_kept(tmp_path: Path, cache: Path, damage: str) -> None:
    stored, _ = jpeg_arrays(arrays(shape=(8, 8, 3)))
    start, end = stored["train_offsets"][5:7]
    stored["train_jpeg"] = stored["train_jpeg"].copy()
    if damage == "noise":
        stored["train_jpeg"][start:end] = 17
    else:
        stored["train_jpeg"] = np.delete(stored["train_jpeg"], slice(end - 20, end))
        stored["train_offsets"][6:] -= 20
    np.savez(tmp_path / "cifar10_full_jpeg.npz", **stored)
    assert "image 5 in" in refusal(lambda: load_images("cifar10", str(tmp_path)))
    assert not cache.exists()


def test_jpegs_of_several_sizes_are_refused(tmp_path: Path, cache: Path) -> None:
    stored, _ = jpeg_arrays(arrays(shape=(8, 8, 3)))
    odd = np.frombuffer(jpeg_bytes(np.zeros((9, 9, 3), np.uint8)), np.uint8)
    stored["test_jpeg"] = np.concatenate([stored["test_jpeg"], odd])
    stored["test_offsets"] = np.append(stored["test_offsets"], len(stored["test_jpeg"]))
    stored["test_y"] = np.append(stored["test_y"], 0)
    np.savez(tmp_path / "cifar10_full_jpeg.npz", **stored)
    assert "image 20 in" in refusal(lambda: load_images("cifar10", str(tmp_path)))


def idx_bytes(array: NDArray[Any]) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_idx(folder: Path, content: dict[str, Any], mark: str = "-", ending: str = "") -> None:
    for split, stem in (("train", "train"), ("test", "t10k")):
        for kind, name in (("x", "images{}idx3-ubyte"), ("y", "labels{}idx1-ubyte")):
            packed = idx_bytes(content[f"{split}_{kind}"])
            path = folder / f"{stem}-{name.format(mark)}{ending}"
            path.write_bytes(gzip.compress(packed) if ending else packed)


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, mark: str, ending: str) -> None:
    content = arrays()
    write_idx(tmp_path, content, mark, ending)
    for name in ("mnist", "fashion-mnist"):
        assert_holds(load_images(name, str(tmp_path)), content)


def test_debians_fashion_mnist_is_found_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = arrays()
    write_idx(tmp_path, content, ending=".gz")
    monkeypatch.setattr(data_module, "DEBIAN_FASHION_MNIST", tmp_path)
    assert_holds(load_images("fashion-mnist"), content)
    monkeypatch.setattr(data_module, "DEBIAN_FASHION_MNIST", tmp_path / "absent")
    assert "data.root" in refusal(lambda: load_images("fashion-mnist"))


def write_folders(root: Path, content: dict[str, Any], ending: str = "png") -> None:
    """The class folders' names are their numbers in letters, so that their order by name is that of the numbers."""
    for split in ("train", "test"):
        for index, (image, label) in enumerate(zip(content[f"{split}_x"], content[f"{split}_y"], strict=True)):
            folder = root / split / "abcdefghij"[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{index:04d}.{ending}")


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)], ids=["grey", "colour"])
@pytest.mark.parametrize("ending", ["png", "jpg", "PNG"])
def test_class_folders_round_trip(tmp_path: Path, shape: tuple[int, ...], ending: str) -> None:
    content = arrays(30, 9, shape)
    write_folders(tmp_path, content, ending)
    (tmp_path / "train" / "b" / "notes.txt").write_text("not an image")
    order = {split: np.argsort(content[f"{split}_y"], kind="stable") for split in ("train", "test")}
    expected = {name: values[order[name.split("_")[0]]] for name, values in content.items()}
    if ending == "jpg":
        for split in ("train", "test"):
            files = [io.BytesIO(jpeg_bytes(image)) for image in expected[f"{split}_x"]]
            expected[f"{split}_x"] = np.stack([np.asarray(Image.open(file)) for file in files])
    data = load_images("folder", str(tmp_path))
    assert (data.classes, data.channels) == (3, (len(shape) == 3 and 3) or 1)
    assert_holds(data, expected)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """A package `datasets` whose load_dataset gives (or raises) `found`."""

    def load_dataset(name: str) -> Any:
        assert name == "someone/pictures"
        if isinstance(found, Exception):
            raise found
        return found

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


class Columns(dict[str, list[Any]]):
    @property
    def column_names(self) -> list[str]:
        return list(self)


def hugging_face(
    content: dict[str, Any], image: str = "img", label: str = "label", held_out: str = "test"
) -> dict[str, Columns]:
    return {
        stored: Columns(
            {image: [Image.fromarray(picture) for picture in content[f"{split}_x"]], label: [*content[f"{split}_y"]]}
        )
        for split, stored in (("train", "train"), ("test", held_out))
    }


@pytest.mark.parametrize("image", ["image", "img"])
@pytest.mark.parametrize("label", ["label", "labels", "fine_label"])
@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_hugging_face_round_trip(monkeypatch: pytest.MonkeyPatch, image: str, label: str, held_out: str) -> None:
    for shape in ((4, 4), (4, 4, 3)):
        content = arrays(shape=shape)
        fake_datasets(monkeypatch, hugging_face(content, image, label, held_out))
        assert_holds(load_images("hf:someone/pictures"), content)


# -- refusals -----------------------------------------------------------------------------------------------------


def load_hf() -> ImageData:
    return load_images("hf:someone/pictures")


def test_hugging_face_faults_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    good = hugging_face(arrays())
    for found, part in (
        ({"train": good["train"]}, "no split 'validation'"),
        ({"test": good["test"]}, "no split 'train'"),
        (hugging_face(arrays(), image="text"), "text, label"),
        (hugging_face(arrays(), label="score"), "img, score"),
        ({**good, "train": Columns(img=[*good["train"]["img"][:-1], Image.new("L", (5, 5))])}, "img"),
        (FileNotFoundError("Dataset 'someone/pictures'\n doesn't exist"), "someone/pictures"),
        (ConnectionError("no network"), "someone/pictures"),
    ):
        fake_datasets(monkeypatch, found)
        assert part in refusal(load_hf)
    mixed = hugging_face(arrays())
    mixed["train"]["img"][3] = Image.new("L", (5, 5))
    fake_datasets(monkeypatch, mixed)
    assert "different sizes" in refusal(load_hf)
    unlabelled = hugging_face(arrays())
    unlabelled["test"]["label"] = [-1] * 20
    fake_datasets(monkeypatch, unlabelled)
    assert "from -1" in refusal(load_hf)


def test_hugging_face_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "diffusionblocks[hf]" in refusal(load_hf)


def test_unknown_sources_are_refused() -> None:
    text = refusal(lambda: load_images("imagenet"))
    assert "'imagenet'" in text
    assert all(name in text for name in ("digits", "mnist", "fashion-mnist", "cifar10", "folder", "hf:"))


@pytest.mark.parametrize("source", ["mnist", "cifar10", "folder"])
def test_missing_files_are_refused(tmp_path: Path, source: str) -> None:
    text = refusal(lambda: load_images(source))
    assert "data.root" in text
    assert "DIFFUSIONBLOCKS_DATA" in text
    assert str(tmp_path / "absent") in refusal(lambda: load_images(source, str(tmp_path / "absent")))
    assert str(tmp_path) in refusal(lambda: load_images(source, str(tmp_path)))
    (tmp_path / "file").touch()
    assert "isn't a folder" in refusal(lambda: load_images(source, str(tmp_path / "file")))


@pytest.mark.parametrize("name", ["train_x", "test_y"])
def test_missing_arrays_are_named(tmp_path: Path, name: str) -> None:
    content = arrays()
    del content[name]
    assert f"'{name}'" in refusal(lambda: load_npz(tmp_path, **content))


def with_nan(images: NDArray[Any], value: float) -> NDArray[Any]:
    images = images.astype(np.float32) / 255
    images[3, 1, 1] = value
    return images


def changed(array: NDArray[Any], index: int, value: Any) -> NDArray[Any]:
    array = array.copy()
    array[index] = value
    return array


GOOD = arrays()
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"train_x": GOOD["train_x"][:0], "train_y": GOOD["train_y"][:0]}, "0 images"),
    "no test images": ({"test_x": GOOD["test_x"][:0], "test_y": GOOD["test_y"][:0]}, "test has 0 images"),
    "fewer labels": ({"train_y": GOOD["train_y"][:-1]}, "60 images and 59 labels"),
    "fewer images": ({"test_x": GOOD["test_x"][:-1]}, "19 images and 20 labels"),
    "one-hot labels": ({"train_y": np.eye(3, dtype=int)[GOOD["train_y"]]}, "one label for each image"),
    "nan": ({"train_x": with_nan(GOOD["train_x"], np.nan)}, "NaN or infinite"),
    "infinity": ({"test_x": with_nan(GOOD["test_x"], -np.inf)}, "NaN or infinite"),
    "float pixels": ({"train_x": GOOD["train_x"] / 255}, "float64"),
    "wide pixels": ({"train_x": GOOD["train_x"].astype(np.int32)}, "int32"),
    "pixels as text": ({"train_x": GOOD["train_x"].astype(str)}, "unsigned bytes"),
    "not square": ({"train_x": GOOD["train_x"][:, :3]}, "square"),
    "flat": ({"train_x": GOOD["train_x"].reshape(60, 16)}, "square"),
    "two channels": ({"train_x": np.stack([GOOD["train_x"]] * 2, -1)}, "1 or 3 channels"),
    "sizes differ": ({"test_x": np.zeros((20, 5, 5), np.uint8)}, "different sizes"),
    "channels differ": ({"test_x": np.zeros((20, 4, 4, 3), np.uint8)}, "different sizes"),
    "negative label": ({"train_y": changed(GOOD["train_y"], 7, -1)}, "from -1"),
    "missing class": ({"train_y": changed(GOOD["train_y"], 7, 4)}, "none of class 3"),
    "float labels": ({"train_y": GOOD["train_y"].astype(float)}, "float64"),
    "labels as text": ({"train_y": np.array(["cat", "dog", "emu"])[GOOD["train_y"]]}, "labels of type <U3"),
    "unknown test label": ({"test_y": changed(GOOD["test_y"], 7, 3)}, "up to 3"),
    "pickled": ({"train_x": GOOD["train_x"].astype(object)}, "mnist.npz"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_arrays_are_refused(tmp_path: Path, fault: str) -> None:
    changes, part = FAULTS[fault]
    assert part in refusal(lambda: load_npz(tmp_path, **{**GOOD, **changes}))


def test_the_arrays_without_a_fault_are_taken(tmp_path: Path) -> None:
    assert_holds(load_npz(tmp_path, **GOOD), GOOD)


@pytest.mark.parametrize("name", ["mnist.npz", "cifar10_full_jpeg.npz"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, name: str, cache: Path) -> None:
    source = "mnist" if name == "mnist.npz" else "cifar10"
    whole = io.BytesIO()
    np.savez(whole, **GOOD)
    one_array = io.BytesIO()
    np.save(one_array, GOOD["train_x"])
    for content in (b"", b"no archive at all", whole.getvalue()[:300], one_array.getvalue()):
        (tmp_path / name).write_bytes(content)
        assert name in refusal(lambda: load_images(source, str(tmp_path)))


IDX = idx_bytes(GOOD["train_x"])
IDX_FAULTS = {
    "empty": b"",
    "cut in the magic": IDX[:3],
    "cut in the header": IDX[:9],
    "cut in the pixels": IDX[:-1],
    "too long": IDX + b"0",
    "of other numbers": b"\0\0\x0d" + IDX[3:],
    "of rank 0": bytes([0, 0, 8, 0]) + IDX[4:],
    "text": b"<html>404 Not Found</html>",
    "too large a header": bytes([0, 0, 8, 4]) + struct.pack(">4I", *[2**16] * 4),
}


@pytest.mark.parametrize("fault", IDX_FAULTS)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_damaged_idx_files_are_named(tmp_path: Path, fault: str, ending: str) -> None:
    write_idx(tmp_path, GOOD, ending=ending)
    path = tmp_path / f"train-images-idx3-ubyte{ending}"
    path.write_bytes(gzip.compress(IDX_FAULTS[fault]) if ending else IDX_FAULTS[fault])
    assert str(path) in refusal(lambda: load_images("mnist", str(tmp_path)))


def test_damaged_gzip_files_are_named(tmp_path: Path) -> None:
    packed = gzip.compress(IDX)
    middle = len(packed) // 2
    flipped = packed[:middle] + bytes(255 - byte for byte in packed[middle : middle + 40]) + packed[middle + 40 :]
    no_deflate = packed[:10] + b"\xff" * 50
    path = tmp_path / "images.gz"
    for content in (IDX, packed[: len(packed) // 2], packed[:5], packed[:-4], flipped, no_deflate):
        path.write_bytes(content)
        assert str(path) in refusal(lambda: read_idx(path))


def test_labels_in_the_place_of_images_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path, {**GOOD, "train_x": GOOD["train_y"]})
    assert "square" in refusal(lambda: load_images("mnist", str(tmp_path)))
    write_idx(tmp_path, {**GOOD, "train_y": GOOD["train_x"]})
    assert "one label for each image" in refusal(lambda: load_images("mnist", str(tmp_path)))


def test_faults_of_class_folders_are_named(tmp_path: Path) -> None:
    content = arrays(12, 6, (8, 8))
    for fault in ("other classes", "no test", "size", "mode", "damaged", "cut", "empty class", "no images"):
        root = tmp_path / fault
        write_folders(root, content)
        odd = root / "train" / "b" / "odd.png"
        if fault == "other classes":
            (root / "test" / "c").rename(root / "test" / "d")
            part = "different class folders"
        elif fault == "no test":
            (root / "test").rename(root / "tested")
            part = "has no class folders"
        elif fault == "size":
            Image.new("L", (9, 9)).save(odd)
            part = str(odd)
        elif fault == "mode":
            Image.new("RGB", (8, 8)).save(odd)
            part = str(odd)
        elif fault == "damaged":
            odd.write_bytes(b"no image")
            part = str(odd)
        elif fault == "cut":
            odd.write_bytes((root / "train" / "b" / "0001.png").read_bytes()[:-40])
            part = str(odd)
        elif fault == "empty class":
            for path in (root / "train" / "b").iterdir():
                path.unlink()
            part = "none of class 1"
        else:
            for path in (root / "test").glob("*/*"):
                path.unlink()
            part = "test has 0 images"
        assert part in refusal(lambda root=root: load_images("folder", str(root))), fault


def test_test_examples_take_a_stratified_part_of_the_test_split() -> None:
    whole = load_images("digits")
    data = load_images("digits", test_examples=40)
    assert len(data.test) == 40
    assert np.abs(np.bincount(data.test.labels) - np.bincount(whole.test.labels) / 9).max() <= 1
    assert {image.tobytes() for image in data.test.images} <= {image.tobytes() for image in whole.test.images}
    assert (data.train.images == whole.train.images).all()
    assert data.checksum != whole.checksum
    for n in (0, -1, 361):
        assert f"test_examples {n}" in refusal(lambda n=n: load_images("digits", test_examples=n))


def test_a_class_that_validation_would_use_up_is_refused(tmp_path: Path) -> None:
    content = arrays(3, 3)
    assert "without training images" in refusal(lambda: load_npz(tmp_path, **content))


def test_to_tensor_normalises_stored_images() -> None:
    data = load_images("digits")
    expected = (data.test.images.transpose(0, 3, 1, 2) / 255 - data.mean[0]) / data.std[0]
    torch.testing.assert_close(data.to_tensor(data.test.images), torch.from_numpy(expected).float())


def test_batches_and_splits_out_of_range_are_refused() -> None:
    data = in_memory(4)
    for size in (0, -3):
        assert f"batch size {size}" in refusal(lambda size=size: Batches(data, size, 0, 0))
        assert f"batch size {size}" in refusal(lambda size=size: [*evaluation_batches(data, "test", size)])
    assert "train, validation, test" in refusal(lambda: [*evaluation_batches(data, "classes", 4)])


def test_batches_move_to_a_device() -> None:
    moved = Batches(in_memory(4), 2, 0, 0)(0).to("meta")
    assert (moved.x.device.type, moved.y.device.type) == ("meta", "meta")


def test_rand_augment_draws_for_each_image() -> None:
    pytest.importorskip("kornia", reason="the extra `images`")
    # A grey ramp tells the operations apart; kornia's own class would treat 64 equal images nearly alike.
    ramp = torch.linspace(0.05, 0.95, 64).reshape(1, 1, 8, 8).expand(64, 3, 8, 8)
    augmented = rand_augment(ramp, torch.Generator().manual_seed(3))
    assert len({image.numpy().tobytes() for image in augmented}) > 30
    assert not augmented.requires_grad


def test_images_read_from_any_file_make_batches_without_a_warning(tmp_path: Path) -> None:
    write_idx(tmp_path, arrays())
    data = load_images("mnist", str(tmp_path))
    for split in SPLITS:
        assert sum(len(batch.y) for batch in evaluation_batches(data, split, 16)) == len(getattr(data, split))


def grey_jpegs() -> tuple[dict[str, Any], dict[str, Any]]:
    return jpeg_arrays(arrays(shape=(8, 8)))


@pytest.mark.parametrize("name", ["mnist.npz", "mnist_full_jpeg.npz"])
def test_jpeg_arrays_are_known_by_their_keys(tmp_path: Path, cache: Path, name: str) -> None:
    stored, decoded = grey_jpegs()
    np.savez(tmp_path / name, **stored)
    data = load_images("mnist", str(tmp_path))
    assert data.channels == 1
    assert_holds(data, decoded)


@pytest.mark.parametrize("fault", ["cut", "longer", "float", "not from 0", "none"])
def test_offsets_that_do_not_span_the_bytes_are_refused(tmp_path: Path, cache: Path, fault: str) -> None:
    stored, _ = grey_jpegs()
    jpeg, offsets = stored["test_jpeg"], stored["test_offsets"]
    stored["test_jpeg"], stored["test_offsets"] = {
        "cut": (jpeg[:-1], offsets),
        "longer": (np.append(jpeg, jpeg[:1]), offsets),
        "float": (jpeg, offsets.astype(float)),
        "not from 0": (jpeg, offsets[1:]),
        "none": (jpeg[:0], offsets[:1]),
    }[fault]
    np.savez(tmp_path / "mnist.npz", **stored)
    assert "offsets" in refusal(lambda: load_images("mnist", str(tmp_path)))


def test_a_damaged_or_unwritable_cache_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = grey_jpegs()
    np.savez(tmp_path / "mnist.npz", **stored)
    load_images("mnist", str(tmp_path))
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes()[:-30])
    text = refusal(lambda: load_images("mnist", str(tmp_path)))
    assert str(kept) in text
    assert "remove it" in text
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIFFUSIONBLOCKS_CACHE", str(tmp_path / "file" / "below"))
    assert "DIFFUSIONBLOCKS_CACHE" in refusal(lambda: load_images("mnist", str(tmp_path)))


def test_a_draft_that_fails_leaves_nothing_behind(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, **_: Any) -> None:
        path.write_bytes(b"half a file")
        raise OSError("no space left")

    stored, _ = grey_jpegs()
    np.savez(tmp_path / "mnist.npz", **stored)
    monkeypatch.setattr(np, "savez", full)
    assert "can't be written" in refusal(lambda: load_images("mnist", str(tmp_path)))
    assert not [*cache.iterdir()]


def test_pixels_wider_than_a_byte_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = arrays(12, 6, (8, 8))
    write_folders(tmp_path, content)
    odd = tmp_path / "train" / "b" / "odd.png"
    wide = Image.fromarray(np.full((8, 8), 40000, np.uint16))
    wide.save(odd)
    assert str(odd) in refusal(lambda: load_images("folder", str(tmp_path)))
    found = hugging_face(content)
    found["train"]["img"][3] = wide
    fake_datasets(monkeypatch, found)
    assert "train image 3" in refusal(load_hf)


def test_palettes_are_read_as_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = arrays(12, 6, (8, 8, 3))
    palettes = {
        name: [Image.fromarray(image).quantize(16) for image in content[name]] for name in ("train_x", "test_x")
    }
    expected = {name: np.stack([np.asarray(p.convert("RGB")) for p in images]) for name, images in palettes.items()}
    found = hugging_face(content)
    found["train"]["img"], found["test"]["img"] = palettes["train_x"], palettes["test_x"]
    fake_datasets(monkeypatch, found)
    assert_holds(load_images("hf:someone/pictures"), {**content, **expected})


def test_hidden_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    content = arrays(12, 6, (8, 8))
    write_folders(tmp_path, content)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "b" / "._0001.png").write_bytes(b"a file manager's")
    assert len(load_images("folder", str(tmp_path)).test) == 6


def test_a_missing_test_folder_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path, arrays(12, 6, (8, 8)))
    (tmp_path / "test").rename(tmp_path / "tested")
    text = refusal(lambda: load_images("folder", str(tmp_path)))
    assert f"{tmp_path / 'test'} isn't there" in text


# -- real data ----------------------------------------------------------------------------------------------------

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def histogram(*splits: Split) -> list[int]:
    return sum(np.bincount(split.labels, minlength=10) for split in splits).tolist()


def test_mnist_loads(shared_data: Path) -> None:
    data = load_images("mnist", str(shared_data / "images"))
    assert [len(getattr(data, split)) for split in SPLITS] == [54000, 6000, 10000]
    assert histogram(data.train, data.validation) == MNIST_TRAIN
    assert histogram(data.test) == MNIST_TEST
    assert np.abs(np.array(histogram(data.validation)) - np.array(MNIST_TRAIN) / 10).max() <= 1
    assert (data.image_size, data.channels, data.classes) == (28, 1, 10)
    # Published figures of MNIST's training images; a tenth of them is set aside here.
    assert (data.mean[0], data.std[0]) == pytest.approx((0.1307, 0.3081), abs=5e-4)


def test_the_first_cifar10_images_load(shared_data: Path, tmp_path: Path, cache: Path) -> None:
    with np.load(shared_data / "images" / "cifar10_full_jpeg.npz", allow_pickle=False) as file:
        for split in ("train", "test"):
            assert np.bincount(file[f"{split}_y"]).tolist() == [len(file[f"{split}_y"]) // 10] * 10
            assert len(file[f"{split}_offsets"]) == len(file[f"{split}_y"]) + 1
        offsets, jpeg = file["test_offsets"][:401], file["test_jpeg"]
        part = {"jpeg": jpeg[: offsets[-1]], "offsets": offsets, "y": file["test_y"][:400]}
    stored = {f"{split}_{name}": values for split in ("train", "test") for name, values in part.items()}
    np.savez(tmp_path / "cifar10_full_jpeg.npz", **stored)
    data = load_images("cifar10", str(tmp_path))
    assert [len(getattr(data, split)) for split in SPLITS] == [360, 40, 400]
    assert (data.image_size, data.channels, data.classes) == (32, 3, 10)
    assert data.mean == pytest.approx((0.49, 0.48, 0.45), abs=0.03)  # 0.491, 0.482, 0.447 over all images


@pytest.mark.slow
def test_cifar10_loads(shared_data: Path, cache: Path) -> None:
    data = load_images("cifar10", str(shared_data / "images"))
    assert [len(getattr(data, split)) for split in SPLITS] == [45000, 5000, 10000]
    assert histogram(data.train) == [4500] * 10
    assert histogram(data.validation) == [500] * 10
    assert histogram(data.test) == [1000] * 10
    assert (data.image_size, data.channels) == (32, 3)
    assert data.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=2e-3)
    assert data.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=3e-3)


def test_fashion_mnist_from_debian_loads() -> None:
    if not data_module.DEBIAN_FASHION_MNIST.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist isn't installed")
    data = load_images("fashion-mnist")
    assert histogram(data.train) == [5400] * 10
    assert histogram(data.validation) == [600] * 10
    assert histogram(data.test) == [1000] * 10
