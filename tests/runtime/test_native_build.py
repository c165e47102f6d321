"""Building the engine: two processes at once, a killed build, no compiler, no writable cache. Compiles a tiny csrc."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zinf_compile.errors import StoreError, Unsupported
from zinf_compile.runtime import native

ROOT = Path(__file__).resolve().parents[2]
SOURCE = 'extern "C" int answer() { return 42; }\n'
CHILD = """
import ctypes, pathlib, sys
from zinf_compile.runtime import native
native.source_folder = lambda: pathlib.Path(sys.argv[1])
path = native.library_path()
assert ctypes.CDLL(str(path)).answer() == 42
print(path)
"""


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A folder with one source, and an empty cache."""
    folder = tmp_path / "a source folder"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(native, "source_folder", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def start(csrc: Path, **env: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(csrc)],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cached(tmp_path: Path) -> list[str]:
    return sorted(p.suffix for p in (tmp_path / "cache" / "zinf_compile").iterdir())


def counting_compiler(tmp_path: Path) -> Path:
    """A compiler that notes each of its compilations, takes its time, and sleeps for long while `stall` exists."""
    script = tmp_path / "cxx"
    script.write_text(
        f"#!/bin/sh\ncase \"$*\" in *--version*) ;; *' -c '*) echo x >> {tmp_path}/compilations; sleep 0.3;"
        f' [ -e {tmp_path}/stall ] && exec sleep 60;; esac\nexec {shutil.which("g++") or "c++"} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_two_processes_build_once(csrc, tmp_path):
    compiler = counting_compiler(tmp_path)
    children = [start(csrc, CXX=str(compiler)) for _ in range(2)]
    outs = [c.communicate(timeout=120) for c in children]
    assert [c.returncode for c in children] == [0, 0], outs
    assert outs[0][0] == outs[1][0]
    assert (tmp_path / "compilations").read_text().count("x") == 1
    assert cached(tmp_path) == [".lock", ".so"]


def test_a_killed_build_does_not_stop_the_next(csrc, tmp_path):
    compiler = counting_compiler(tmp_path)
    (tmp_path / "stall").touch()
    first = start(csrc, CXX=str(compiler))
    deadline = time.monotonic() + 60
    while not (tmp_path / "compilations").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    assert ".so" not in cached(tmp_path) and len(list((tmp_path / "cache" / "zinf_compile").glob("build-*"))) == 1
    (tmp_path / "stall").unlink()
    second = start(csrc, CXX=str(compiler))
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert cached(tmp_path) == [".lock", ".so"]  # the leftover of the killed one is gone


def test_sources_change_the_library(csrc):
    first = native.library_path()
    assert native.library_path() == first
    (csrc / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    assert native.library_path() != first


def test_no_compiler_names_the_package(csrc, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Unsupported, match=r"Install the package 'g\+\+'"):
        native.library_path()


def test_a_compile_error_shows_the_compilers_words(csrc):
    (csrc / "answer.cpp").write_text("int broken( {")
    with pytest.raises(Unsupported, match="(?s)does not compile.*error"):
        native.library_path()


def test_an_unwritable_cache_falls_back_to_a_temporary_folder(csrc, tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("")  # a file: no folder can be made below it, whoever we are
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("HOME", str(blocked))
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert native.library_path().parent == tmp_path / "tmp" / f"zinf_compile-{os.getuid()}"


def test_a_prebuilt_library_counts_only_with_the_same_sources(csrc, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(sys.modules["zinf_compile"], "__file__", str(package / "__init__.py"))
    (package / "_C.so").write_bytes(b"ELF " + native.HASH_MARK + b"0123456789abcdef")
    assert native.library_path().parent != package
    (package / "_C.abi3.so").write_bytes(b"ELF " + native.HASH_MARK + native.source_hash().encode())
    assert native.library_path() == package / "_C.abi3.so"


def test_nothing_is_built_at_import(tmp_path):
    code = "import zinf_compile.runtime.ops, torch; torch.ops.zinf.gather.default"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": "/nonexistent"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_check_raises_the_engines_message():
    lib = native.load()
    with pytest.raises(StoreError, match="store 999999 is not open"):
        native.check(lib, lib.zinf_store_drain(999999))
    assert native.check(lib, 3) == 3
    assert native.load() is lib and torch.ops.zinf.gather is not None
