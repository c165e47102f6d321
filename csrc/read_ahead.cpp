// Optimizer states that are read while the backward still runs, so that the update finds them in memory. `zinf::read_ahead`
// is given a parameter; which blocks its states are was said before (zinf_ahead_states). A copy belongs to the block that it
// was read from: the block is write-protected meanwhile, and whoever frees or rewrites it drops the copy (zinf_ahead_drop).
#include <pthread.h>
#include <sys/mman.h>

#include "cpu_allocator.h"
#include "engine.h"

namespace zinf {
namespace {

struct Ahead {
  char* memory = nullptr;
  int64_t nbytes = 0, capacity = 0, ticket = 0;
};

struct Table {
  std::mutex mutex;  // taken before the engine's
  std::unordered_map<const void*, std::vector<void*>> states;  // address of a parameter -> blocks
  std::unordered_map<void*, Ahead> copies;                      // by block
  std::vector<Ahead> abandoned;                                 // the disk may still write into these
  std::atomic<bool> allowed{false};
  std::atomic<int64_t> taken{0};
};

Table& table() {
  static auto* one = new Table;
  return *one;
}

void unmap(const std::vector<Ahead>& copies) {
  for (auto& copy : copies) {
    munmap(copy.memory, copy.capacity);
    zinf_alloc_external(-copy.capacity);
  }
}

// Hands over the abandoned copies that no read writes into any more. With the mutex held.
std::vector<Ahead> swept(Table& t) {
  std::vector<Ahead> done, rest;
  for (auto& copy : t.abandoned) (zinf_poll(copy.ticket) ? done : rest).push_back(copy);
  t.abandoned.swap(rest);
  return done;
}

void start(void* block) {
  Table& t = table();
  int64_t nbytes = zinf_block_bytes(block);
  if (nbytes <= 0) return;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    if (t.copies.count(block)) return;
  }
  Ahead copy;
  copy.nbytes = nbytes;
  copy.capacity = round_up(nbytes, kAlign);
  void* memory = mmap(nullptr, copy.capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;  // the update reads it itself
  madvise(memory, copy.capacity, MADV_DONTFORK);  // a fork must not turn pages under direct I/O into copies
  copy.memory = static_cast<char*>(memory);
  zinf_alloc_external(copy.capacity);
  // Protected first: whatever is written from here on makes the copy stale.
  if (zinf_block_protect(block) != 0 || (copy.ticket = zinf_read(block, 0, copy.memory, nbytes)) < 0) return unmap({copy});
  std::lock_guard<std::mutex> lock(t.mutex);
  t.copies[block] = copy;
}

}  // namespace

AheadCopy ahead_find(void* block, int64_t nbytes) {
  Table& t = table();
  std::lock_guard<std::mutex> lock(t.mutex);
  auto it = t.copies.find(block);
  if (it == t.copies.end() || it->second.nbytes < nbytes || zinf_block_dirty(block)) return {};
  return {it->second.memory, it->second.ticket};
}

void ahead_took(int64_t nbytes) { table().taken += nbytes; }

void ahead_fork_handlers() {
  pthread_atfork([] { table().mutex.lock(); }, [] { table().mutex.unlock(); },
                 [] {  // the memory is not there in a child
                   table().copies.clear();
                   table().abandoned.clear();
                   table().allowed = false;
                   table().mutex.unlock();
                 });
}

}  // namespace zinf

extern "C" {
void zinf_ahead_states(const void* master, int32_t count, void* const* blocks) {
  auto& t = zinf::table();
  std::lock_guard<std::mutex> lock(t.mutex);
  if (count > 0) t.states[master].assign(blocks, blocks + count);
  else t.states.erase(master);
}

void zinf_ahead_allow(int allowed) { zinf::table().allowed = allowed != 0; }

void zinf_ahead_start(const void* master) {
  auto& t = zinf::table();
  if (!t.allowed) return;
  std::vector<void*> blocks;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    auto it = t.states.find(master);
    if (it != t.states.end()) blocks = it->second;
  }
  for (void* block : blocks) zinf::start(block);
}

int64_t zinf_ahead_count(void) {
  std::lock_guard<std::mutex> lock(zinf::table().mutex);
  return static_cast<int64_t>(zinf::table().copies.size());
}

int64_t zinf_ahead_bytes(void) {
  auto& t = zinf::table();
  std::lock_guard<std::mutex> lock(t.mutex);
  int64_t total = 0;
  for (auto& [block, copy] : t.copies) total += copy.capacity;
  for (auto& copy : t.abandoned) total += copy.capacity;
  return total;
}

int64_t zinf_ahead_taken(void) { return zinf::table().taken; }

void zinf_ahead_drop(void* block) {
  auto& t = zinf::table();
  std::vector<zinf::Ahead> done;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    auto it = t.copies.find(block);
    if (it == t.copies.end()) return;
    t.abandoned.push_back(it->second);
    t.copies.erase(it);
    done = zinf::swept(t);
  }
  zinf::unmap(done);
}

void zinf_ahead_forget(void) {
  auto& t = zinf::table();
  std::vector<zinf::Ahead> done;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    for (auto& [block, copy] : t.copies) t.abandoned.push_back(copy);
    t.copies.clear();
    t.states.clear();
    done = zinf::swept(t);
  }
  zinf::unmap(done);
}
}
