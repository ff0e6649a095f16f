"""The dashboard: a run's history as a web page, served while the run goes on or kept in one file."""
