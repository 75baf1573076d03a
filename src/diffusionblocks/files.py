"""Files that survive what happens to them: atomic writes, one sentence for a full disk, locks that die with their
holder, and safetensors files that are read one tensor at a time.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusionblocks.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# Writing


@contextmanager
def writing(path: Path, kept: Callable[[], str] = str) -> Iterator[None]:
    """Turns the errors of a full, read-only or vanished disk into an `InputError` about `path`.

    Args:
        kept: tells what is still there, e.g. "the state of update 40 stays"; asked when it is needed.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _error_number(error)
        if number is None:
            raise
        stays = "; " + kept() if kept() else ""
        mend = "make room there" if number in FULL else "make its folder writable"
        raise InputError(
            f"{path} can't be written ({os.strerror(number)}){stays}: {mend} or choose another folder, then run the "
            "same command again"
        ) from error


def _error_number(error: Exception) -> int | None:
    """The system's number of an error; safetensors (older and newer releases) and shutil tell it in their text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"(?:os error |code: |Errno )(\d+)", str(error))
    return int(found[1]) if found else None


def write_atomic(
    path: Path, write: Callable[[Path], object], kept: Callable[[], str] = str, former: Path | None = None
) -> None:
    """Lets `write` fill a draft beside `path`, flushes it to the disk and moves it into place.

    Args:
        kept: as in `writing`.
        former: where the file goes that stood at `path`.

    Raises:
        InputError: the disk is full, read-only or gone. The old file stays.
    """
    # A folder, for safetensors keeps a draft of its own beside what it writes.
    drafts = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft = drafts / path.name
    try:
        with writing(path, kept):
            drafts.mkdir(exist_ok=True)
            write(draft)
            # safetensors makes files that nobody else may read.
            draft.chmod(drafts.stat().st_mode & 0o666)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())
            if former is not None and path.exists():
                os.replace(path, former)
            os.replace(draft, path)
            _flush_folder(path.parent)
    finally:
        shutil.rmtree(drafts, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    if os.name == "nt":  # folders can't be opened there
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network file systems have no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(number)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Any, kept: Callable[[], str] = str) -> None:
    text = json.dumps(content, indent=1) + "\n"
    write_atomic(path, lambda draft: draft.write_text(text, encoding="utf-8"), kept)


@contextmanager
def hold(path: Path, seconds: float, busy: str) -> Iterator[None]:
    """Holds a lock file; the system lets go of it when the process dies, however that happens.

    Raises:
        InputError: it can't be had within that many seconds; `busy` is the sentence, with a place for the holder.
    """
    lock = FileLock(path.resolve(), timeout=seconds, is_singleton=True)
    with writing(path):
        holder = ""
        with suppress(OSError, ValueError):
            holder = f" ({int(path.read_text())})"
        try:
            lock.acquire()
        except Timeout:
            raise InputError(busy.format(holder)) from None
    try:
        with suppress(OSError):  # for the sentence above only
            path.write_text(str(os.getpid()))
        yield
    finally:
        lock.release()


# Reading


def read_json(path: Path) -> Any:
    """The content of a JSON file; `InputError` where it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: give a folder that `diffusionblocks train` or `merge` wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} isn't readable as JSON ({error}): restore it or train into a new folder") from error
    except OSError as error:
        raise InputError(f"{path} can't be read ({error.strerror}): make it readable") from error


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file by name, each read when its values are; a view of the file, not to be changed.

    Raises:
        InputError: the file is missing or damaged. Only the header is looked at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({error}): restore it or write it again") from error
        self._names = dict.fromkeys(self._file.keys())
        self.header: dict[str, str] = self._file.metadata() or {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
