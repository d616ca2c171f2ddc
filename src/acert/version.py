"""The version, on the floor where every module can read it."""

__version__ = "0.1.0"
