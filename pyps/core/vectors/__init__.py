"""Vectors that lie beside the parameters, in parts as these, and a coordinator's instructions on them (Sandblaster)."""
