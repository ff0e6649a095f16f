"""L-BFGS for Sandblaster's coordinator (Dean et al. 2012, section 4.2), on vectors that lie on the servers."""
