"""Runs that are killed at any moment, on disks that are full, read-only or damaged, and beside other processes: they
say so in one sentence, and go on to the same bytes as without.
"""

import errno
import gc
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusionblocks
from diffusionblocks import checkpoint, files
from diffusionblocks.checkpoint import RunFolder, State
from diffusionblocks.compare import METHODS, compare, method_run
from diffusionblocks.config import DataSettings, Recipe
from diffusionblocks.errors import InputError
from diffusionblocks.families.vit import ViT, ViTSettings
from diffusionblocks.files import read_json, write_atomic, write_json
from diffusionblocks.report import loss_curve
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import TrainSettings

# Processes are forked from a server that has imported everything once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["diffusionblocks.compare", "diffusionblocks.baselines.shallow_ensemble", "pytest"])
RECIPE = Recipe(
    name="faults",
    blocks=2,
    network=ViTSettings(layers=4, width=16, heads=2, mlp=32, patch=4, condition_width=4),
    data=DataSettings(train_examples=100),
    training=TrainSettings(updates=16, batch_size=16, warmup=3, checkpoint_every=4, ema=0.9),
)


def finished(out: Path) -> dict[str, bytes]:
    """The weights of every part of every method."""
    paths = [path for path in sorted(out.rglob("*.safetensors")) if path.parent.name != "states"]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def parts_of(recipe: Recipe, methods: Sequence[str]) -> list[str]:
    runs = {method: method_run(recipe, method) for method in methods}
    return sorted(f"{method}/{job.part}.safetensors" for method, run in runs.items() for job in run.jobs())


# Killed for good


def comparing(out: Path, pipe: Connection) -> None:
    """In a process of its own: the comparison; tells of each update, and at the end whether Python's draws stood."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the memory meter has less to look through
    before = random.getstate()
    compare(RECIPE, METHODS, out, lambda job: run_job(job, lambda part, update, loss: pipe.send((part, update))))
    # Told here: under test, beartype draws from Python's generator itself.
    pipe.send(("undisturbed", random.getstate() == before))


def half_writing(path: Path) -> None:
    """In a process of its own: dies in the middle of a write."""

    def die(draft: Path) -> None:
        draft.write_text("ne")
        os.kill(os.getpid(), signal.SIGKILL)

    write_atomic(path, die)


def compare_in_process(out: Path, kill_after: int | None, pause: float = 0) -> tuple[int | None, list[tuple[str, int]]]:
    """Runs the comparison, kills it after that many updates and a pause; returns its exit code and what it told."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=comparing, args=(out, sender))
    process.start()
    sender.close()
    told = []
    try:
        while kill_after is None or len(told) < kill_after:
            told.append(receiver.recv())
        time.sleep(pause)
        process.kill()
    except EOFError:  # it ended
        pass
    process.join()
    return process.exitcode, told


def test_killed_three_times_a_comparison_ends_with_the_same_bytes(tmp_path: Path) -> None:
    code, told = compare_in_process(tmp_path / "undisturbed", None)
    assert code == 0
    assert told.pop() == ("undisturbed", True)
    parts = parts_of(RECIPE, METHODS)
    assert len(told) == len(parts) * 16
    moments = random.Random(20)
    done = []
    for _ in range(3):
        # Each life is killed in its first third: all three kills hit.
        code, progress = compare_in_process(
            tmp_path / "killed", moments.randrange(1, len(told) // 3), moments.uniform(0, 0.02)
        )
        assert code == -signal.SIGKILL
        done += progress
    code, progress = compare_in_process(tmp_path / "killed", None)
    assert code == 0
    # It went on where it stood: each kill cost at most the updates since the last saved state.
    lost = len(done) + len(progress) - 1 - len(told)
    # Or saved one that it couldn't tell of any more.
    assert -3 <= lost <= 3 * 4
    expected = finished(tmp_path / "undisturbed")
    assert list(expected) == parts
    assert finished(tmp_path / "killed") == expected
    for name in parts:
        method, part = Path(name).parent, Path(name).stem
        assert loss_curve(tmp_path / "killed" / method, part) == loss_curve(tmp_path / "undisturbed" / method, part)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Block 1 of the recipe, trained in peace. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("faults") / "undisturbed"
    run_job(BlockJob(RECIPE, "block-1", str(out)))
    return out


@pytest.fixture
def trained(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(undisturbed, tmp_path / "trained"))


@pytest.fixture
def begun(tmp_path: Path) -> RunFolder:
    """Block 1 up to update 8, with the state of update 4 before it."""
    run_job(BlockJob(RECIPE, "block-1", str(tmp_path / "begun"), until=8))
    return Run.of(RECIPE).folder(tmp_path / "begun")


def refused(job: BlockJob, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        run_job(job)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


SAVING = replace(RECIPE, training=replace(RECIPE.training, updates=100, checkpoint_every=1))


def training(recipe: Recipe, out: Path, pipe: Connection) -> None:
    """In a process of its own: block 1; tells of each update."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    run_job(BlockJob(recipe, "block-1", str(out)), lambda part, update, loss: pipe.send(update))


def start_training(recipe: Recipe, out: Path) -> tuple[Any, Connection]:
    """The process, in its first update, and what it tells."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=training, args=(recipe, out, sender))
    process.start()
    sender.close()
    return process, receiver


def test_killed_twenty_times_a_block_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """A state is saved after each update, so that many of the kills hit a save."""
    run_job(BlockJob(SAVING, "block-1", str(tmp_path / "undisturbed")))
    moments = random.Random(40)
    while_saving = 0
    for _ in range(20):
        process, told = start_training(SAVING, tmp_path / "killed")
        told.recv()
        time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.join()
        # It wasn't done yet: each kill hits.
        assert process.exitcode == -signal.SIGKILL
        while_saving += any((tmp_path / "killed").rglob(".block-1.*"))
    assert while_saving
    assert 20 <= (update_of(tmp_path / "killed") or 0) < 100
    run_job(BlockJob(SAVING, "block-1", str(tmp_path / "killed")))
    assert finished(tmp_path / "killed") == finished(tmp_path / "undisturbed")
    assert loss_curve(tmp_path / "killed", "block-1") == loss_curve(tmp_path / "undisturbed", "block-1")
    assert not list((tmp_path / "killed").rglob(".*"))


def update_of(out: Path) -> int | None:
    state = Run.of(SAVING).folder(out).load_state("block-1")
    return None if state is None else state.update


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    process = PROCESSES.Process(target=half_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert path.read_text() == "old"


@pytest.mark.slow
def test_killed_ten_times_the_digits_comparison_ends_with_the_same_bytes(tmp_path: Path) -> None:
    def command(out: str) -> list[str]:
        options = ["--methods", "blocks,end_to_end", "--updates", "60", "--checkpoint_every", "7"]
        program = [sys.executable, "-m", "diffusionblocks.cli", "compare", "vit-digits"]
        return [*program, *options, "--out", str(tmp_path / out)]

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(Path(diffusionblocks.__file__).parents[1])
    subprocess.run(command("undisturbed"), env=environment, check=True, stdout=subprocess.DEVNULL)
    moments = random.Random(10)
    for _ in range(10):
        with subprocess.Popen(command("killed"), env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()  # the settings: it begins
            time.sleep(moments.uniform(0.2, 5))
            process.kill()
    subprocess.run(command("killed"), env=environment, check=True, stdout=subprocess.DEVNULL)
    expected = finished(tmp_path / "undisturbed")
    assert list(expected) == [
        *(f"blocks/block-{number}.safetensors" for number in range(3)),
        "end_to_end/network.safetensors",
    ]
    assert finished(tmp_path / "killed") == expected


# Killed at each write


class Killed(BaseException):
    """Not an Exception: nothing may catch it."""


class Deaths:
    """Makes the n-th move of a draft into its place the last thing that a process does: the draft stays behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.dead = -1, False
        self.move, self.clear = os.replace, shutil.rmtree
        monkeypatch.setattr(files.os, "replace", self._replace)
        monkeypatch.setattr(files.shutil, "rmtree", self._clear)

    def after(self, moves: int) -> None:
        self.left, self.dead = moves, False

    def _replace(self, source: Any, target: Any) -> None:
        if self.left == 0:
            self.left, self.dead = -1, True
            raise Killed
        self.left -= 1
        self.move(source, target)

    def _clear(self, path: Path, ignore_errors: bool = False) -> None:
        if not self.dead:
            self.clear(path, ignore_errors=ignore_errors)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    gc.collect()
    gc.freeze()
    yield Deaths(monkeypatch)
    gc.unfreeze()


def test_killed_at_every_write_a_block_ends_with_the_same_bytes(tmp_path: Path, deaths: Deaths) -> None:
    recipe = replace(RECIPE, training=replace(RECIPE.training, updates=5, checkpoint_every=2))
    run_job(BlockJob(recipe, "block-1", str(tmp_path / "undisturbed")))
    expected = finished(tmp_path / "undisturbed")
    # Manifest, state at 2; at 4 and 5 the last one steps back before a new one; weights, figures.
    for moves in range(8):
        out = tmp_path / str(moves)
        deaths.after(moves)
        with pytest.raises(Killed):
            run_job(BlockJob(recipe, "block-1", str(out)))
        assert list(out.rglob(".*.tmp"))
        assert Run.of(recipe).folder(out).finished("block-1") is None
        deaths.after(-1)
        run_job(BlockJob(recipe, "block-1", str(out)))
        assert finished(out) == expected
        assert loss_curve(out, "block-1") == loss_curve(tmp_path / "undisturbed", "block-1")
        # What the dead left behind of this part is gone.
        assert not list(out.rglob(".block-1.*"))


def test_killed_again_and_again_a_block_ends_with_the_same_bytes(tmp_path: Path, deaths: Deaths) -> None:
    """Each life is two moves long, as the last one must be: weights and figures."""
    recipe = replace(RECIPE, training=replace(RECIPE.training, updates=5, checkpoint_every=1))
    run_job(BlockJob(recipe, "block-0", str(tmp_path / "undisturbed")))
    # Manifest and state 1; it steps back, and state 2 comes; and so on to state 5.
    for _ in range(5):
        deaths.after(2)
        with pytest.raises(Killed):
            run_job(BlockJob(recipe, "block-0", str(tmp_path / "killed")))
    deaths.after(2)
    assert run_job(BlockJob(recipe, "block-0", str(tmp_path / "killed"))) is not None
    assert finished(tmp_path / "killed") == finished(tmp_path / "undisturbed")
    assert loss_curve(tmp_path / "killed", "block-0") == loss_curve(tmp_path / "undisturbed", "block-0")


# Full and read-only disks


def mounted(*options: str) -> bool:
    """Whether the system let us."""
    program = shutil.which("mount")
    return program is not None and subprocess.run([program, *options], capture_output=True).returncode == 0


class Disk:
    """A folder that can become full: a small disk of its own, or where that isn't allowed, a limit on a file's size."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.reason = "No space left on device" if kind == "disk" else "File too large"

    @contextmanager
    def full(self, left: int) -> Iterator[None]:
        """Leaves room for that many bytes; for files of that many, where the limit is one on a file."""
        if self.kind == "limit":
            # Python ignores the signal that would else end the process.
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (left, limits[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        else:
            filler = self.path / "filler"
            free = os.statvfs(self.path)
            filler.write_bytes(bytes(free.f_bavail * free.f_frsize - left))
            try:
                yield
            finally:
                filler.unlink()


@pytest.fixture(params=["limit", "disk"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """The limit always runs; the disk where mounting is allowed."""
    path = tmp_path / request.param
    path.mkdir()
    if request.param == "limit":
        yield Disk(path, "limit")
        return
    if not mounted("-t", "tmpfs", "-o", "size=2m", "none", str(path)):
        pytest.skip("no disk can be mounted here; the test ran with a limit on files instead")
    yield Disk(path, "disk")
    # A failed test may still hold a file.
    subprocess.run(["umount", "--lazy", path], check=True)


def test_a_full_disk_ends_a_run_with_its_state_and_goes_on_when_there_is_room(disk: Disk, undisturbed: Path) -> None:
    out = disk.path / "run"
    job = BlockJob(RECIPE, "block-1", str(out))
    run_job(replace(job, until=4))
    state = out / "states" / "block-1.safetensors"
    before = state.read_bytes()
    # Enough for logs.
    with disk.full(len(before) // 2):
        refused(job, str(state), disk.reason, "the state of update 4 stays", "make room")
        assert not list(out.rglob(".*"))
        assert state.read_bytes() == before
        assert Run.of(RECIPE).folder(out).load_state("block-1") is not None
    run_job(job)
    assert finished(out) == finished(undisturbed)


def test_a_disk_that_is_full_at_the_end_keeps_the_last_state(disk: Disk, undisturbed: Path) -> None:
    out = Path(shutil.copytree(undisturbed, disk.path / "run"))
    job = BlockJob(RECIPE, "block-1", str(out))
    (out / "block-1.safetensors").unlink()
    (out / "block-1.json").unlink()
    with disk.full(4096):
        refused(job, "block-1.safetensors", disk.reason, "the state of update 16 stays")
        assert not list(out.rglob(".*"))
    assert Run.of(RECIPE).folder(out).finished("block-1") is None
    run_job(job)
    assert finished(out) == finished(undisturbed)


def test_a_full_disk_keeps_an_old_text(disk: Disk) -> None:
    write_json(disk.path / "file", {"old": 1})
    with disk.full(4096), pytest.raises(InputError, match=disk.reason):
        write_json(disk.path / "file", {"new": "2" * 100_000})
    assert read_json(disk.path / "file") == {"old": 1}
    assert os.listdir(disk.path) == ["file"]


@contextmanager
def read_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes a folder read-only by a mount, by its permissions, or by a stand-in for the system; tells the reason."""
    if mounted("--bind", str(path), str(path)):
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        try:
            yield "Read-only file system"
        finally:
            subprocess.run(["umount", "--lazy", path], check=True)
    elif os.geteuid() != 0:  # permissions don't bind root
        path.chmod(0o555)
        try:
            yield "Permission denied"
        finally:
            path.chmod(0o755)
    else:

        def denied(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, "not this time")

        with monkeypatch.context() as stand_in:
            stand_in.setattr(Path, "mkdir", denied)
            stand_in.setattr(os, "replace", denied)
            yield "Read-only file system"


def test_a_read_only_folder_is_refused_and_stays(
    begun: RunFolder, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BlockJob(RECIPE, "block-1", str(begun.path))
    with read_only(begun.path, monkeypatch) as reason:
        refused(job, str(begun.path), reason, "choose another folder")
        refused(replace(job, folder=f"{begun.path}/new"), reason)
        with pytest.raises(InputError, match=rf"\({reason}\); the state of update 8 stays"):
            begun.save_state("block-1", State(9, {"a": torch.zeros(3)}, {}))
    run_job(job)
    assert finished(begun.path) == finished(undisturbed)


def test_a_read_only_folder_can_still_be_read(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with read_only(trained, monkeypatch):
        run = Run.of(RECIPE)
        run.folder(trained).load("block-1", run.family.build_block(1))


def test_a_folder_that_vanishes_is_named(begun: RunFolder) -> None:
    shutil.rmtree(begun.path)
    with pytest.raises(InputError, match=r"can't be written \(No such file or directory\); nothing of block-1"):
        begun.save_state("block-1", State(9, {"a": torch.zeros(3)}, {}))


# Damaged files


def test_a_flipped_byte_anywhere_in_a_state_is_noticed(begun: RunFolder) -> None:
    path = begun.state_file("block-1")
    content = path.read_bytes()
    draws = random.Random(5)
    header = int.from_bytes(content[:8], "little")
    # Half of them in the header, which is a small part of the file.
    places = [draws.randrange(8 + header) for _ in range(10)] + [draws.randrange(len(content)) for _ in range(10)]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= draws.randrange(1, 256)
        path.write_bytes(flipped)
        with pytest.warns(UserWarning, match=r"states/block-1.safetensors is damaged .*: update 4 of .* is used"):
            state = begun.load_state("block-1")
        assert state is not None
        assert state.update == 4


def test_from_the_state_before_it_ends_with_the_same_bytes(begun: RunFolder, undisturbed: Path) -> None:
    path = begun.state_file("block-1")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="at most 4 later updates are lost"):
        run_job(BlockJob(RECIPE, "block-1", str(begun.path)))
    assert finished(begun.path) == finished(undisturbed)
    assert loss_curve(begun.path, "block-1") == loss_curve(undisturbed, "block-1")


def test_a_flipped_byte_anywhere_in_weights_is_noticed_and_mended(trained: Path, undisturbed: Path) -> None:
    path = trained / "block-1.safetensors"
    content = path.read_bytes()
    draws = random.Random(6)
    run = Run.of(RECIPE)
    for _ in range(20):
        flipped = bytearray(content)
        flipped[draws.randrange(len(content))] ^= draws.randrange(1, 256)
        path.write_bytes(flipped)
        assert not run.folder(trained).intact("block-1")
        with pytest.raises(InputError, match="isn't the file that was written for block-1"):
            run.folder(trained).verified("block-1")
    with pytest.warns(UserWarning, match="block-1.safetensors is damaged"):
        run_job(BlockJob(RECIPE, "block-1", str(trained)))
    assert finished(trained) == finished(undisturbed)


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.3, 0.9, 0.9999])
def test_a_cut_file_is_noticed(begun: RunFolder, trained: Path, share: float) -> None:
    for path in (begun.state_file("block-1"), trained / "block-1.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
    with pytest.warns(UserWarning, match="is damaged .*: update 4 of"):
        begun.load_state("block-1")
    assert not Run.of(RECIPE).folder(trained).intact("block-1")


# Two processes


def test_two_processes_cannot_train_one_part(tmp_path: Path, undisturbed: Path) -> None:
    endless = replace(RECIPE, training=replace(RECIPE.training, updates=10_000))
    out = tmp_path / "shared"
    process, told = start_training(endless, out)
    try:
        told.recv()
        refused(
            BlockJob(endless, "block-1", str(out)),
            f"another process ({process.pid}) is training block-1 in {out}: wait for it, or choose another folder",
        )
        # Another part is free.
        run_job(BlockJob(endless, "block-0", str(out), until=1))
    finally:
        process.kill()
        process.join()
    # The lock dies with its holder, though its file stays.
    assert (out / "states" / "block-1.lock").exists()
    run_job(BlockJob(endless, "block-1", str(out), until=1))


def test_a_lock_is_let_go_of(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, {})
    with folder.lock("block-0"), RunFolder(f"{tmp_path}/../{tmp_path.name}", {}).lock("block-0"):
        assert held_elsewhere(tmp_path)
    assert not held_elsewhere(tmp_path)
    with pytest.raises(KeyboardInterrupt), folder.lock("block-0"):
        raise KeyboardInterrupt
    assert not held_elsewhere(tmp_path)


def held_elsewhere(path: Path) -> bool:
    """What a process of its own finds."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=try_lock, args=(path, sender))
    process.start()
    held = receiver.recv()
    process.join()
    assert isinstance(held, bool)
    return held


def try_lock(path: Path, pipe: Connection) -> None:
    try:
        with RunFolder(path, {}).lock("block-0"):
            pipe.send(False)
    except InputError:
        pipe.send(True)


def start_run(path: Path, seed: int, barrier: Any, pipe: Connection) -> None:
    """In a process of its own: opens the folder at the same moment as another, and takes its time to write."""

    def slowly(file: Path, content: Any) -> None:
        time.sleep(0.1 * (1 + seed))
        write_json(file, content)

    checkpoint.write_json = slowly
    barrier.wait()
    try:
        RunFolder(path, {"recipe": {"seed": seed}})
        pipe.send("")
    except InputError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_two_processes_start_at_the_same_moment(tmp_path: Path, seeds: tuple[int, int]) -> None:
    barrier = PROCESSES.Barrier(2)
    receiver, sender = PROCESSES.Pipe(duplex=False)
    processes = [PROCESSES.Process(target=start_run, args=(tmp_path, seed, barrier, sender)) for seed in seeds]
    for process in processes:
        process.start()
    told = sorted(receiver.recv() for _ in processes)
    for process in processes:
        process.join()
    assert told[0] == ""
    if seeds[0] == seeds[1]:
        assert told[1] == ""
    else:
        assert "was made with recipe.seed = " in told[1]


# Clocks and numbers


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    now = [1e9]

    def jumping() -> float:
        now[0] += step
        return now[0]

    monkeypatch.setattr(time, "time", jumping)
    figures = run_job(BlockJob(RECIPE, "block-1", str(tmp_path)))
    assert figures is not None
    assert finished(tmp_path) == finished(undisturbed)
    assert loss_curve(tmp_path, "block-1") == loss_curve(undisturbed, "block-1")
    timed = ("seconds", "seconds_per_step")
    assert all(0 < figures[name] < 60 for name in timed)
    expected = read_json(undisturbed / "block-1.json")
    assert {**figures, **dict.fromkeys(timed)} == {**expected, **dict.fromkeys(timed)}


def test_a_loss_that_is_no_number_leaves_the_last_state(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BlockJob(RECIPE, "block-1", str(tmp_path))
    losses = ViT.step_losses

    def broken(family: ViT, module: Any, batch: Any, block: int, step: int) -> Any:
        found = losses(family, module, batch, block, step)
        return found * float("nan") if step == 10 else found

    with monkeypatch.context() as planted:
        planted.setattr(ViT, "step_losses", broken)
        refused(job, "the loss is nan", "at update 10", "the last saved state stays")
    state = Run.of(RECIPE).folder(tmp_path).load_state("block-1")
    assert state is not None
    assert state.update == 8
    run_job(job)
    assert finished(tmp_path) == finished(undisturbed)
