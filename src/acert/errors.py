"""Every exception of acert. Each message names the parameter, the constraint and the value."""

__all__ = [
    "AcertError",
    "DataError",
    "InvalidInput",
    "LostProcess",
    "RunError",
    "UnsupportedOperation",
]


class AcertError(Exception):
    """Base of all errors that acert raises on purpose."""


class InvalidInput(AcertError, ValueError):
    """An argument breaks a stated constraint."""


class UnsupportedOperation(AcertError, NotImplementedError):
    """A model uses an operation that has no bound rule."""


class DataError(AcertError):
    """A data file is missing, damaged or not what its name says."""


class RunError(AcertError):
    """A run folder, a checkpoint or a training run cannot go on."""


class LostProcess(RunError):
    """One of several training processes does not answer; each of the others raises this."""
