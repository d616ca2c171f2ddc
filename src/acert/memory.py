"""What the system takes back of the memory that is freed."""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]


def keep_freed_memory() -> None:
    """Lets later tensors on the CPU, of up to 32 MiB, have the memory of those that are gone.

    Once a block of this size was freed, glibc keeps what smaller ones leave behind; else every pass
    gives its memory back to the system and pays for it again, page by page. Other systems do not.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8, device="cpu")
