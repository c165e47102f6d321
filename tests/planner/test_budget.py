"""Budgets as users write them, and what a process may still take."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.budget import MemBudget, default_budget, format_budget, format_bytes, parse_budget
from zinf_compile.cluster import Cluster
from zinf_compile.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * 2**30), ("600MiB", 600 * 2**20), ("192KiB", 192 * 2**10), ("4GB", 4 * 10**9), (4096, 4096),
        ("1.5GiB", 3 * 2**29), (" 7 mib ", 7 * 2**20), ("0.1GB", 10**8), ("12B", 12), ("2TiB", 2**41),
    ],
)  # fmt: skip
def test_accepted(text, nbytes) -> None:
    assert parse_budget(text) == nbytes


@pytest.mark.parametrize(
    "wrong", [True, False, 4.0, float("nan"), 0, -1, "0GiB", "-4GiB", "4 bananas", "", "GiB", "4", "1e9B", "4GiBs", None, [4], "nan"]
)  # fmt: skip
def test_refused_with_what_was_given_and_what_is_accepted(wrong) -> None:
    with pytest.raises(ValueError) as error:
        parse_budget(wrong)
    text = str(error.value)
    assert "mem_budget" in text and repr(wrong) in text and '"4GiB"' in text


@given(st.integers(1, 2**50))
def test_advice_reads_back_to_enough(nbytes: int) -> None:
    back = parse_budget(format_budget(nbytes))
    assert nbytes <= back <= nbytes + max(1, nbytes // 99)


def test_mem_budget_reads_text_for_each_tier() -> None:
    budget = MemBudget(device="1GiB", nvme=10)
    assert (budget.device, budget.host, budget.nvme) == (2**30, None, 10)
    with pytest.raises(ValueError, match="mem_budget: host"):
        MemBudget(host="much")


def test_format() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**19, 2**30)] == ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.0 GiB"]


def system(root: Path, available: int, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_default_is_what_is_free_less_a_tenth(tmp_path: Path) -> None:
    assert default_budget(system(tmp_path, 1000 * 1024), lambda: []) == 921_600
    assert default_budget(tmp_path, lambda: [500_000]) == 450_000
    assert 0 < default_budget() < 2**50


def test_default_sees_cgroup_2_and_its_parents(tmp_path: Path) -> None:
    root = system(tmp_path, 2**30)
    (root / "proc/self/cgroup").write_text("0::/job/task\n")
    for folder, most, used, cache in (("", "max", 0, 0), ("job", 10_000_000, 4_000_000, 1_000_000), ("job/task", "max", 5, 0)):
        at = root / "sys/fs/cgroup" / folder
        at.mkdir(parents=True, exist_ok=True)
        (at / "memory.max").write_text(f"{most}\n")
        (at / "memory.current").write_text(f"{used}\n")
        (at / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert default_budget(root, lambda: []) == 6_300_000


def test_default_sees_cgroup_1(tmp_path: Path) -> None:
    root = system(tmp_path, 2**30)
    (root / "proc/self/cgroup").write_text("5:cpu:/x\n4:memory:/job\n")
    at = root / "sys/fs/cgroup/memory/job"
    at.mkdir(parents=True)
    (at / "memory.limit_in_bytes").write_text("3000000")
    (at / "memory.usage_in_bytes").write_text("1000000")
    (at.parent / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (at.parent / "memory.usage_in_bytes").write_text("7")
    assert default_budget(root, lambda: []) == 1_800_000


def test_cluster_refuses_rates_that_are_none() -> None:
    with pytest.raises(ClusterError, match="nvme_read=0"):
        Cluster.this_machine(nvme_read=0)
    with pytest.raises(ClusterError, match="nvme_latency=-1"):
        Cluster.this_machine(nvme_latency=-1)
    assert Cluster.this_machine(nvme_latency=0).nvme_read == 1e9
