"""Every random draw of a run comes from a generator derived from (seed, block, purpose).

That is what makes blocks independent and testable: block 2 trained alone, in sequence, in rotation or on another
machine draws the same numbers, because nothing it draws depends on who drew before. A purpose may be refined by
integers (the update, the epoch, the example); then a resumed run needs no generator state at all, only its update.
"""

import hashlib

import torch

# The "block" of what belongs to no block: the frozen code table, the baselines' whole network, an evaluation.
NO_BLOCK = -1


def derive(seed: int, block: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed that depends on every argument; stable across machines, processes and versions."""
    text = "/".join([str(seed), str(block), purpose, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, block: int, purpose: str, *indices: int) -> torch.Generator:
    """A CPU generator seeded by `derive`. CPU, so that an accelerator run draws the same numbers."""
    return torch.Generator().manual_seed(derive(seed, block, purpose, *indices))
