"""Fixtures that several of this folder's files use."""

from .optimizer_twins import disk, module_disk  # noqa: F401
