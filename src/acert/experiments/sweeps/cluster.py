"""A Ray cluster: found and joined in ten seconds, or refused in one line."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import threading
import warnings
from typing import Any

from acert.errors import AcertError, InvalidInput, RunError
from acert.extras import needs

__all__ = ["answers", "imported_ray", "joined", "room"]

# Seconds that an address has to answer in.
PATIENCE = 10.0
_NOT_RAY = "what answers there is not Ray"
# HTTP/2, as far as one question needs it: how a connection begins, kinds of frames, a request of
# gRPC in its compressed headers, and how the headers of the answer "200" begin.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _SETTINGS, _PING, _WINDOW = 1, 4, 6, 8
_QUESTION = b"\x83\x86\x04\x01/\x01\x03ray\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
_OK = b"\x88"
_START = "ray start --head --port=6379 --disable-usage-stats"


def imported_ray() -> Any:
    """The package; where it is not installed, the refusal says how to install it."""
    # Ray prints what its daemons write to standard output, in the middle of the bar. This is read
    # while it is imported; what matters of it is told by the engine.
    name = "RAY_DEDUP_LOGS_SKIP_REGEX"
    quiet = name not in os.environ
    if quiet:
        os.environ[name] = "(?s).*"
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise AcertError(f"`--engine ray` {needs('ray')}") from error
    finally:
        if quiet:
            del os.environ[name]


def joined(address: str) -> bool:
    """Joins the cluster at `auto` or HOST:PORT; False if this process is in one already.

    The cluster must answer within ten seconds.
    """
    ray = imported_ray()
    if ray.is_initialized():
        return False
    _check_answers(_place(address))
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    # Everything: Ray raises what it likes, and the process can go on without it.
    except Exception as error:
        told = " ".join(str(error).split())
        raise RunError(f"the Ray cluster at {address} cannot be joined: {told}") from error
    finally:
        # Ray takes it and gives it to nobody: a sweep would end without saving.
        if main:
            signal.signal(signal.SIGTERM, before)
    return True


def answers(address: str) -> bool:
    """Whether the head of a cluster answers at HOST:PORT at once."""
    try:
        _greet(_place(address), 2.0)
    except OSError:
        return False
    return True


def room(nodes: list[dict[str, Any]], *, cpus: int, gpus: float) -> int:
    """How many runs with so many CPUs and GPUs fit on the nodes, if nobody else is there."""
    places = 0
    for node in nodes:
        there = node["Resources"]
        fits = there.get("CPU", 0.0) // cpus
        if gpus > 0:
            fits = min(fits, _shares(there.get("GPU", 0.0), gpus))
        places += int(fits)
    return places


def _shares(there: float, gpus: float) -> float:
    """Runs on some GPUs; a run with a part of one never spreads over two."""
    return there // gpus if gpus >= 1 else there * (1.0 // gpus)


def _place(address: str) -> tuple[str, int]:
    """Host and port of an address; `auto` is looked up as Ray does."""
    found = address
    if address == "auto":
        services = importlib.import_module("ray._private.services")
        try:
            found = services.canonicalize_bootstrap_address("auto") or ""
        except ConnectionError:
            found = ""
        if not found:
            raise RunError(f"there is no Ray cluster on this machine: start one with {_START}")
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", found)
    if match is None or not 0 < int(match[2]) < 65536:
        raise InvalidInput(f"`address` must be auto or HOST:PORT; got {found!r}")
    return match[1].strip("[]"), int(match[2])


def _check_answers(place: tuple[str, int]) -> None:
    """Refuses an address where nobody speaks Ray's protocol; `ray.init` would wait for minutes."""
    complaints: list[str] = []

    def greet() -> None:
        try:
            _greet(place, PATIENCE)
        except TimeoutError:
            pass  # as if it had not come back at all
        except OSError as error:
            complaints.append(error.strerror or str(error))
        else:
            complaints.append("")

    # In a thread, because a name can take longer to be looked up than any limit of a socket.
    greeting = threading.Thread(target=greet, name="acert-greeting", daemon=True)
    greeting.start()
    greeting.join(PATIENCE)
    if complaints == [""]:
        return
    why = f"({complaints[0]})" if complaints else f"within {PATIENCE:.0f} s"
    raise RunError(
        f"no Ray cluster answers at {place[0]}:{place[1]} {why}: start one there with {_START}"
    )


def _greet(place: tuple[str, int], seconds: float) -> None:
    """Asks a server of Ray's protocol, gRPC over HTTP/2, for anything; an error if it is none."""
    # TLS answers in its own way.
    plain = os.environ.get("RAY_USE_TLS", "0") in ("", "0")
    with socket.create_connection(place, timeout=seconds) as connection:
        if plain:
            connection.sendall(
                _PREFACE + _frame(_SETTINGS, 0, b"") + _frame(_HEADERS, 1, _QUESTION)
            )
            # By the rules of HTTP/2 settings come first, and few frames before the answer.
            for _ in range(20):
                head = _received(connection, 9)
                content = _received(connection, int.from_bytes(head[:3]))
                if head[3] == _HEADERS and content.startswith(_OK):
                    return
                if head[3] not in (_SETTINGS, _PING, _WINDOW):
                    break
            raise ConnectionError(_NOT_RAY)


def _frame(kind: int, stream: int, content: bytes) -> bytes:
    # The flags of a question say that it is all there is.
    flags = 0x5 if kind == _HEADERS else 0
    return len(content).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + content


def _received(connection: socket.socket, size: int) -> bytes:
    # What is not HTTP/2 may read as a large size.
    found = connection.recv(size, socket.MSG_WAITALL) if 0 < size <= 16384 else b""
    if len(found) < min(size, 16385):
        raise ConnectionError(_NOT_RAY)
    return found
