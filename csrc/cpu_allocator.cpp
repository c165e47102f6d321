// torch's CPU allocator under a memory limit: counts every block, keeps freed pages, places planned blocks, spills the
// rest. This file is the hook into torch and the C interface; cpu_heap.h says how it works.
#include "cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include "cpu_heap.h"

namespace zinf::alloc {
namespace {

constexpr size_t kLookBlock = 512 << 10;  // filling a block of this size takes much longer than a look at what is resident

// Never destroyed: tensors outlive static destructors.
State& state() {
  static State* s = new State;
  return *s;
}

// A fork has copies of the private pages, and would share the spilled ones with its parent: it gets those
// copy-on-write. It has no limit (its parent's bytes are shared with it, not its own), no recording, and does not touch
// the parent's file.
void after_fork_in_child() {
  State& s = state();
  for (auto& [address, block] : s.blocks) {
    if (block.segment) continue;
    block.file->inherited = true;
    mmap(const_cast<void*>(address), block.nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, block.file->fd,
         block.offset);
  }
  s.spill.reset();
  s.n.limit = s.n.strict = s.n.over_limit = 0;
  s.recording = false;
  s.open_marks.clear();
  s.mutex.unlock();
}

void deallocate(void* p) {
  if (!p) return;
  c10::profiledCPUMemoryReporter().Delete(p);
  State& s = state();
  std::unique_lock lock(s.mutex);
  // Page blocks are page-aligned; a small block may be by chance, but then no page block starts at its address.
  if (reinterpret_cast<uintptr_t>(p) % kPage == 0) {
    if (auto it = s.blocks.find(p); it != s.blocks.end()) {
      Block block = std::move(it->second);
      s.blocks.erase(it);
      if (!block.segment) {
        lock.unlock();  // file system work
        munmap(p, block.nbytes);
        if (!block.file->inherited)  // where holes are not supported the extent keeps its disk space and is used again
          (void)!fallocate(block.file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block.offset, block.nbytes);
        lock.lock();
      }
      s.release(block);
      return;
    }
  }
  void* head = static_cast<char*>(p) - kSmallAlign;
  int64_t nbytes = *static_cast<int64_t*>(head);
  s.n.small -= nbytes;
  s.account(-nbytes);
  lock.unlock();
  free(head);
}

struct CpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* p = nullptr;
    if (nbytes) {
      if (nbytes >= kLookBlock) trimmer_look();
      std::string error;
      {
        std::lock_guard lock(state().mutex);
        p = state().allocate(int64_t(std::min<size_t>(nbytes, INT64_MAX)), error);
      }
      TORCH_CHECK(p, error);
      c10::profiledCPUMemoryReporter().New(p, nbytes);
    }
    return {p, p, &deallocate, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
CpuAllocator& allocator() {
  static CpuAllocator* a = new CpuAllocator;
  return *a;
}

int fail(std::string message) {
  last_error = std::move(message);
  return -1;
}

// An unlinked file; O_TMPFILE never has a name, other file systems need one for a moment.
int open_unlinked(const std::string& directory) {
  int fd = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  std::string name = directory + "/zinf-spill-XXXXXX";
  fd = mkostemp(name.data(), O_CLOEXEC);
  if (fd >= 0) unlink(name.c_str());
  return fd;
}

}  // namespace
}  // namespace zinf::alloc

using namespace zinf::alloc;
using Lock = std::lock_guard<std::mutex>;

// The first n entries of a log, or as many as there are; returns their number.
template <class T>
static int64_t copied(std::vector<T> State::*log, T* out, int64_t n) {
  State& s = state();
  Lock lock(s.mutex);
  n = std::min(n, int64_t((s.*log).size()));
  std::copy_n((s.*log).begin(), n, out);
  return n;
}

extern "C" {

const char* zinf_alloc_last_error(void) { return last_error.c_str(); }
int64_t zinf_alloc_page(void) { return kPage; }

void zinf_alloc_fork_handlers(void) {
  static const int registered =
      pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, after_fork_in_child);
  (void)registered;
}

int64_t zinf_alloc_install(void) {
  State& s = state();
  zinf_alloc_fork_handlers();
  Lock lock(s.mutex);
  if (s.installs++ == 0) {
    s.previous = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&allocator(), 255);
  }
  return s.installs;
}

int64_t zinf_alloc_uninstall(void) {
  State& s = state();
  Lock lock(s.mutex);
  if (s.installs == 0 || --s.installs > 0) return s.installs;
  // Somebody who replaced us in the meantime stays.
  if (c10::GetCPUAllocator() == &allocator()) c10::SetCPUAllocator(s.previous, 255);
  s.n.limit = s.n.strict = s.n.over_limit = 0;
  s.spill.reset();
  s.recording = false;
  s.account(-std::exchange(s.n.external, 0));  // who counted them is gone; the next user starts from nothing
  s.plans.clear();
  s.retire_region();
  s.trim(kLargest);
  return 0;
}

int zinf_alloc_set_limit(int64_t limit, int strict, const char* spill_dir, int64_t spill_threshold) {
  State& s = state();
  if (limit < 0 || spill_threshold < 0)
    return fail("zinf: a limit and a spill threshold are bytes >= 0 (0: none, default)");
  Lock lock(s.mutex);
  if (!spill_dir) {
    s.spill.reset();
  } else if (!s.spill || s.spill->directory != spill_dir) {
    int fd = open_unlinked(spill_dir);
    if (fd < 0)
      return fail("zinf: cannot make a spill file in " + std::string(spill_dir) + ": " + std::strerror(errno) +
                  ". Name a writable directory.");
    s.spill.reset(new SpillFile{spill_dir, fd});
  }
  s.n.limit = limit;
  s.n.strict = strict != 0;
  s.spill_threshold = std::max<int64_t>(spill_threshold ? spill_threshold : 1 << 20, kPageBlock);
  s.make_room(0);
  s.account(0);
  return 0;
}

int64_t zinf_alloc_external(int64_t delta) {
  State& s = state();
  Lock lock(s.mutex);
  if (s.n.external + delta < 0)
    return fail("zinf: external bytes would become negative (" + std::to_string(s.n.external) + " + " +
                std::to_string(delta) + ")");
  s.n.external += delta;
  s.make_room(0);
  s.account(delta);
  return s.n.external;
}

int64_t zinf_alloc_trim(int64_t keep) {
  State& s = state();
  Lock lock(s.mutex);
  int64_t excess = s.page_committed - s.page_live - std::max<int64_t>(keep, 0);
  return excess > 0 ? s.trim(excess) : 0;
}

int64_t zinf_alloc_spill_drop(void) {
  State& s = state();
  Lock lock(s.mutex);
  int64_t sum = 0;
  for (auto& [address, block] : s.blocks) {
    if (block.segment || block.file->inherited) continue;  // a fork's private copies live only in its pages
    if (madvise(const_cast<void*>(address), block.nbytes, MADV_DONTNEED) == 0) sum += block.nbytes;
  }
  return sum;
}

void zinf_alloc_stats_get(zinf_alloc_stats* out) {
  State& s = state();
  Lock lock(s.mutex);
  *out = s.n;
  out->committed = s.committed();
  out->retained = s.page_committed - s.page_live;
  out->blocks = int64_t(s.blocks.size());
  out->region = s.region ? s.region->size : 0;
  out->region_committed = s.region ? s.region->committed_bytes : 0;
}

void zinf_alloc_reset_peak(void) {
  State& s = state();
  Lock lock(s.mutex);
  s.n.peak = s.n.live;
  s.n.committed_peak = s.committed();
  s.n.spilled_peak = s.n.spilled;
  s.n.over_limit_peak = s.n.over_limit;
}

int zinf_alloc_begin(int64_t instance) {
  if (instance < 0) return fail("zinf: an instance is a number >= 0, not " + std::to_string(instance));
  if (cursor.depth == kMaxNesting) return fail("zinf: more than 64 nested graph runs on one thread");
  Frame frame{instance, 0, -1, 0, 0};
  State& s = state();
  {
    Lock lock(s.mutex);
    if (s.recording) {
      frame = {instance, 0, s.next_mark++, s.clock++, s.n.live};
      s.open_marks.emplace_back(frame.mark, s.n.live);
    }
  }
  cursor.frames[cursor.depth++] = frame;
  return 0;
}

int zinf_alloc_end(void) {
  if (!cursor.depth) return fail("zinf: zinf_alloc_end without zinf_alloc_begin on this thread");
  Frame frame = cursor.frames[--cursor.depth];
  if (frame.mark < 0) return 0;
  State& s = state();
  Lock lock(s.mutex);
  std::erase_if(s.open_marks, [&](auto& mark) {
    if (mark.first != frame.mark) return false;
    if (s.recording)
      s.marks.push_back({frame.instance, frame.begin, s.clock++, frame.live_begin, s.n.live, mark.second, frame.k});
    return true;
  });
  return 0;
}

int zinf_alloc_region(int64_t nbytes) {
  State& s = state();
  Lock lock(s.mutex);
  if (nbytes > 0 && s.region && s.region->size >= nbytes) return 0;
  if (nbytes < 0 || nbytes > kLargest)
    return fail("zinf: a planned region of " + std::to_string(nbytes) + " bytes is not possible");
  std::unique_ptr<Segment> fresh;
  if (nbytes > 0) {
    nbytes = page_round(nbytes);
    if (!(fresh = s.reserve(nbytes, nbytes)))
      return fail("zinf: no address space for a planned region of " + mib(nbytes) + "; raise RLIMIT_AS");
    fresh->region = true;
  }
  s.retire_region();
  s.region = std::move(fresh);
  return 0;
}

void* zinf_alloc_region_base(void) {
  State& s = state();
  Lock lock(s.mutex);
  return s.region ? s.region->base : nullptr;
}

int zinf_alloc_plan(int64_t instance, int64_t n, const int64_t* sizes, const int64_t* offsets) {
  State& s = state();
  Lock lock(s.mutex);
  if (instance < 0 || n < 0) return fail("zinf: a plan needs an instance >= 0 and a length >= 0");
  PlanTable plan{{sizes, sizes + n}, {offsets, offsets + n}};
  int64_t size = s.region ? s.region->size : 0;
  for (int64_t k = 0; k < n; ++k) {
    if (plan.sizes[k] < 0 || plan.sizes[k] > kLargest)
      return fail("zinf: block " + std::to_string(k) + " of the plan has a bad size");
    plan.sizes[k] = page_round(plan.sizes[k]);
    int64_t at = plan.offsets[k];
    if (at != -1 && (at < 0 || at % kPage || at > size || plan.sizes[k] > size - at))
      return fail("zinf: block " + std::to_string(k) + " of the plan of instance " + std::to_string(instance) + ", " +
                  std::to_string(plan.sizes[k]) + " bytes at offset " + std::to_string(at) +
                  ", is not page-aligned inside the region of " + std::to_string(size) +
                  " bytes; call zinf_alloc_region first");
  }
  s.plans[instance] = std::move(plan);
  return 0;
}

int zinf_alloc_plan_clear(int64_t instance) {
  State& s = state();
  Lock lock(s.mutex);
  return s.plans.erase(instance) ? 0 : fail("zinf: instance " + std::to_string(instance) + " has no plan");
}

int zinf_alloc_plan_counts(int64_t instance, int64_t* planned, int64_t* missed) {
  State& s = state();
  Lock lock(s.mutex);
  auto it = s.plans.find(instance);
  if (it == s.plans.end()) return fail("zinf: instance " + std::to_string(instance) + " has no plan");
  *planned = it->second.planned;
  *missed = it->second.missed;
  return 0;
}

int64_t zinf_alloc_place(const void* address) {
  State& s = state();
  Lock lock(s.mutex);
  auto it = s.blocks.find(address);
  return it == s.blocks.end() ? -3 : State::place(it->second);
}

void zinf_alloc_record(int on) {
  State& s = state();
  Lock lock(s.mutex);
  s.recording = on != 0;
}

int64_t zinf_alloc_log_size(void) {
  State& s = state();
  Lock lock(s.mutex);
  return int64_t(s.log.size());
}

int64_t zinf_alloc_log_get(zinf_alloc_record_t* out, int64_t n) {
  return copied(&State::log, out, n);
}

int64_t zinf_alloc_marks_size(void) {
  State& s = state();
  Lock lock(s.mutex);
  return int64_t(s.marks.size());
}

int64_t zinf_alloc_marks_get(zinf_alloc_mark_t* out, int64_t n) {
  return copied(&State::marks, out, n);
}

void zinf_alloc_log_clear(void) {
  State& s = state();
  Lock lock(s.mutex);
  s.log.clear();
  s.marks.clear();
  s.generation++;
  s.foreign = 0;
}
}
