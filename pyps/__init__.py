"""pyps, a parameter server for PyTorch."""

__version__ = "0.1.0"
