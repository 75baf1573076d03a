"""Runs that are killed, at any moment, and started again: the same bytes as without."""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import diffusionblocks
from diffusionblocks import checkpoint
from diffusionblocks.checkpoint import write_atomic
from diffusionblocks.compare import METHODS, compare, method_run
from diffusionblocks.config import DataSettings, Recipe
from diffusionblocks.families.vit import ViTSettings
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
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}


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
    assert 0 <= lost <= 3 * 4
    expected = finished(tmp_path / "undisturbed")
    assert list(expected) == parts
    assert finished(tmp_path / "killed") == expected
    for name in parts:
        method, part = Path(name).parent, Path(name).stem
        assert loss_curve(tmp_path / "killed" / method, part) == loss_curve(tmp_path / "undisturbed" / method, part)


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
        self.move, self.unlink = os.replace, Path.unlink
        monkeypatch.setattr(checkpoint.os, "replace", self._replace)
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: self._unlink(path, missing_ok))

    def after(self, moves: int) -> None:
        self.left, self.dead = moves, False

    def _replace(self, source: Any, target: Any) -> None:
        if self.left == 0:
            self.left, self.dead = -1, True
            raise Killed
        self.left -= 1
        self.move(source, target)

    def _unlink(self, path: Path, missing_ok: bool) -> None:
        if not self.dead:
            self.unlink(path, missing_ok=missing_ok)


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
    # Manifest, states at 2, 4 and 5, weights, figures.
    for moves in range(6):
        out = tmp_path / str(moves)
        deaths.after(moves)
        with pytest.raises(Killed):
            run_job(BlockJob(recipe, "block-1", str(out)))
        assert Run.of(recipe).folder(out).finished("block-1") is None
        deaths.after(-1)
        run_job(BlockJob(recipe, "block-1", str(out)))
        assert finished(out) == expected
        assert loss_curve(out, "block-1") == loss_curve(tmp_path / "undisturbed", "block-1")
        # What the dead left behind of this part is gone.
        assert not list(out.glob(".block-1.*"))


def test_killed_again_and_again_a_block_ends_with_the_same_bytes(tmp_path: Path, deaths: Deaths) -> None:
    """Each life is two writes long, as the last one must be: weights and figures."""
    recipe = replace(RECIPE, training=replace(RECIPE.training, updates=5, checkpoint_every=1))
    run_job(BlockJob(recipe, "block-0", str(tmp_path / "undisturbed")))
    # Manifest and state 1; states 2 and 3; 4 and 5.
    for _ in range(3):
        deaths.after(2)
        with pytest.raises(Killed):
            run_job(BlockJob(recipe, "block-0", str(tmp_path / "killed")))
    deaths.after(2)
    assert run_job(BlockJob(recipe, "block-0", str(tmp_path / "killed"))) is not None
    assert finished(tmp_path / "killed") == finished(tmp_path / "undisturbed")
    assert loss_curve(tmp_path / "killed", "block-0") == loss_curve(tmp_path / "undisturbed", "block-0")
