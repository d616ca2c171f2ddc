"""What `env.json` says of a run: commit, versions, hardware, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from acert.version import __version__

__all__ = ["environment"]


def environment(device: torch.device, command: Sequence[str] | None) -> dict[str, Any]:
    """Commit, versions and hardware; no host names, user names or paths."""
    facts: dict[str, Any] = {
        "commit": commit(),
        "acert": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": None if command is None else shlex.join(without_paths(command)),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        facts["cuda"] = torch.version.cuda
    # Only who starts two runs on one device knows that neither's times are its own.
    if os.environ.get("ACERT_GPU_SHARED"):
        facts["gpu_shared"] = True
    return facts


def commit() -> str | None:
    """The commit that this package was checked out from; None if nobody knows.

    `$ACERT_COMMIT` says it where it is set: a copied tree has no history, or another one's.
    """
    if told := os.environ.get("ACERT_COMMIT"):
        return told
    package = Path(__file__).parent.parent

    def git(*words: str) -> str:
        call = ["git", "-C", str(package), *words]
        done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        # An installed package may lie inside a repository that is not its own.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = "-modified" if git("status", "--porcelain", "--", str(package)) else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def without_paths(words: Sequence[str]) -> list[str]:
    """The words of a command with the last part of each path that does not start here."""
    short = []
    for word in words:
        name, equals, value = word.rpartition("=")
        path = PurePath(value)
        outside = path.is_absolute() or value.startswith("~") or ".." in path.parts
        short.append(name + equals + (path.name if outside else value))
    return short
