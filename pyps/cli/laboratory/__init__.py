"""Trials of a user's model in virtual time: one trial, grids of them in processes, tables and pictures."""
