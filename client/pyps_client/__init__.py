"""The worker's side of pyps: push gradients to parameter servers, pull parameters from them."""

__version__ = "0.1.0"
