"""The coordinator of Sandblaster as a process."""
