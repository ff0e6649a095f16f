"""Trainers whose optimizer's updates run on parameter servers, a module each: transformers, lightning, accelerate.

None is imported before it is used, and none of them by `pyps_client` itself.
"""
