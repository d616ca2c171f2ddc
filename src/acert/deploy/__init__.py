"""Classifiers for other runtimes: with their radius as one graph, or plain beside properties."""

from acert.deploy.benchmark import Benchmark, write_benchmark
from acert.deploy.classifier import CertifiedClassifier
from acert.deploy.onnx_file import write_certified, write_plain

__all__ = ["Benchmark", "CertifiedClassifier", "write_benchmark", "write_certified", "write_plain"]
