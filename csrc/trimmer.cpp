// Page trimmer: user code that walks over mapped tensors brings their pages into this process, where they count as its
// memory. A thread looks at the resident file pages every 2 ms, while there are blocks, and drops the blocks' pages when
// the growth passes the allowance. Contents are safe: the page cache and the file have them; the next access maps them again.
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "engine.h"

namespace zinf {
namespace {

struct Trimmer {
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<int64_t> allowance{-1};  // bytes; < 0: off
  std::atomic<int64_t> drops{0};
  bool started = false;

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

  static void drop_all() {
    std::vector<std::shared_ptr<Block>> blocks;
    {
      std::lock_guard<std::mutex> lock(engine().mutex);
      blocks.reserve(engine().blocks.size());
      for (auto& [address, block] : engine().blocks) blocks.push_back(block);
    }
    for (auto& block : blocks) madvise(block->base, block->capacity, MADV_DONTNEED);
  }

  void run() {
    pthread_setname_np(pthread_self(), "zinf-trim");
    int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    int64_t baseline = -1;  // file pages that are not ours: libraries, data that the user maps
    for (;;) {
      if (allowance < 0 || !any_block()) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait_for(lock, std::chrono::milliseconds(200));
        baseline = -1;
        continue;
      }
      if (baseline < 0) drop_all();  // so that the baseline holds none of ours
      int64_t now = resident_shared(fd);
      if (baseline < 0) baseline = now;
      if (now < baseline) baseline = now;
      if (now >= 0 && now > baseline + allowance) {
        drop_all();
        ++drops;
        baseline = resident_shared(fd);  // what is left is not ours
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
};

Trimmer& trimmer() {
  static auto* one = new Trimmer;
  return *one;
}

}  // namespace

void trimmer_notify() { trimmer().changed.notify_all(); }

}  // namespace zinf

extern "C" {
int zinf_trimmer(int64_t allowance_bytes) {
  auto& trimmer = zinf::trimmer();
  if (zinf::engine().forked_child) return 0;
  trimmer.allowance = allowance_bytes;
  {
    std::lock_guard<std::mutex> lock(trimmer.mutex);
    if (!trimmer.started && allowance_bytes >= 0) {
      trimmer.started = true;
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      std::thread([&trimmer] { trimmer.run(); }).detach();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  }
  trimmer.changed.notify_all();
  return 0;
}

int64_t zinf_trimmer_drops(void) { return zinf::trimmer().drops; }
}
