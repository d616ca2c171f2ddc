"""Upper bounds of the robust radius by PGD, and the check of certificates against them."""

from acert.attack.check import AttackCheck, Violation, check_certificates
from acert.attack.search import AttackResult, Found, attack_radius

__all__ = [
    "AttackCheck",
    "AttackResult",
    "Found",
    "Violation",
    "attack_radius",
    "check_certificates",
]
