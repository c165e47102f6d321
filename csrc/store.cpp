// Stores and blocks: one preallocated file a store, page-aligned extents of it, each with a shared mapping of its own.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "engine.h"

namespace zinf {

int64_t page_size() {
  static const int64_t size = std::max<int64_t>(sysconf(_SC_PAGESIZE), kAlign);
  return size;
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t Extents::take(int64_t length) {
  auto best = by_length_.lower_bound({length, -1});
  if (best == by_length_.end()) return -1;
  auto [found, offset] = *best;
  by_length_.erase(best);
  by_offset_.erase(offset);
  if (found > length) {
    by_offset_[offset + length] = found - length;
    by_length_.insert({found - length, offset + length});
  }
  free_ -= length;
  return offset;
}

void Extents::give(int64_t offset, int64_t length) {
  free_ += length;
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && next->first == offset + length) {
    length += next->second;
    by_length_.erase({next->second, next->first});
    next = by_offset_.erase(next);
  }
  if (next != by_offset_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      by_length_.erase({before->second, before->first});
      by_offset_.erase(before);
    }
  }
  by_offset_[offset] = length;
  by_length_.insert({length, offset});
}

Store::~Store() {
  if (buffered_fd >= 0) ::close(buffered_fd);
  if (direct_fd >= 0) ::close(direct_fd);
}

Block::~Block() {
  barrier_forget(*this);
  if (base) munmap(base, capacity);
  if (!store || engine().forked_child) return;
  std::lock_guard<std::mutex> lock(store->extent_mutex);
  store->extents.give(offset, capacity);
}

namespace {

std::string space_message(const std::string& path, int64_t needed, int error) {
  struct statvfs fs {};
  int64_t available = statvfs(path.c_str(), &fs) == 0 ? static_cast<int64_t>(fs.f_bavail) * static_cast<int64_t>(fs.f_frsize) : -1;
  return "cannot reserve " + std::to_string(needed) + " bytes in the store " + path + " (" + std::to_string(available) +
         " bytes free there): " + errno_text(error) + ". Free space, raise the limit, or pass another store_dir";
}

// Extends the file to `bytes`, with every byte backed by the disk: a hole would be a SIGBUS on a full disk. 0 or errno.
int allocate(Store& store, int64_t from, int64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && static_cast<int64_t>(limit.rlim_cur) < bytes) return EFBIG;
  int rc;
  do rc = fallocate(store.buffered_fd, 0, from, bytes - from);
  while (rc != 0 && errno == EINTR);
  if (rc == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  std::string zeros(1 << 20, '\0');  // no fallocate here: write them
  for (int64_t at = from; at < bytes;) {
    ssize_t n = pwrite(store.buffered_fd, zeros.data(), std::min<int64_t>(zeros.size(), bytes - at), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ENOSPC;
    at += n;
  }
  return 0;
}

// Does O_DIRECT see what the mapping wrote, and the mapping what O_DIRECT wrote? Uses the first page of the file.
bool direct_is_coherent(int direct_fd, int buffered_fd) {
  char* map = static_cast<char*>(mmap(nullptr, kAlign, PROT_READ | PROT_WRITE, MAP_SHARED, buffered_fd, 0));
  char* page = static_cast<char*>(mmap(nullptr, kAlign, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  bool good = map != MAP_FAILED && page != MAP_FAILED;
  for (int round = 0; good && round < 2; ++round) {
    memset(map, 0x5a + round, kAlign);
    good = pread(direct_fd, page, kAlign, 0) == kAlign && memcmp(map, page, kAlign) == 0;
    memset(page, 0x33 + round, kAlign);
    good = good && pwrite(direct_fd, page, kAlign, 0) == kAlign && memcmp(map, page, kAlign) == 0;
  }
  if (map != MAP_FAILED) munmap(map, kAlign);
  if (page != MAP_FAILED) munmap(page, kAlign);
  return good;
}

int grow(Store& store, int64_t more) {  // with extent_mutex held
  more = round_up(std::max<int64_t>(more, 1), page_size());
  if (int error = allocate(store, store.file_bytes, store.file_bytes + more)) return fail(space_message(store.path, store.file_bytes + more, error));
  store.extents.give(store.file_bytes, more);
  store.file_bytes += more;
  return 0;
}

// An extent for a new block. Waits for extents that only transfers of freed blocks still hold; then the file grows.
int64_t take_extent(const std::shared_ptr<Store>& store, int64_t capacity) {
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(store->extent_mutex);
      int64_t offset = store->extents.take(capacity);
      if (offset >= 0) return offset;
    }
    std::unique_lock<std::mutex> lock(engine().mutex);
    if (store->dying_blocks == 0) break;
    engine().finished_cv.wait_for(lock, std::chrono::milliseconds(50));
    lock.unlock();
    if (engine().interrupted()) return fail("interrupted");
  }
  std::lock_guard<std::mutex> lock(store->extent_mutex);
  int64_t offset = store->extents.take(capacity);
  if (offset < 0 && grow(*store, capacity) == 0) offset = store->extents.take(capacity);
  return offset;
}

}  // namespace
}  // namespace zinf

using namespace zinf;

extern "C" {
int64_t zinf_store_open(const char* directory, int64_t reserve_bytes) {
  if (engine().forked_child) return fail("a forked child process cannot open a store: open it in a process of its own");
  auto store = std::make_shared<Store>();
  store->path = std::string(directory) + "/data.bin";
  store->buffered_fd = open(store->path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (store->buffered_fd < 0) return fail("cannot create the store file " + store->path + ": " + errno_text(errno));
  struct statfs fs {};
  if (fstatfs(store->buffered_fd, &fs) == 0) store->in_memory = fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC;
  if (grow(*store, std::max<int64_t>(reserve_bytes, page_size())) != 0) {
    std::string message = zinf_last_error();
    unlink(store->path.c_str());
    return fail(message);
  }
  store->direct_fd = open(store->path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (store->direct_fd >= 0 && !direct_is_coherent(store->direct_fd, store->buffered_fd)) {
    ::close(store->direct_fd);
    store->direct_fd = -1;
  }
  std::lock_guard<std::mutex> lock(engine().mutex);
  store->handle = engine().next_store++;
  engine().stores[store->handle] = store;
  return store->handle;
}

int zinf_store_grow(int64_t handle, int64_t more_bytes) {
  auto store = engine().find_store(handle);
  if (!store) return -1;
  std::lock_guard<std::mutex> lock(store->extent_mutex);
  return grow(*store, more_bytes);
}

int zinf_store_close(int64_t handle) {
  auto store = engine().find_store(handle);
  if (!store) return -1;
  {
    std::lock_guard<std::mutex> lock(engine().mutex);
    engine().stores.erase(handle);
    store->closed = true;  // from here on transfers go through the mappings
  }
  engine().quiesce(store);
  if (engine().forked_child) return 0;
  for (int* fd : {&store->buffered_fd, &store->direct_fd}) {
    if (*fd >= 0) ::close(*fd);
    *fd = -1;
  }
  return 0;
}

int zinf_store_direct(int64_t handle) {
  auto store = engine().find_store(handle);
  return store ? store->direct_fd >= 0 : -1;
}

int zinf_store_drain(int64_t handle) {
  auto store = engine().find_store(handle);
  return store ? engine().drain(store) : -1;
}

int zinf_store_write_window(int64_t handle, int64_t nbytes) {
  auto store = engine().find_store(handle);
  if (!store) return -1;
  std::lock_guard<std::mutex> lock(engine().mutex);
  store->window = std::max<int64_t>(nbytes, 0);
  return 0;
}

int64_t zinf_store_free_bytes(int64_t handle) {
  auto store = engine().find_store(handle);
  if (!store) return -1;
  std::lock_guard<std::mutex> lock(store->extent_mutex);
  return store->extents.free_bytes();
}

void* zinf_block_new(int64_t handle, int64_t nbytes) {
  auto store = engine().find_store(handle);
  if (!store) return nullptr;
  if (nbytes <= 0 || engine().forked_child) {
    fail(nbytes <= 0 ? "a block needs at least one byte" : "a forked child process cannot use the store of its parent");
    return nullptr;
  }
  auto block = std::make_shared<Block>();
  int64_t capacity = round_up(nbytes, page_size());
  int64_t offset = take_extent(store, capacity);
  if (offset < 0) return nullptr;
  block->store = store;  // from here on ~Block gives the extent back
  block->offset = offset;
  block->nbytes = nbytes;
  block->capacity = capacity;
  std::unique_lock<std::mutex> lock(engine().mutex);
  if (store->closed) {
    lock.unlock();
    fail("the store " + store->path + " is closed");
    return nullptr;
  }
  void* base = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, store->buffered_fd, offset);
  if (base == MAP_FAILED) {
    int error = errno;
    lock.unlock();
    fail("cannot map " + std::to_string(capacity) + " bytes of " + store->path + ": " + errno_text(error) +
         (error == ENOMEM ? ". The process may hold too many mappings (vm.max_map_count)" : ""));
    return nullptr;
  }
  block->base = static_cast<char*>(base);
  engine().blocks[base] = block;
  lock.unlock();
  if (capacity > nbytes) memset(block->base + nbytes, 0, capacity - nbytes);
  trimmer_notify();
  return base;
}

// Never blocks: a tensor may be freed by a thread that holds Python's lock. Transfers in flight keep the mapping and the
// extent until they are done.
int zinf_block_free(void* address) {
  if (auto hook = engine().block_free_hook.load()) hook(address);
  std::shared_ptr<Block> block;
  std::lock_guard<std::mutex> lock(engine().mutex);
  auto it = engine().blocks.find(address);
  if (it == engine().blocks.end()) return fail("no block of a store starts at this address");
  block = std::move(it->second);
  engine().blocks.erase(it);
  block->dying = true;
  block->counted_dying = !block->pending.empty();
  if (block->counted_dying) ++block->store->dying_blocks;
  return 0;
}

int64_t zinf_block_bytes(const void* address) {
  auto block = engine().find(address);
  return block ? block->nbytes : -1;
}

int64_t zinf_block_store(const void* address) {
  auto block = engine().find(address);
  return block ? block->store->handle : -1;
}

int64_t zinf_block_count(void) {
  std::lock_guard<std::mutex> lock(engine().mutex);
  return static_cast<int64_t>(engine().blocks.size());
}

int zinf_block_drop(void* address) {
  auto block = engine().find(address);
  if (!block) return fail("no block of a store starts at this address");
  return madvise(block->base, block->capacity, MADV_DONTNEED) == 0 ? 0 : fail("madvise: " + errno_text(errno));
}

void zinf_set_block_free_hook(void (*hook)(void*)) { engine().block_free_hook = hook; }
}
