"""Checkpoints: a folder with a manifest and, for each part trained alone, one safetensors file.

    manifest.json                the recipe, the noise map, who owns which parameters, data checksum, versions
    block-0.safetensors          a finished part: weights alone (the same bytes however the other blocks were trained)
    block-0.json                 its checksum and the figures of its training
    block-0.state.safetensors    an unfinished part: weights, optimizer states, EMA, and the update they belong to
    logs/                        loss curves

The manifest never changes once it is written, and no two parts write one file; so several processes may train
different blocks into one folder. Every write is atomic: a killed run leaves the old file or the new one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusionblocks.errors import InputError

FORMAT = 1
# Fields of a manifest that are kept for the reader: where it was trained, and the walk it was meant for.
REMARKS = {"environment", "inference"}


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, flushes it to the disk and moves it into place."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(draft)
        with open(draft, "rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; `InputError` where it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: give a folder that `diffusionblocks train` or `merge` wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} isn't readable as JSON ({error}): restore it or train into a new folder") from error


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


@dataclass
class State:
    """Where an unfinished training stands: tensors by name, and the figures that go with them."""

    update: int
    tensors: dict[str, Tensor]
    figures: dict[str, Any]


class RunFolder:
    """One folder of one recipe.

    Args:
        manifest: what the folder must hold. Written if the folder is new; else every field of it must agree, and the
            `InputError` names the first that doesn't, but for `REMARKS`.
    """

    def __init__(self, path: Path | str, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = Path(path), manifest
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InputError(f"output folder {path} is a file: choose a folder") from error
        # Listed before the manifest is looked for: another process may be writing it. Drafts are a killed run's.
        foreign = [entry for entry in self.path.iterdir() if entry.suffix != ".tmp"]
        if (self.path / "manifest.json").exists():
            check_same(manifest, read_json(self.path / "manifest.json"), str(self.path))
        elif foreign:
            raise InputError(f"output folder {path} holds other things than a run: choose a new or an empty folder")
        else:
            write_json(self.path / "manifest.json", manifest)

    def weights_file(self, part: str) -> Path:
        return self.path / f"{part}.safetensors"

    def state_file(self, part: str) -> Path:
        return self.path / f"{part}.state.safetensors"

    def finished(self, part: str) -> dict[str, Any] | None:
        """The figures of a part's training, or None while it isn't finished."""
        sidecar = self.path / f"{part}.json"
        return read_json(sidecar) if sidecar.exists() and self.weights_file(part).exists() else None

    def save_state(self, part: str, state: State) -> None:
        header = {"part": part, "update": str(state.update), "figures": json.dumps(state.figures)}
        write_atomic(self.state_file(part), lambda draft: save_file(state.tensors, draft, header))

    def load_state(self, part: str) -> State | None:
        """The last state saved for a part, or None."""
        path = self.state_file(part)
        for draft in self.path.glob(f".{part}.*.tmp"):  # of a killed run
            draft.unlink(missing_ok=True)
        if not path.exists():
            return None
        tensors, header = read_tensors(path)
        if header.get("part") != part:
            raise InputError(f"{path} isn't a saved state of {part}: delete it to train {part} again, or restore it")
        return State(int(header["update"]), tensors, json.loads(header["figures"]))

    def finish(self, part: str, tensors: dict[str, Tensor], figures: dict[str, Any]) -> None:
        """Writes a part's weights, then its figures and checksum, then drops its state: a kill in between is safe."""
        path = self.weights_file(part)
        # One header field: safetensors writes several in a random order, and the bytes must not differ.
        write_atomic(path, lambda draft: save_file(tensors, draft, {"part": part}))
        facts = {"part": part, "sha256": sha256(path), "bytes": path.stat().st_size, **figures}
        write_json(self.path / f"{part}.json", facts)
        self.state_file(part).unlink(missing_ok=True)

    def load(self, part: str, module: nn.Module) -> None:
        """Loads a finished part strictly into `module`.

        Raises:
            InputError: not trained yet, file missing, truncated, changed since it was written, or of another part.
        """
        tensors = self.verified(part)
        expected = {name: tuple(tensor.shape) for name, tensor in own_tensors(module).items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if expected != found:
            name = min(set(expected.items()) ^ set(found.items()))[0]
            raise InputError(
                f"{self.weights_file(part)} belongs to another network: '{name}' is {found.get(name, 'missing')} "
                f"there and {expected.get(name, 'unknown')} here; use the recipe it was trained with"
            )
        load_own_tensors(module, tensors)

    def verified(self, part: str) -> dict[str, Tensor]:
        """A finished part's tensors, after its checksum and its name were compared with what was written down."""
        path, facts = self.weights_file(part), self.finished(part)
        if facts is None:
            raise InputError(f"{path} is missing or unfinished: train {part} first, or merge the folder that has it")
        if facts.get("part") != part or sha256(path) != facts.get("sha256"):
            raise InputError(f"{path} isn't the file that was written for {part}: restore it or train {part} again")
        return read_tensors(path)[0]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file and its header's text fields."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - can't be iterated
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): delete it to train this part again, or restore it") from error


def check_same(expected: Any, found: Any, where: str, field: str = "") -> None:
    """Compares manifests field by field; the `InputError` names the first field that differs."""
    if isinstance(expected, dict) and isinstance(found, dict):
        # The recipe first: what else differs follows from it.
        for name in sorted(
            {*expected, *found} - (set() if field else REMARKS), key=lambda name: (name != "recipe", name)
        ):
            check_same(expected.get(name), found.get(name), where, f"{field}.{name}" if field else name)
    elif json.loads(json.dumps(expected)) != found:
        raise InputError(
            f"{where} was made with {field} = {_short(found)}, not {_short(expected)}: "
            "use the same settings, or choose another folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def merge(sources: Sequence[Path | str], target: Path | str, parts: Sequence[str]) -> RunFolder:
    """Joins parts trained in several folders into `target`; every part is verified and copied once.

    Raises:
        InputError: folders of different recipes, seeds or data (the field is named), a part in two folders with
            different bytes, or a part that no folder has.
    """
    manifests = [read_json(Path(source) / "manifest.json") for source in sources]
    for source, manifest in zip(sources[1:], manifests[1:], strict=True):
        check_same(manifests[0], manifest, str(source))
    folders = [RunFolder(source, manifest) for source, manifest in zip(sources, manifests, strict=True)]
    merged = RunFolder(target, manifests[0])
    for part in parts:
        holders = [folder for folder in folders if folder.finished(part)]
        if not holders:
            raise InputError(f"none of the folders has {part} finished: train it, then merge again")
        checksums = {sha256(holder.weights_file(part)) for holder in holders}
        if len(checksums) > 1:
            raise InputError(f"{part} differs between {' and '.join(str(h.path) for h in holders)}: leave one out")
        holders[0].verified(part)
        for name in (f"{part}.safetensors", f"{part}.json"):
            source_file = holders[0].path / name
            write_atomic(merged.path / name, partial(_copy, source_file))
        _copy_logs(holders[0].path / "logs" / part, merged.path / "logs" / part)
    merged_parts = {part: merged.verified(part) for part in parts}
    _refuse_shared_names(merged_parts)
    return merged


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _copy_logs(source: Path, target: Path) -> None:
    if source.exists() and source.resolve() != target.resolve():
        shutil.copytree(source, target, dirs_exist_ok=True)


def _refuse_shared_names(parts: dict[str, dict[str, Tensor]]) -> None:
    owners: dict[str, str] = {}
    for part, tensors in parts.items():
        for name in tensors:
            if name in owners:
                raise InputError(f"parameter '{name}' is owned by {owners[name]} and by {part}: they can't be merged")
            owners[name] = part


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with each tensor once: a joint shell, which every block reaches, under its first name."""
    names: dict[Tensor, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor.detach().contiguous() for tensor, name in names.items()}


def load_own_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `own_tensors`, as strict as `load_state_dict`."""
    if tensors.keys() != own_tensors(module).keys():
        raise ValueError("the names of the tensors aren't those of the module")
    module.load_state_dict(tensors, strict=False)


def training_state(module: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None) -> dict[str, Tensor]:
    """Weights, optimizer states and EMA as one flat table of tensors."""
    tensors = {f"module/{name}": tensor for name, tensor in own_tensors(module).items()}
    for index, states in optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer/{index}/{key}": value for key, value in states.items()})
    if average is not None:
        tensors.update({f"average/{name}": tensor for name, tensor in own_tensors(average).items()})
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def restore_training_state(
    tensors: dict[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer, average: nn.Module | None
) -> None:
    """The inverse of `training_state`."""
    load_own_tensors(module, _under("module/", tensors))
    if average is not None:
        load_own_tensors(average, _under("average/", tensors))
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in _under("optimizer/", tensors).items():
        index, key = name.split("/")
        states.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
