"""Sandblaster L-BFGS's worker (Dean et al. 2012, section 4.2): gradients of portions of the data, for a coordinator."""
