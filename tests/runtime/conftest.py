"""Fixtures that several of this folder's files use."""

from .arena_support import arena  # noqa: F401
from .optimizer_twins import disk, module_disk  # noqa: F401
