"""The disk tier: a run folder with one preallocated file, owned by this process and removed with it.

Layout: `<base_dir>/zinf-store-<pid>-<random>/` holds `marker` (ours; nothing without it is ever removed), `lock` (held with
flock for life, so a folder whose owner was killed is recognised by the next run, and reclaimed). The file itself,
`data.bin`, is unlinked as soon as it is open: its space returns to the disk with its last descriptor and mapping, however
the process ends, and tensors over it stay valid after `close`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import resource
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..errors import StoreError
from . import native, ops  # noqa: F401 - the schemas of the ops that are called here

logger = logging.getLogger("zinf_compile")

PREFIX = "zinf-store-"
MARKER = "marker"
MARKER_TEXT = "This folder belongs to zinf_compile; it is removed when its process ends.\n"
_MEMORY_BACKED = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # statfs magic numbers
_KEEP_FREE = 64 << 20  # bytes of the disk left to others


class NvmeStore:
    """A store of `reserve_bytes` bytes in a new folder of `base_dir` (made if missing).

    Raises StoreError, naming the path, the bytes needed and the bytes free, if the folder is not writable, too small,
    memory-backed (unless `allow_memory`), or beyond the process's limit of file sizes. A context manager; `close` is
    also called at exit. After a fork the store belongs to the parent: the child neither uses nor removes it.
    """

    def __init__(self, base_dir: str | os.PathLike, reserve_bytes: int, *, allow_memory: bool = False) -> None:
        self.reserve_bytes = int(reserve_bytes)
        self.base_dir = Path(base_dir).expanduser().absolute()
        refusal = _why_not(self.base_dir, self.reserve_bytes, allow_memory, make=True, reclaim=True)
        if refusal:
            raise StoreError(refusal)
        self._lib = native.load()
        self.path, lock = _make_folder(self.base_dir)
        opened: list[int] = []  # the engine's handle, once it is open
        self._shut = weakref.finalize(self, _shut, self._lib, opened, self.path, lock, os.getpid())  # also at exit
        try:
            opened.append(
                native.check(self._lib, self._lib.zinf_store_open(os.fsencode(self.path), self.reserve_bytes))
            )
        except BaseException:
            self._shut()
            raise
        self.handle = opened[0]
        self.direct = self._lib.zinf_store_direct(self.handle) == 1
        # Without a name the file's space returns to the disk however this process ends, SIGKILL included.
        os.unlink(self.path / "data.bin")
        if not self.direct:
            logger.info("%s does not support O_DIRECT: transfers go through the page cache", self.base_dir)

    def new_tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A contiguous CPU tensor over a new block, storage offset 0, contents unspecified; the block goes with its storage.

        Where the reserved file is full it grows. Raises StoreError with the path and the bytes needed and free if it cannot.
        """
        self._need_open()
        try:
            return torch.ops.zinf.block_tensor(self.handle, list(shape), dtype)
        except RuntimeError as error:
            if str(error).startswith("zinf: "):  # the engine's: with its own class, or what a signal's handler raised
                native.check(self._lib, -1)
            raise

    def drain(self) -> None:
        """Wait until every write is on its way to the disk no more; raises StoreError for the first one that failed."""
        self._need_open()
        native.check(self._lib, self._lib.zinf_store_drain(self.handle))

    def grow(self, more_bytes: int) -> None:
        """Reserve further room."""
        self._need_open()
        native.check(self._lib, self._lib.zinf_store_grow(self.handle, int(more_bytes)))

    def write_window(self, nbytes: int) -> None:
        """At most `nbytes` of writes in flight (a larger write goes alone); 0: every write waits for itself."""
        self._need_open()
        native.check(self._lib, self._lib.zinf_store_write_window(self.handle, int(nbytes)))

    @property
    def free_bytes(self) -> int:
        """Reserved bytes that no block occupies."""
        self._need_open()
        return native.check(self._lib, self._lib.zinf_store_free_bytes(self.handle))

    @property
    def closed(self) -> bool:
        return self.handle == 0

    def close(self) -> None:
        """Wait for transfers, then remove the folder. Tensors over the store keep their contents until they are freed, and
        ops go on working with them: a gather is then a copy through the mapping. New blocks are refused."""
        self.handle = 0
        self._shut()

    def _need_open(self) -> None:
        if not self.handle:
            raise StoreError(f"the store {self.path} is closed")

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"NvmeStore({str(self.path)!r}, {self.reserve_bytes} bytes, {'closed' if self.closed else 'O_DIRECT' if self.direct else 'buffered'})"


def default_store_dir(need: int) -> Path:
    """The first folder with room for `need` bytes on a real disk: $ZINF_STORE, $TMPDIR, /var/tmp, ~/.cache/zinf_compile, the
    current folder. $ZINF_STORE, where set, is the only candidate. Raises StoreError that lists what was tried and why not."""
    if os.environ.get("ZINF_STORE"):
        candidates = [Path(os.environ["ZINF_STORE"])]
    else:
        candidates = [Path(tempfile.gettempdir()), Path("/var/tmp")]
        with contextlib.suppress(RuntimeError):
            candidates.append(Path.home() / ".cache" / "zinf_compile" / "store")
        candidates.append(Path.cwd())
    tried: list[str] = []
    for folder in dict.fromkeys(c.expanduser().absolute() for c in candidates):
        refusal = _why_not(folder, need, allow_memory=False, make=False, reclaim=True)
        if refusal is None:
            return folder
        tried.append(refusal)
    raise StoreError(
        f"no folder can hold a store of {need} bytes. Pass store_dir= or set ZINF_STORE. Tried: " + "; ".join(tried)
    )


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _why_not(base: Path, need: int, allow_memory: bool, make: bool, reclaim: bool) -> str | None:
    """Why `base` cannot hold a store of `need` bytes; None if it can."""
    if make:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"cannot create the store folder {base}: {error.strerror}. Pass another store_dir"
    folder = _existing(base)
    if not folder.is_dir():
        return f"the store folder {base} cannot be: {folder} is not a folder. Pass another store_dir"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the store folder {folder} is not writable. Pass another store_dir"
    kind = _MEMORY_BACKED.get(_file_system(folder))
    if kind and not allow_memory:
        return f"the store folder {folder} is on {kind}, which is memory: a store there saves nothing. Pass a store_dir on a disk"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < need:
        return (
            f"a store file in {folder} needs {need} bytes, but this process may not write files larger than {limit} bytes "
            "(RLIMIT_FSIZE). Raise the limit (ulimit -f), or lower what is offloaded with a larger mem_budget"
        )
    if reclaim and base.is_dir():
        _reclaim(base)
    free = shutil.disk_usage(folder).free
    if free < need + (0 if kind else _KEEP_FREE):
        return f"a store of {need} bytes does not fit into {folder}: {free} bytes are free. Free space, or pass another store_dir"
    return None


def _file_system(folder: Path) -> int:
    """Magic number of the file system (`f_type` of statfs), 0 if unknown."""
    buffer = ctypes.create_string_buffer(256)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(folder), buffer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


def _make_folder(base: Path) -> tuple[Path, int]:
    """A new run folder and the descriptor of its lock. The folder appears under its name only once it is locked and marked,
    so another process never takes a folder in the making for one whose owner is dead."""
    name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    draft = base / f".{name}"
    try:
        draft.mkdir(mode=0o700)
        lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (draft / MARKER).write_text(MARKER_TEXT)
        os.rename(draft, base / name)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StoreError(f"cannot create a store in {base}: {error.strerror}. Pass another store_dir") from error
    return base / name, lock


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Whether the folder is ours and its owner is gone; while the context lasts, nobody else can decide the same."""
    try:
        marked = folder.is_dir() and not folder.is_symlink() and (folder / MARKER).read_text() == MARKER_TEXT
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC) if marked else -1
    except (OSError, UnicodeDecodeError):
        lock = -1
    if lock < 0:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        yield False
    finally:
        os.close(lock)


def _reclaim(base: Path) -> None:
    """Remove the run folders of processes that died; never anything without our marker or with a living owner."""
    for folder in base.glob(f"{PREFIX}*"):
        with _abandoned(folder) as gone:
            if gone:
                logger.info("removing %s, left by a run that was killed", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _shut(lib: ctypes.CDLL, opened: list[int], folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: everything belongs to the parent
    for handle in opened:
        lib.zinf_store_close(handle)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)
