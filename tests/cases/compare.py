"""How equal two results of a case are: bit for bit, within a tolerance, or different, and where."""

from __future__ import annotations

from typing import Any

import torch

SAME, CLOSE, DIFFERENT = "same", "close", "DIFF"


def compare(a: Any, b: Any, path: str = "", tol: float = 1e-5) -> tuple[str, str]:
    """(SAME | CLOSE | DIFFERENT, where): the worst difference in two nested structures of tensors and plain values."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        return _tensors(a, b, path, tol)
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return DIFFERENT, f"{path} keys {sorted(map(str, set(a) ^ set(b)))[:3]} (or their order)"
        parts = [compare(a[k], b[k], f"{path}.{k}", tol) for k in a]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return DIFFERENT, f"{path} length {len(a)} vs {len(b)}"
        parts = [compare(x, y, f"{path}[{i}]", tol) for i, (x, y) in enumerate(zip(a, b))]
    elif isinstance(a, float) and isinstance(b, float):
        if a == b or (a != a and b != b):
            return SAME, ""
        return (CLOSE if abs(a - b) <= tol * max(1.0, abs(a)) else DIFFERENT), f"{path} {a!r} vs {b!r}"
    else:
        return (SAME, "") if a == b else (DIFFERENT, f"{path} {str(a)[:40]} vs {str(b)[:40]}")
    return max(parts, key=lambda part: (SAME, CLOSE, DIFFERENT).index(part[0]), default=(SAME, ""))


def _tensors(a: torch.Tensor, b: torch.Tensor, path: str, tol: float) -> tuple[str, str]:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return DIFFERENT, f"{path} {tuple(a.shape)} {a.dtype} {a.layout} vs {tuple(b.shape)} {b.dtype} {b.layout}"
    x, y = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
    inexact = x.is_floating_point() or x.is_complex()
    if torch.equal(x, y) or (inexact and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)):
        return SAME, ""
    if x.dtype in (torch.bfloat16, torch.float16):
        tol = max(tol, 2e-2)
    if inexact and torch.allclose(x, y, rtol=tol, atol=tol, equal_nan=True):
        return CLOSE, path
    worst = f", largest difference {(x.double() - y.double()).abs().max().item():.3g}" if inexact and not x.is_complex() else ""
    return DIFFERENT, path + worst
