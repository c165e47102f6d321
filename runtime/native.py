"""Finds, builds and loads the compiled library: the prebuilt one of a wheel, or one built from csrc/ at first use.

A build happens in a private folder and is moved into the cache by one rename, under a file lock that dies with its holder:
two processes that start together build once, and a killed build leaves nothing that the next one trips over. The cache
key covers the sources, torch, the compiler and the CPU's features. Nothing here runs at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..errors import StoreError, Unsupported

logger = logging.getLogger("zinf_compile")

CXX_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility-inlines-hidden", "-pthread")
HASH_MARK = b"zinf-source-hash:"

_i64, _int, _ptr, _str, _f64 = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double
INTERRUPT_CHECK = ctypes.CFUNCTYPE(_int)
DONE = ctypes.CFUNCTYPE(None, _ptr)


class IoStats(ctypes.Structure):
    """Mirror of `zinf_io_stats` in csrc/zinf.h: bytes, counts and seconds since the process started."""

    _fields_ = [
        (n, _i64) for n in ("bytes_read", "bytes_written", "reads", "writes", "direct_bytes", "buffered_bytes")
    ] + [(n, _f64) for n in ("read_seconds", "write_seconds", "wait_seconds")]


# name -> (result, arguments): csrc/zinf.h, then csrc/engine.h
_SIGNATURES: dict[str, tuple] = {
    "zinf_last_error": (_str, []),
    "zinf_store_open": (_i64, [_str, _i64]),
    "zinf_store_grow": (_int, [_i64, _i64]),
    "zinf_store_close": (_int, [_i64]),
    "zinf_store_direct": (_int, [_i64]),
    "zinf_store_drain": (_int, [_i64]),
    "zinf_store_write_window": (_int, [_i64, _i64]),
    "zinf_block_new": (_ptr, [_i64, _i64]),
    "zinf_block_free": (_int, [_ptr]),
    "zinf_block_bytes": (_i64, [_ptr]),
    "zinf_block_store": (_i64, [_ptr]),
    "zinf_block_drop": (_int, [_ptr]),
    "zinf_block_protect": (_int, [_ptr]),
    "zinf_block_dirty": (_int, [_ptr]),
    "zinf_read": (_i64, [_ptr, _i64, _ptr, _i64]),
    "zinf_write": (_i64, [_ptr, _i64, _ptr, _i64, _ptr, _ptr]),
    "zinf_wait": (_int, [_i64]),
    "zinf_poll": (_int, [_i64]),
    "zinf_trimmer": (_int, [_i64]),
    "zinf_set_interrupt_check": (None, [INTERRUPT_CHECK]),
    "zinf_io_stats_get": (None, [ctypes.POINTER(IoStats)]),
    "zinf_wait_quiet": (_int, [_i64]),
    "zinf_fault_inject": (None, [_int, _i64]),
    "zinf_store_free_bytes": (_i64, [_i64]),
    "zinf_block_count": (_i64, []),
    "zinf_barrier_faults": (_i64, []),
    "zinf_trimmer_drops": (_i64, []),
    "zinf_set_current_store": (None, [_i64]),
    "zinf_held_count": (_i64, []),
    "zinf_held_bytes": (_i64, []),
    "zinf_prefetch_count": (_i64, []),
    "zinf_held_forget_all": (None, []),
    "zinf_prefetch_cancel_all": (None, []),
    "zinf_block_invalidate": (None, [_ptr]),
    "zinf_held_arm": (_int, []),
    "zinf_ahead_states": (None, [_ptr, ctypes.c_int32, ctypes.POINTER(_ptr)]),
    "zinf_ahead_allow": (None, [_int]),
    "zinf_ahead_start": (None, [_ptr]),
    "zinf_ahead_count": (_i64, []),
    "zinf_ahead_bytes": (_i64, []),
    "zinf_ahead_taken": (_i64, []),
    "zinf_ahead_forget": (None, []),
    "zinf_python_signals": (None, [ctypes.POINTER(_ptr)]),  # csrc/signals.cpp
}


class Interrupts:
    """Lets waits inside the engine see signals: about every 50 ms they run Python's pending signal handlers. What a handler
    raises (KeyboardInterrupt) ends that wait with the error "interrupted" and is kept for `take`."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        names = "PyGILState_Ensure PyGILState_Release PyErr_CheckSignals PyErr_Fetch PyErr_NormalizeException Py_DecRef"
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in names.split()]
        lib.zinf_python_signals((ctypes.c_void_p * len(addresses))(*addresses))
        self._raised = ctypes.PyDLL(lib._name).zinf_python_raised  # PyDLL: called with the GIL, hands over a reference
        self._raised.restype = ctypes.py_object

    def take(self) -> BaseException | None:
        """What a signal handler raised during a wait, once."""
        try:
            return self._raised()
        except ValueError:  # ctypes' word for a null object
            return None


class Library(ctypes.CDLL):
    """The loaded engine. Functions of csrc/zinf.h and csrc/engine.h as attributes, with their argument types set."""

    interrupts: Interrupts


def source_folder() -> Path:
    """csrc/: inside the installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    return next(d for d in (package / "csrc", package.parent / "csrc") if d.is_dir())


def source_hash() -> str:
    """Identifies what the library is compiled from: every source, the flags, torch."""
    h = hashlib.sha256(f"{torch.__version__} {CXX_FLAGS}".encode())
    for path in sorted(source_folder().iterdir()):
        if path.suffix in (".cpp", ".h"):
            h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:16]


def compile_flags() -> list[str]:
    """Flags for every file of csrc/; the hash is embedded so that a stale prebuilt library is recognised."""
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    return [*CXX_FLAGS, *includes, f'-DZINF_SOURCE_HASH="{HASH_MARK.decode()}{source_hash()}"']


def link_flags() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return ["-shared", "-pthread", f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_cpu", "-lc10"]


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        found = shutil.which(shlex.split(name)[0])
        if found:
            return " ".join([found, *shlex.split(name)[1:]])
    raise Unsupported(
        f"zinf_compile needs a C++20 compiler to build its engine and found none ({', '.join(names)} are not on PATH). "
        "Install the package 'g++' (Debian, Ubuntu) or 'gcc-c++' (Fedora), or set CXX. Planning and inspection work without."
    )


def _ninja() -> str:
    try:  # the wheel's own binary: a virtual environment need not be activated
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        found = None
    found = found or shutil.which("ninja")
    if not found:
        raise Unsupported("zinf_compile needs 'ninja' to build its engine. Install it: pip install ninja")
    return found


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.machine()


def _cache_folder() -> Path:
    """The first of $XDG_CACHE_HOME/zinf_compile, ~/.cache/zinf_compile and a private temporary folder that is writable."""
    candidates = []
    if os.environ.get("XDG_CACHE_HOME"):
        candidates.append(Path(os.environ["XDG_CACHE_HOME"]) / "zinf_compile")
    with contextlib.suppress(RuntimeError):
        candidates.append(Path.home() / ".cache" / "zinf_compile")
    candidates.append(Path(tempfile.gettempdir()) / f"zinf_compile-{os.getuid()}")
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A library of somebody else must never be loaded: the temporary folder is shared between users.
            if folder.stat().st_uid in (os.getuid(), 0) and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    raise Unsupported(
        f"no folder for the compiled engine is writable (tried {', '.join(map(str, candidates))}): set XDG_CACHE_HOME"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when the holder dies
        yield


def _ninja_file(compiler: str, folder: Path) -> str:
    """The build of every csrc/*.cpp into `zinf.so`, as ninja reads it."""

    def escape(text: str) -> str:
        return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def command(parts: list[str]) -> str:
        return " ".join(shlex.quote(p).replace("$", "$$") for p in parts)

    sources = sorted(folder.glob("*.cpp"))
    lines = [
        "rule cxx",
        f"  command = {compiler} {command(compile_flags())} -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "rule link",
        f"  command = {compiler} $in {command(link_flags())} -o $out",
    ]
    lines += [f"build {escape(s.stem)}.o: cxx {escape(str(s))}" for s in sources]
    lines += ["build zinf.so: link " + " ".join(f"{escape(s.stem)}.o" for s in sources), "default zinf.so", ""]
    return "\n".join(lines)


def _build(compiler: str, target: Path) -> None:
    """Compiles into a private folder next to `target`, then renames. The caller holds the lock of `target`."""
    for leftover in target.parent.glob(f"build-{target.stem}-*"):  # of a build that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"build-{target.stem}-", dir=target.parent))
    try:
        (folder / "build.ninja").write_text(_ninja_file(compiler, source_folder()))
        done = subprocess.run([_ninja(), "-C", str(folder)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unsupported(
                f"the engine does not compile with '{compiler}' (C++20 and torch {torch.__version__} are needed):\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
            )
        os.rename(folder / "zinf.so", target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prebuilt() -> Path | None:
    """`_C*.so` inside the package, if it was built from exactly these sources."""
    package = Path(sys.modules[__package__.split(".")[0]].__file__ or "").resolve().parent
    mark = HASH_MARK + source_hash().encode()
    return next((path for path in sorted(package.glob("_C*.so")) if mark in path.read_bytes()), None)


def library_path() -> Path:
    """The shared library, built now if the cache does not have it. Raises Unsupported without a compiler."""
    prebuilt = _prebuilt()
    if prebuilt:
        return prebuilt
    compiler = _compiler()
    version = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.sha256(
        "\n".join((source_hash(), compiler, version, _cpu_features(), sys.platform)).encode()
    ).hexdigest()[:20]
    target = _cache_folder() / f"zinf-{key}.so"
    if target.exists():
        return target
    start = time.monotonic()
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _build(compiler, target)
    if time.monotonic() - start > 1:
        logger.info(
            "built the native engine in %.1f s (%s); later runs load it from the cache",
            time.monotonic() - start,
            target,
        )
    return target


@functools.cache
def load() -> Library:
    """The engine: registers the kernels of torch.ops.zinf.* and returns the handle for ctypes, with argument types set.

    `lib.interrupts` is the `Interrupts` that waits consult. Functions of other files set their own argument types.
    """
    path = library_path()
    try:
        torch.ops.load_library(str(path))
    except OSError:
        if path.name.startswith("_C"):
            raise
        path.unlink(missing_ok=True)  # damaged in the cache: once more
        path = library_path()
        torch.ops.load_library(str(path))
    lib = Library(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function: Callable = getattr(lib, name)
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
    lib.interrupts = Interrupts(lib)
    return lib


def check(lib: Library, result: int | None) -> int:
    """The result of an engine function, or StoreError with the engine's message if it is negative or null.

    A wait that a signal ended raises what the signal's handler raised, e.g. KeyboardInterrupt."""
    if result is not None and result >= 0:
        return result
    message = lib.zinf_last_error().decode(errors="replace")
    if message == "interrupted":
        raise lib.interrupts.take() or KeyboardInterrupt()
    raise StoreError(message)


def io_stats(lib: ctypes.CDLL) -> dict[str, float]:
    """The engine's counters: bytes, numbers of transfers, seconds."""
    stats = IoStats()
    lib.zinf_io_stats_get(ctypes.byref(stats))
    return {name: getattr(stats, name) for name, *_ in IoStats._fields_}
