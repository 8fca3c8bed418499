"""Measurements: ``python -m jmla.bench kernels``."""
