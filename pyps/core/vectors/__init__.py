"""Vectors on the servers, split like the parameters, and a coordinator's instructions on them (Sandblaster)."""
