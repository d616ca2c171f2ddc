"""The training methods, each a value that the one training loop takes."""

from acert.methods.acert import Acert
from acert.methods.acert_fast import AcertFast
from acert.methods.base import Attack, Method, Step
from acert.methods.crown_ibp import CrownIBP
from acert.methods.expressive import CcIBP, ExpIBP, Expressive, MtlIBP
from acert.methods.fast_ibp import FastIBP
from acert.methods.sabr import Sabr
from acert.methods.standard import Standard

__all__ = [
    "METHODS",
    "Acert",
    "AcertFast",
    "Attack",
    "CcIBP",
    "CrownIBP",
    "ExpIBP",
    "Expressive",
    "FastIBP",
    "Method",
    "MtlIBP",
    "Sabr",
    "Standard",
    "Step",
    "method_name",
]

METHODS: dict[str, type[Method]] = {
    "standard": Standard,
    "fastibp": FastIBP,
    "crown-ibp": CrownIBP,
    "sabr": Sabr,
    "cc-ibp": CcIBP,
    "mtl-ibp": MtlIBP,
    "exp-ibp": ExpIBP,
    "acert": Acert,
    "acert-fast": AcertFast,
}


def method_name(method: Method) -> str:
    """The name of a method on the command line.

    >>> method_name(CrownIBP())
    'crown-ibp'
    """
    return next(name for name, kind in METHODS.items() if isinstance(method, kind))
