// Page trimmer: code that walks over mapped memory (blocks of a store, tensors that the CPU allocator has spilled) brings
// its pages into this process, where they count as its memory. A thread looks at the resident file pages every 2 ms, while
// there is such memory, and drops its pages when the growth passes the allowance. Contents are safe: the page cache and the
// file have them; the next access maps them again. Where the machine is busy the thread comes late, so whoever allocates a
// large tensor looks as well. There is no thread before it is first needed; afterwards it sleeps until it is needed again. A
// forked child trims nothing: the thread stays with the parent.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <thread>

#include "engine.h"

namespace zinf {
namespace {

constexpr int64_t kLeast = 1 << 20, kMost = 16 << 20;  // of an allowance that nobody has set

struct Trimmer {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int64_t> allowance{-1};  // bytes, as set; < 0: only spilled memory is trimmed, at an allowance of its own
  std::atomic<int64_t> spilled{0}, spill_allowance{kLeast};
  std::atomic<int64_t (*)(void)> drop_spilled{nullptr};
  std::atomic<int64_t> drops{0};
  // Guarded by `mutex`:
  bool started = false;
  bool news = false;  // something has changed since the thread last looked
  // One looks at a time. Taken before the locks of the engine and of the allocator, never inside of `mutex`:
  std::mutex look_mutex;
  int statm = -1;         // descriptor of /proc/self/statm
  int64_t baseline = -1;  // file pages that are not ours: libraries, data that the user maps; < 0: not known yet

  // Bytes of file and shared pages that this process has resident, -1 if unknown.
  static int64_t resident_shared(int fd) {
    char text[128];
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    if (n <= 0) return -1;
    text[n] = 0;
    long size = 0, resident = 0, shared = 0;
    if (sscanf(text, "%ld %ld %ld", &size, &resident, &shared) != 3) return -1;
    return shared * sysconf(_SC_PAGESIZE);
  }

  static bool any_block() {
    std::lock_guard<std::mutex> lock(engine().mutex);
    return !engine().blocks.empty();
  }

  // The allowance in force, < 0 while there is nothing to trim.
  int64_t in_force() const {
    if (allowance >= 0) return spilled > 0 || any_block() ? allowance.load() : -1;
    return spilled > 0 ? spill_allowance.load() : -1;
  }

  void drop_all() const {
    std::vector<std::shared_ptr<Block>> blocks;
    {
      std::lock_guard<std::mutex> lock(engine().mutex);
      blocks.reserve(engine().blocks.size());
      for (auto& [address, block] : engine().blocks) blocks.push_back(block);
    }
    for (auto& block : blocks) madvise(block->base, block->capacity, MADV_DONTNEED);
    if (auto drop = drop_spilled.load(); drop && spilled > 0) drop();
  }

  // Drops everything if more than the allowance has come in. False: there is nothing to trim.
  bool look() {
    std::lock_guard<std::mutex> lock(look_mutex);
    int64_t limit = in_force();
    if (limit < 0) {
      baseline = -1;
      return false;
    }
    if (statm < 0) statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    if (baseline < 0) drop_all();  // so that the baseline holds none of ours
    int64_t now = resident_shared(statm);
    if (baseline < 0) baseline = now;
    if (now < baseline) baseline = now;
    if (now >= 0 && now > baseline + limit) {
      drop_all();
      ++drops;
      baseline = resident_shared(statm);  // what is left is not ours
    }
    return true;
  }

  void run() {
    pthread_setname_np(pthread_self(), "zinf-trim");
    for (;;) {
      if (look()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [&] { return news; });
      news = false;
    }
  }

  // Starts the thread if there is something to trim and none yet, and makes it look again.
  void wake() {
    if (engine().forked_child) return;
    bool needed = in_force() >= 0;  // may take the engine's lock: not under ours, which the allocator takes under its own
    std::lock_guard<std::mutex> lock(mutex);
    news = true;
    if (started) {
      changed.notify_all();
      return;
    }
    if (!needed) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { run(); }).detach();
      started = true;
    } catch (const std::system_error&) {  // no thread to be had now: the next change tries again
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
};

Trimmer& trimmer() {
  static auto* one = new Trimmer;
  return *one;
}

}  // namespace

void trimmer_notify() { trimmer().wake(); }

void trimmer_look() {
  auto& t = trimmer();
  if ((t.spilled > 0 || t.allowance >= 0) && !engine().forked_child) t.look();
}

void trimmer_spilled(int64_t bytes, int64_t limit, int64_t (*drop)(void)) {
  auto& t = trimmer();
  bool more = bytes > t.spilled.exchange(bytes);
  if (!more) return;
  t.drop_spilled = drop;
  t.spill_allowance = std::clamp(limit / 16, kLeast, kMost);
  t.wake();
}

}  // namespace zinf

extern "C" {
int zinf_trimmer(int64_t allowance_bytes) {
  auto& t = zinf::trimmer();
  t.allowance = allowance_bytes;
  t.wake();
  if (allowance_bytes < 0) std::lock_guard<std::mutex>{t.look_mutex};  // a look that has begun has ended on return
  return 0;
}

int64_t zinf_trimmer_drops(void) { return zinf::trimmer().drops; }
}
