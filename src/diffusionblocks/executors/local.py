"""Block jobs in this process, one after another or in rotation; one block's tensors exist at a time."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from diffusionblocks.errors import InputError
from diffusionblocks.run import BlockJob

Runner = Callable[[BlockJob], dict[str, Any] | None]


def run_in_order(jobs: Sequence[BlockJob], run: Runner) -> list[dict[str, Any] | None]:
    """Each part to its end before the next is built."""
    return [_alone(job, run) for job in jobs]


def run_in_rotation(jobs: Sequence[BlockJob], run: Runner, visit: int) -> list[dict[str, Any] | None]:
    """Visits of `visit` updates to each part in turn; between visits a part's state is on disk only."""
    if visit < 1:
        raise InputError(f"a visit of {visit} updates trains nothing: choose 1 or more")
    figures: list[dict[str, Any] | None] = [None] * len(jobs)
    until = 0
    while None in figures:
        until += visit
        for index, job in enumerate(jobs):
            if figures[index] is None:
                figures[index] = _alone(replace(job, until=until), run)
    return figures


def _alone(job: BlockJob, run: Runner) -> dict[str, Any] | None:
    figures = run(job)
    if figures is not None:
        # A cycle through a module would keep a block beside the next. There is none at the end of a visit, and a
        # collection takes as long as several updates of a small block.
        gc.collect()
    return figures
