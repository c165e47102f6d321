"""Train PyTorch models larger than memory: `model = zinf_compile(model, mem_budget="4GiB")`."""

from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not (_here / "passes").is_dir():
    # A source checkout: passes/ and runtime/ lie beside this folder (an installed package holds them).
    __path__.append(str(_here.parent))

from . import api as _api  # noqa: E402
from .budget import MemBudget  # noqa: E402
from .cluster import Cluster  # noqa: E402
from .errors import BudgetTooSmall, ClusterError, PlanMismatch, StoreError, Unsupported, ZinfError  # noqa: E402
from .schedule import Plan  # noqa: E402

zinf_compile = _api.compile_model

__all__ = [
    "BudgetTooSmall",
    "Cluster",
    "ClusterError",
    "MemBudget",
    "Plan",
    "PlanMismatch",
    "StoreError",
    "Unsupported",
    "ZinfError",
    "zinf_compile",
]
for _name in __all__:
    setattr(zinf_compile, _name, globals()[_name])  # the function carries the package's public names
