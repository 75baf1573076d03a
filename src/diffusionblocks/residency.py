"""Where a block's weights and optimizer states are between two visits of a rotation: on disk, or in main memory.

On disk nothing of an idle block takes memory, and its saved state is what comes back. In main memory the states of all
blocks stay beside an accelerator that holds one: they come back without a file being read.
"""

import torch
from torch import Tensor

from diffusionblocks.checkpoint import RunFolder, State

PLACES = ("disk", "host")


class HostMemory:
    """Keeps the training states of idle parts in main memory; from an accelerator through pinned, reused pages."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], tuple[RunFolder, State]] = {}
        self._pages: dict[tuple[str, str], dict[str, Tensor]] = {}

    def page_out(self, folder: RunFolder, part: str, state: State) -> None:
        """Takes over a part's state. Copies from an accelerator are queued, not waited for."""
        key = (str(folder.path), part)
        pages = self._pages.setdefault(key, {})
        state.tensors = {name: _paged(tensor, pages, name) for name, tensor in state.tensors.items()}
        self._states[key] = (folder, state)

    def page_in(self, folder: RunFolder, part: str) -> State | None:
        """Gives a part's state back, or None where it isn't here."""
        _wait()
        return self._states.pop((str(folder.path), part), (None, None))[1]

    def save(self) -> None:
        """Writes every state into its folder: before the process ends."""
        _wait()
        for (_, part), (folder, state) in self._states.items():
            with folder.lock(part):
                folder.save_state(part, state)


def _paged(tensor: Tensor, pages: dict[str, Tensor], name: str) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    if name not in pages:
        pages[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # The stream that computed the tensor copies it before its memory can be used again.
    return pages[name].copy_(tensor, non_blocking=True)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
