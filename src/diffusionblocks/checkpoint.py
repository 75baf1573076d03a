"""Checkpoints: a folder with a manifest and, for each part trained alone, one safetensors file.

    manifest.json                  the recipe, the noise map, who owns which parameters, data checksum, versions
    block-0.safetensors            a finished part: weights alone (the same bytes however the others were trained)
    block-0.json                   its checksum and the figures of its training
    states/block-0.safetensors     where its training stands: weights, optimizer states, EMA, update, and a checksum
    states/block-0.previous...     the state before that, should the last one be damaged
    states/block-0.lock            held by the process that trains the part
    logs/                          loss curves

The manifest never changes once it is written, and no two parts write one file; so several processes may train
different blocks into one folder. Every write is atomic: a killed run leaves the old file or the new one. `states` may
be deleted once all parts are finished; until then it can mend a damaged file.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusionblocks.errors import InputError
from diffusionblocks.files import SavedTensors, hold, sha256, writing
from diffusionblocks.files import read_json as read_json
from diffusionblocks.files import write_atomic as write_atomic
from diffusionblocks.files import write_json as write_json
from diffusionblocks.files import write_text as write_text
from diffusionblocks.tensors import copy_into, kind_of, targets_of
from diffusionblocks.tensors import load_own_tensors as load_own_tensors
from diffusionblocks.tensors import own_tensors as own_tensors
from diffusionblocks.tensors import restore_training_state as restore_training_state
from diffusionblocks.tensors import training_state as training_state

FORMAT = 1
# Fields of a manifest that are kept for the reader: where it was trained, and the walk it was meant for.
REMARKS = {"environment", "inference"}
START_SECONDS = 60.0  # to wait for another process that writes the manifest: many times what it takes


@dataclass
class State:
    """Where an unfinished training stands: tensors by name, and the figures that go with them."""

    update: int
    tensors: Mapping[str, Tensor]
    figures: dict[str, Any]


class _Unusable(Exception):
    """A file that is no whole state of its part; the text says why."""


def _read_state(path: Path, part: str) -> State:
    """A saved state, after every byte of it went through its checksum. Its tensors stay in the file until asked for."""
    try:
        tensors = SavedTensors(path)
        digest, text = _split_header(tensors)
        whole = digest == _digest(tensors, text)
    except (InputError, SafetensorError, OSError, ValueError) as error:
        raise _Unusable("is damaged (no readable header)") from error
    if not whole:
        raise _Unusable("is damaged (its checksum doesn't fit)")
    facts = json.loads(text)
    if facts["part"] != part:
        raise _Unusable(f"is a state of {facts['part']}, not of {part}")
    return State(facts["update"], tensors, facts["figures"])


def _split_header(tensors: SavedTensors) -> tuple[str, str]:
    """A state's checksum and the JSON text of its facts: one field, for safetensors writes several in any order."""
    digest, space, text = tensors.header.get("state", "").partition(" ")
    if not space:
        raise ValueError("no state")
    return digest, text


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """SHA-256 of all that a state holds, one tensor at a time."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().reshape(-1)
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _claimed_update(path: Path, part: str) -> int | None:
    """The update that a state's header tells, unchecked: for sentences."""
    try:
        facts = json.loads(_split_header(SavedTensors(path))[1])
        return int(facts["update"]) if facts["part"] == part else None
    except (InputError, ValueError, TypeError, KeyError):
        return None


class RunFolder:
    """One folder of one recipe.

    Args:
        manifest: what the folder must hold. Written if the folder is new; else every field of it must agree, and the
            `InputError` names the first that doesn't, but for `REMARKS`.
    """

    def __init__(self, path: Path | str, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = Path(path), manifest
        self._damaged: set[str] = set()
        file = self.path / "manifest.json"
        with writing(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise InputError(f"output folder {path} is a file: choose a folder") from error
            # Listed before the manifest is looked for: another process may be writing it. Drafts are a killed run's.
            foreign = [entry for entry in self.path.iterdir() if entry.suffix != ".tmp" and entry.name != "states"]
        if not file.exists():
            if foreign:
                raise InputError(f"output folder {path} holds other things than a run: choose a new or an empty folder")
            busy = f"another process{{}} is starting a run in {path}: wait for it, or choose another folder"
            with hold(self._states() / "manifest.lock", START_SECONDS, busy):
                if not file.exists():
                    write_json(file, manifest)
        check_same(manifest, read_json(file), str(self.path))

    def weights_file(self, part: str) -> Path:
        return self.path / f"{part}.safetensors"

    def state_file(self, part: str) -> Path:
        return self.path / "states" / f"{part}.safetensors"

    def previous_state_file(self, part: str) -> Path:
        return self.path / "states" / f"{part}.previous.safetensors"

    def _states(self, kept: Callable[[], str] = str) -> Path:
        """The folder of what a training needs and a trained network doesn't."""
        path = self.path / "states"
        with writing(path, kept):
            path.mkdir(exist_ok=True)
        return path

    @contextmanager
    def lock(self, part: str) -> Iterator[None]:
        """Keeps other processes from training a part meanwhile; may be entered again by the same thread.

        What killed runs left of drafts is deleted.

        Raises:
            InputError: another process trains it.
        """
        busy = f"another process{{}} is training {part} in {self.path}: wait for it, or choose another folder"
        with hold(self._states() / f"{part}.lock", 0.0, busy):
            for draft in (*self.path.glob(f".{part}.*.tmp"), *self.path.glob(f"states/.{part}.*.tmp")):
                _discard(draft)
            yield

    def finished(self, part: str) -> dict[str, Any] | None:
        """The figures of a part's training, or None while it isn't finished."""
        sidecar = self.path / f"{part}.json"
        if not (sidecar.exists() and self.weights_file(part).exists()):
            return None
        try:
            facts = read_json(sidecar)
        except InputError as error:
            raise InputError(
                f"{sidecar} isn't readable as JSON: restore it, or delete it and {_again(part)}"
            ) from error
        if not isinstance(facts, dict):
            raise InputError(f"{sidecar} holds no figures: restore it, or delete it and {_again(part)}")
        return facts

    def intact(self, part: str) -> bool:
        """Whether a part is finished and its file is still the one that was written for it."""
        facts = self.finished(part)
        try:
            return (
                facts is not None
                and facts.get("part") == part
                and facts.get("sha256") == sha256(self.weights_file(part))
            )
        except OSError:
            return False

    def save_state(self, part: str, state: State) -> None:
        """Saves where a part's training stands; the state before becomes the previous one.

        Raises:
            InputError: it can't be written. What was saved before stays.
        """
        path = self.state_file(part)
        text = json.dumps({"part": part, "update": state.update, "figures": state.figures})
        tensors = {name: tensor.cpu() for name, tensor in state.tensors.items()}
        header = {"state": f"{_digest(tensors, text)} {text}"}
        self._states(lambda: self._kept(part))
        # A damaged file may not take the place of the whole one.
        former = None if part in self._damaged else self.previous_state_file(part)
        write_atomic(path, lambda draft: save_file(tensors, draft, header), lambda: self._kept(part), former)
        self._damaged.discard(part)

    def _kept(self, part: str) -> str:
        for path in (self.state_file(part), self.previous_state_file(part)):
            if (update := _claimed_update(path, part)) is not None:
                return f"the state of update {update} stays"
        return f"nothing of {part} was saved before"

    def load_state(self, part: str) -> State | None:
        """The last whole state saved for a part, or None; warns where a newer one is damaged.

        The tensors are read from the file when they are asked for.

        Raises:
            InputError: there are states, but none is whole.
        """
        newest, previous = self.state_file(part), self.previous_state_file(part)
        unusable = []
        # The newest alone is missing where a run was killed between two moves.
        for path in filter(Path.exists, (newest, previous)):
            try:
                state = _read_state(path, part)
            except _Unusable as reason:
                unusable.append(f"{path} {reason}")
                continue
            if unusable:
                self._damaged.add(part)
                lost = (_claimed_update(newest, part) or 0) - state.update
                tail = f", and at most {lost} later updates are lost" if lost > 0 else ""
                warnings.warn(f"{unusable[0]}: update {state.update} of states/{path.name} is used{tail}", stacklevel=2)
            return state
        if unusable:
            them = "them" if len(unusable) > 1 else "it"
            raise InputError(f"{' and '.join(unusable)}: delete {them} to train {part} from the start, or restore it")
        return None

    def finish(self, part: str, tensors: dict[str, Tensor], figures: dict[str, Any]) -> None:
        """Writes a part's weights, then its figures and checksum, then drops its previous state.

        A kill in between is safe. The last state stays: from it damaged weights can be written again.

        Raises:
            InputError: they can't be written. The last state stays.
        """
        path = self.weights_file(part)
        # One header field: safetensors writes several in a random order, and the bytes must not differ.
        write_atomic(path, lambda draft: save_file(tensors, draft, {"part": part}), lambda: self._kept(part))
        facts = {"part": part, "sha256": sha256(path), "bytes": path.stat().st_size, **figures}
        write_json(self.path / f"{part}.json", facts, lambda: self._kept(part))
        with writing(self.previous_state_file(part)):
            self.previous_state_file(part).unlink(missing_ok=True)

    def load(self, part: str, module: nn.Module) -> None:
        """Loads a finished part strictly into `module`, one tensor at a time.

        Raises:
            InputError: not trained yet, file missing, truncated, changed since it was written, or of another part.
        """
        tensors, targets = self.verified(part), targets_of(module)
        for name in sorted({*tensors, *targets}):
            there = kind_of(tensors[name]) if name in tensors else "missing"
            here = kind_of(targets[name]) if name in targets else "unknown"
            if there != here:
                raise InputError(
                    f"{self.weights_file(part)} belongs to another network: '{name}' is {there} there and {here} here; "
                    "use the recipe it was trained with"
                )
        load_own_tensors(module, tensors)

    def verified(self, part: str) -> SavedTensors:
        """A finished part's tensors, after its checksum and its name were compared with what was written down."""
        path = self.weights_file(part)
        if self.finished(part) is None:
            raise InputError(f"{path} is missing or unfinished: train {part} first, or merge the folder that has it")
        if not self.intact(part):
            mend = _again(part) if self.state_file(part).exists() else f"train {part} again"
            raise InputError(f"{path} isn't the file that was written for {part}: restore it, or {mend}")
        return SavedTensors(path)


def _again(part: str) -> str:
    return f"run `train` again, which writes {part} from its last saved state"


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
        with writing(target):
            shutil.copytree(source, target, dirs_exist_ok=True)


def _refuse_shared_names(parts: Mapping[str, Iterable[str]]) -> None:
    owners: dict[str, str] = {}
    for part, names in parts.items():
        for name in names:
            if name in owners:
                raise InputError(f"parameter '{name}' is owned by {owners[name]} and by {part}: they can't be merged")
            owners[name] = part


# Slices of a larger checkpoint


def load_slices(
    path: Path | str, module: nn.Module, names: Callable[[str], str] = str, strict: bool = True
) -> list[str]:
    """Fills a module from a larger checkpoint and reads nothing else of it: a block starts from a trained network.

    Numbers are converted to the module's precision.

    Args:
        path: a safetensors file, a folder in Hugging Face's layout (in one piece or in shards), or a run's folder.
        names: from a name in the module to that in the checkpoint.
        strict: False leaves what the checkpoint lacks as it is.

    Returns:
        The module's names that the checkpoint lacks.

    Raises:
        InputError: no checkpoint, a damaged one, a tensor that is missing (the first is named) or of another shape or
            kind. The module is as before.
    """
    pieces, read = _pieces(Path(path))
    targets = targets_of(module)
    lacking = [name for name in targets if names(name) not in pieces]
    if lacking and strict:
        raise InputError(
            f"{path} has no tensor '{names(lacking[0])}', one of {len(lacking)} that are missing: give another "
            "checkpoint or other names, or allow missing tensors"
        )
    found = {name: names(name) for name in targets if name not in lacking}
    opened = {piece: read(piece) for piece in sorted({pieces[theirs] for theirs in found.values()})}
    sources = {}
    for name, theirs in found.items():
        piece = pieces[theirs]
        if theirs not in opened[piece]:
            raise InputError(f"{path} says that '{theirs}' is in {piece}, where it isn't: restore the checkpoint")
        source = sources[name] = opened[piece][theirs]
        if source.shape != targets[name].shape or source.is_floating_point() != targets[name].is_floating_point():
            raise InputError(
                f"'{theirs}' is {kind_of(source)} in {path} and {kind_of(targets[name])} here: use a network of the "
                "same shape"
            )
    copy_into({name: targets[name] for name in found}, sources)
    return lacking


def checkpoint_checksum(path: Path | str) -> str:
    """One sha256 over all files of a checkpoint that `load_slices` can read, whatever folder it lies in.

    Raises:
        InputError: no checkpoint there, or a damaged one.
    """
    pieces, read = _pieces(Path(path))
    lines = [f"{piece} {sha256(read(piece).path)}" for piece in sorted(set(pieces.values()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _pieces(path: Path) -> tuple[dict[str, str], Callable[[str], SavedTensors]]:
    """In which piece of a checkpoint each tensor is, and how to open a piece."""
    if (path / "manifest.json").exists():
        manifest = read_json(path / "manifest.json")
        return manifest.get("owners", {}), RunFolder(path, manifest).verified
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map", {})
        if any(Path(shard).name != shard for shard in shards.values()):
            raise InputError(f"{index} names files outside its folder: restore the checkpoint")
        return shards, lambda shard: SavedTensors(path / shard)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        raise InputError(f"{path} holds no checkpoint: give a safetensors file, or a folder with one or with a run")
    tensors = SavedTensors(file)
    return dict.fromkeys(tensors, file.name), lambda _: tensors
