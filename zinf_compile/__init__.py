"""Train PyTorch models larger than memory: `model = zinf_compile(model, mem_budget="4GiB")`."""

from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not (_here / "passes").is_dir():
    # A source checkout: passes/ and runtime/ lie beside this folder (an installed package holds them).
    __path__.append(str(_here.parent))
