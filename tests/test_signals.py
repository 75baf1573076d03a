"""SIGTERM and Ctrl-C save the state first; the same command then ends with the same bytes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusionblocks import cli
from diffusionblocks.cli import main
from diffusionblocks.config import Recipe
from diffusionblocks.report import loss_curve
from diffusionblocks.run import BlockJob, Run, run_job
from diffusionblocks.train import Stopped

TINY = ["vit-digits", "--layers=2", "--width=16", "--heads=2", "--mlp=32", "--patch=4", "--blocks=2", "--batch_size=16"]


def stop_after(updates: int) -> Iterator[bool]:
    yield from [False] * updates
    yield True


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_stopping_saves_the_update_it_stands_at(tiny: Recipe, tmp_path: Path, updates: int) -> None:
    asked = stop_after(updates)
    with pytest.raises(Stopped, match=f"block-0 stopped after update {updates} of 6"):
        run_job(BlockJob(tiny, "block-0", str(tmp_path)), stop=lambda: next(asked))
    state = Run.of(tiny).folder(tmp_path).load_state("block-0")
    assert state is not None
    assert state.update == updates


def test_stopped_and_resumed_gives_the_same_bytes(tiny: Recipe, tmp_path: Path) -> None:
    run_job(BlockJob(tiny, "block-0", str(tmp_path / "at-once")))
    for _ in range(3):
        asked = stop_after(1)
        with pytest.raises(Stopped):
            run_job(BlockJob(tiny, "block-0", str(tmp_path / "stopped")), stop=lambda: next(asked))  # noqa: B023
    run_job(BlockJob(tiny, "block-0", str(tmp_path / "stopped")))
    at_once, stopped = (tmp_path / name / "block-0.safetensors" for name in ("at-once", "stopped"))
    assert at_once.read_bytes() == stopped.read_bytes()
    assert loss_curve(tmp_path / "at-once", "block-0") == loss_curve(tmp_path / "stopped", "block-0")


def test_a_request_after_the_last_update_does_not_stop(tiny: Recipe, tmp_path: Path) -> None:
    asked = stop_after(6)
    assert run_job(BlockJob(tiny, "block-0", str(tmp_path)), stop=lambda: next(asked)) is not None


def start(out: Path) -> "subprocess.Popen[str]":
    """A real command, past its first saved state."""
    words = ["train", *TINY, "--updates=100000", "--checkpoint_every=1", "--warmup=0", f"--out={out}"]
    code = f"import sys; from diffusionblocks.cli import main; sys.exit(main({words}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + 60
    while not (out / "states" / "block-0.safetensors").exists():
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_with_its_state_saved(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start(tmp_path / "run")
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "block-0 stopped after update" in errors
    assert "the same command goes on from it" in errors
    assert "Traceback" not in errors


def test_a_second_signal_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an update takes long, one need not wait for it."""

    def endless(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal didn't interrupt")

    monkeypatch.setattr(cli, "run_job", endless)
    assert main(["train", *TINY, f"--out={tmp_path / 'run'}"]) == 130


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["train", *TINY, "--updates=1", "--warmup=0", f"--out={tmp_path / 'run'}"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_host_memory_is_written_when_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that wait in main memory between their visits are saved too."""
    jobs = 0
    original = cli.run_job

    def stopping(job: BlockJob, progress: object, stop: object, host: object) -> object:
        nonlocal jobs
        jobs += 1
        if jobs == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(job, progress, stop, host)

    monkeypatch.setattr(cli, "run_job", stopping)
    words = ["train", *TINY, "--updates=9", "--warmup=0", "--rotate=2", "--page-to=host", f"--out={tmp_path / 'run'}"]
    assert main(words) == 0
    for part in ("block-0", "block-1"):
        assert (tmp_path / "run" / "states" / f"{part}.safetensors").exists()
    monkeypatch.setattr(cli, "run_job", original)
    assert main(words) == 0
    assert main([*words[:-3], f"--out={tmp_path / 'at-once'}"]) == 0
    for part in ("block-0", "block-1"):
        found, expected = (tmp_path / name / f"{part}.safetensors" for name in ("run", "at-once"))
        assert found.read_bytes() == expected.read_bytes()
