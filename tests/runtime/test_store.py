"""The run folder: made, locked, reclaimed, refused; and tensors over blocks as ordinary tensors."""

import copy
import io
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zinf_compile.errors import StoreError
from zinf_compile.runtime.nvme_store import MARKER, NvmeStore, default_store_dir

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")
CHILD = """
import sys, time
from zinf_compile.runtime.nvme_store import NvmeStore
store = NvmeStore(sys.argv[1], 8 << 20)
t = store.new_tensor((1000,)).fill_(1)
print(store.path.name, flush=True)
{}
"""


def start_child(base: Path, code: str = "time.sleep(60)") -> tuple[subprocess.Popen, str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(code), str(base)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    return child, child.stdout.readline().strip()


def folders(base: Path) -> set[str]:
    return {p.name for p in base.iterdir()}


def test_the_folder_lives_as_long_as_the_store(tmp_path):
    base = tmp_path / "made" / "on demand"
    store = NvmeStore(base, 1 << 20)
    assert folders(base) == {store.path.name} and store.free_bytes == 1 << 20
    tensor = store.new_tensor((100,), torch.float64).fill_(3)
    assert store.free_bytes == (1 << 20) - 4096
    store.close()
    store.close()
    assert folders(base) == set() and store.closed
    assert (tensor + 1 == 4).all()  # an unlinked file lives as long as its mapping
    assert (torch.ops.zinf.gather(tensor, 0) == 3).all()
    with pytest.raises(StoreError, match="is closed"):
        store.new_tensor((1,))


def test_it_grows_when_more_is_needed(tmp_path):
    with NvmeStore(tmp_path, 1 << 20) as store:
        tensor = store.new_tensor((1 << 20,)).fill_(1)
        assert tensor.sum() == 1 << 20
        store.grow(1 << 20)
        assert store.free_bytes >= 1 << 20


def test_a_collected_store_is_removed(tmp_path):
    store = NvmeStore(tmp_path, 1 << 20)
    tensor = store.new_tensor((10,)).fill_(1)
    del store
    assert folders(tmp_path) == set() and tensor.sum() == 10


@pytest.mark.parametrize("code", ["", "raise ValueError('x')", "import signal; signal.raise_signal(signal.SIGINT)"])
def test_removed_at_exit_after_errors_and_ctrl_c(tmp_path, code):
    child, name = start_child(tmp_path, code)
    child.wait(30)
    assert name.startswith("zinf-store-") and folders(tmp_path) == set()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_is_reclaimed_and_nothing_else(tmp_path, how):
    child, name = start_child(tmp_path)
    foreign = tmp_path / "zinf-store-1-mine"
    foreign.mkdir()
    (foreign / "precious").write_text("x")
    alive, alive_name = start_child(tmp_path)
    try:
        assert folders(tmp_path) == {name, alive_name, foreign.name}
        assert not (tmp_path / name / "data.bin").exists()  # its space cannot be left behind
        child.send_signal(how)
        child.wait(30)
        with NvmeStore(tmp_path, 1 << 20) as store:
            assert folders(tmp_path) == {alive_name, foreign.name, store.path.name}
        assert (foreign / "precious").read_text() == "x" and (tmp_path / alive_name / MARKER).exists()
    finally:
        alive.kill()
        alive.wait(30)


def test_two_processes_share_a_base_folder(tmp_path):
    code = "assert all(float(store.new_tensor((50000,)).fill_(i).sum()) == 50000 * i for i in range(30))"
    children = [start_child(tmp_path, code) for _ in range(2)]
    assert [c.wait(60) for c, _ in children] == [0, 0]
    assert len({name for _, name in children}) == 2 and folders(tmp_path) == set()


def test_a_forked_child_does_not_remove_it(tmp_path):
    with NvmeStore(tmp_path, 1 << 20) as store:
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert store.path.is_dir() and not store.closed


def test_too_large_is_refused_with_numbers(tmp_path):
    with pytest.raises(StoreError, match=rf"{1 << 60} bytes does not fit into .*{tmp_path.name}.*bytes are free"):
        NvmeStore(tmp_path, 1 << 60)
    assert folders(tmp_path) == set()


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the store folder"):
        NvmeStore(tmp_path / "file", 1 << 20)


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no memory-backed file system here")
def test_memory_is_no_disk_unless_asked_for():
    with pytest.raises(StoreError, match="tmpfs, which is memory"):
        NvmeStore(MEMORY / f"zinf-test-{os.getpid()}", 1 << 20)
    (MEMORY / f"zinf-test-{os.getpid()}").rmdir()
    with NvmeStore(MEMORY, 1 << 20, allow_memory=True) as store:  # works through the page cache
        tensor = store.new_tensor((1001,)).copy_(torch.arange(1001.0))
        assert torch.equal(torch.ops.zinf.gather(tensor, 0), torch.arange(1001.0))
        saved = torch.ops.zinf.store_copy(torch.ones(1001), store.handle)
        assert torch.equal(torch.ops.zinf.reload(saved, 1), torch.ones(1001))
        torch.ops.zinf.accumulate(saved, tensor)
        store.drain()
        assert torch.equal(saved, torch.arange(1001.0) + 1)


def test_a_limit_on_file_size_names_the_store(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, before[1]))
    try:
        with pytest.raises(StoreError, match=rf"store file in .* needs {32 << 20} bytes.*{16 << 20} bytes"):
            NvmeStore(tmp_path, 32 << 20)
        with (
            NvmeStore(tmp_path, 8 << 20) as store,
            pytest.raises(StoreError, match=rf"cannot reserve {40 << 20} bytes in the store {tmp_path}.*bytes free.*File too large"),
        ):
            store.new_tensor((8 << 20,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_default_folder_obeys_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ZINF_STORE", str(tmp_path / "new"))
    assert default_store_dir(1 << 20) == tmp_path / "new"
    with pytest.raises(StoreError, match=r"no folder can hold .* Tried: .*does not fit"):
        default_store_dir(1 << 60)
    monkeypatch.delenv("ZINF_STORE")
    with NvmeStore(default_store_dir(1 << 20), 1 << 20) as store:
        assert store.path.is_dir()


def test_the_lock_is_held_for_life(tmp_path):
    with NvmeStore(tmp_path, 1 << 20) as first, NvmeStore(tmp_path, 1 << 20) as second:
        assert folders(tmp_path) == {first.path.name, second.path.name}


def test_a_block_tensor_is_an_ordinary_tensor(tmp_path):
    with NvmeStore(tmp_path, 32 << 20) as store:
        store.new_tensor((1 << 20,))
        tensor = store.new_tensor((8, 4)).copy_(torch.arange(32.0).view(8, 4))
        assert tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == 128 and tensor.is_contiguous()
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        assert buffer.tell() < 4096  # its own storage, not the whole store
        buffer.seek(0)
        assert torch.equal(torch.load(buffer), tensor)
        twin = copy.deepcopy(tensor)
        twin += 1
        assert torch.equal(tensor, torch.arange(32.0).view(8, 4))
        layer = torch.nn.Linear(4, 8, bias=False)
        layer.weight.data = tensor
        layer(torch.ones(2, 4)).sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.5, foreach=True).step()
        assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.data_ptr() == tensor.data_ptr()
        assert not torch.equal(tensor, torch.arange(32.0).view(8, 4))
        assert copy.deepcopy(layer).weight.data_ptr() != tensor.data_ptr()


def test_blocks_go_with_their_tensors_on_any_thread(tmp_path):
    import threading

    with NvmeStore(tmp_path, 8 << 20) as store:
        box = [store.new_tensor((1 << 20,)), store.new_tensor((1 << 18,)), store.new_tensor((0, 3))]
        view = box[1][10:20]
        threads = [threading.Thread(target=box.pop) for _ in range(3)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert store.free_bytes == (8 << 20) - (1 << 20)  # the view keeps its block
        del view
        time.sleep(0)
        assert store.free_bytes == 8 << 20
