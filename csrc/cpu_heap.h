// The CPU allocator's state: where each block lies, which pages are held, what is counted. cpu_allocator.cpp is its
// only user and holds its mutex around every call.
//
// Blocks under 16 KiB come from malloc with a 64-byte header that holds their size. Larger ones are whole pages cut by
// best fit from a reserved range (the heap), from the planned region, or, past the limit, from an unlinked file. A page
// is *committed* from its first hand-out until it is given back with MADV_DONTNEED; committed = live + retained. A
// block of n bytes that needs d new pages is granted when live + n <= limit, after giving back retained pages until
// committed + d <= limit. That always succeeds: the retained pages outside the chosen range are
// committed - live - (n - d), and committed + d - limit <= committed - live - (n - d)  <=>  live + n <= limit.
#pragma once
#include <c10/core/Allocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cpu_allocator.h"
#include "intervals.h"
#include "trimmer.h"

namespace zinf::alloc {

constexpr int64_t kPageBlock = 16 << 10;        // from this size on, blocks are whole pages
constexpr int64_t kSmallAlign = 64;
constexpr int64_t kReserve = int64_t{1} << 40;  // address space of the heap; pages cost nothing until they are used
constexpr int64_t kReserveBounded = 256 << 20;  // the same where RLIMIT_AS counts reserved address space
constexpr int64_t kTrimStep = 1 << 20;          // give back at least this much of a hole: fewer system calls
constexpr int64_t kLargest = int64_t{1} << 46;
constexpr int kMaxNesting = 64;
inline const int64_t kPage = sysconf(_SC_PAGESIZE);

inline int64_t page_round(int64_t n) { return (n + kPage - 1) / kPage * kPage; }

inline std::string mib(int64_t n) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", double(n) / (1 << 20));
  return text;
}

// One reserved virtual range: a piece of the heap, or the planned region.
struct Segment {
  char* base;
  int64_t size;
  FreeRanges free;
  Intervals committed;
  int64_t committed_bytes = 0, live = 0;
  bool region = false, retired = false;
};

// One unlinked file whose extents back spilled blocks. Kept open by the blocks in it.
struct SpillFile {
  std::string directory;
  int fd;
  FreeRanges free{kLargest};
  bool inherited = false;  // this process is a fork: the file is the parent's
  ~SpillFile() { close(fd); }
};

struct Block {
  int64_t nbytes, offset;
  Segment* segment;                  // null: spilled
  std::shared_ptr<SpillFile> file;
  int64_t log, generation;           // index in the log of that generation, -1: not logged
};

struct PlanTable {
  std::vector<int64_t> sizes, offsets;
  int64_t planned = 0, missed = 0;
};

struct Frame { int64_t instance, k, mark, begin, live_begin; };
struct Cursor { int depth; Frame frames[kMaxNesting]; };
inline thread_local Cursor cursor;
inline thread_local std::string last_error;

struct State {
  std::mutex mutex;
  zinf_alloc_stats n{};  // live, peaks, counters; retained and blocks are computed on reading
  int64_t page_live = 0, page_committed = 0, spill_threshold = 1 << 20;
  std::vector<std::unique_ptr<Segment>> heap, retired;
  std::unique_ptr<Segment> region;
  std::shared_ptr<SpillFile> spill;
  std::unordered_map<const void*, Block> blocks;
  std::unordered_map<int64_t, PlanTable> plans;

  bool recording = false;
  int64_t clock = 0, generation = 0, foreign = 0, next_mark = 0;
  std::vector<zinf_alloc_record_t> log;
  std::vector<zinf_alloc_mark_t> marks;
  std::vector<std::pair<int64_t, int64_t>> open_marks;  // (mark, peak so far)

  int64_t installs = 0;
  c10::Allocator* previous = nullptr;

  int64_t committed() const { return page_committed + n.small + n.external; }

  void account(int64_t delta) {  // live changed by delta; committed may have grown
    n.live += delta;
    n.peak = std::max(n.peak, n.live);
    n.committed_peak = std::max(n.committed_peak, committed());
    n.over_limit = n.limit ? std::max<int64_t>(0, n.live - n.limit) : 0;
    n.over_limit_peak = std::max(n.over_limit_peak, n.over_limit);
    if (delta > 0) for (auto& mark : open_marks) mark.second = std::max(mark.second, n.live);
  }

  // ---- pages --------------------------------------------------------------------------------------------------------
  std::unique_ptr<Segment> reserve(int64_t want, int64_t least) {
    for (; want >= least; want = want / 2 >= least || want == least ? want / 2 : least) {
      void* p = mmap(nullptr, want, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) continue;
      madvise(p, want, MADV_NOHUGEPAGE);  // a huge page would bring in neighbours that are not counted
      return std::unique_ptr<Segment>(new Segment{static_cast<char*>(p), want, FreeRanges(want), {}});
    }
    return nullptr;
  }

  bool commit(Segment& s, int64_t begin, int64_t end) {
    bool ok = true;
    int64_t added = 0;
    s.committed.gaps(begin, end, [&](int64_t a, int64_t b) {
      // Only used pages are writable: RLIMIT_DATA counts private writable mappings, touched or not.
      ok = ok && mprotect(s.base + a, b - a, PROT_READ | PROT_WRITE) == 0;
      added += b - a;
    });
    if (!ok) return false;
    if (added) s.committed.add(begin, end);
    s.committed_bytes += added;
    page_committed += added;
    return true;
  }

  void uncommit(Segment& s, int64_t begin, int64_t end) {  // [begin, end) is committed and free
    if (madvise(s.base + begin, end - begin, MADV_DONTNEED)) return;  // locked pages: they stay, and stay counted
    rlimit data{};
    getrlimit(RLIMIT_DATA, &data);
    if (data.rlim_cur != RLIM_INFINITY) mprotect(s.base + begin, end - begin, PROT_NONE);
    s.committed.remove(begin, end);
    s.committed_bytes -= end - begin;
    page_committed -= end - begin;
    n.trimmed += end - begin;
  }

  // Gives back at least `need` bytes of retained pages, largest hole first, planned region last (its pages will be used
  // again by the next run); from the high end of a hole, since best fit cuts at the low one.
  int64_t trim(int64_t need) {
    struct Hole { int64_t length; Segment* segment; int64_t begin, end; };
    std::vector<Hole> holes;
    auto gather = [&](Segment* s) {
      if (s->committed_bytes == s->live) return;
      s->free.each([&](int64_t a, int64_t b) {
        s->committed.parts(a, b, [&](int64_t x, int64_t y) { holes.push_back({y - x, s, x, y}); });
      });
    };
    for (auto& s : heap) gather(s.get());
    if (region) gather(region.get());
    std::stable_sort(holes.begin(), holes.end(), [](const Hole& a, const Hole& b) {
      return a.segment->region != b.segment->region ? b.segment->region : a.length > b.length;
    });
    int64_t before = page_committed;
    for (auto& hole : holes) {
      int64_t left = need - (before - page_committed);
      if (left <= 0) break;
      uncommit(*hole.segment, hole.end - std::min(hole.length, page_round(std::max(left, kTrimStep))), hole.end);
    }
    return before - page_committed;
  }

  void make_room(int64_t new_bytes) {
    int64_t excess = n.limit ? committed() + new_bytes - n.limit : 0;
    if (excess > 0) trim(excess);
  }

  // The range is already taken from s.free. False: the kernel has no memory for it; the range is free again.
  bool settle(Segment& s, int64_t offset, int64_t nbytes) {
    make_room(nbytes - s.committed.covered(offset, offset + nbytes));
    bool ok = commit(s, offset, offset + nbytes);
    if (!ok) { trim(kLargest); ok = commit(s, offset, offset + nbytes); }
    if (!ok) { s.free.give(offset, nbytes); return false; }
    s.live += nbytes;
    page_live += nbytes;
    return true;
  }

  // ---- the three places of a page block -----------------------------------------------------------------------------
  void* from_plan(const Frame& frame, int64_t k, Block& block) {
    auto it = plans.find(frame.instance);
    if (it == plans.end()) return nullptr;
    PlanTable& plan = it->second;
    bool known = k < int64_t(plan.sizes.size()) && plan.sizes[k] == block.nbytes;
    int64_t offset = known ? plan.offsets[k] : 0;
    if (known && offset < 0) return nullptr;
    if (!known) { n.missed_size++; plan.missed++; return nullptr; }
    // FreeRanges covers [0, size), so a slot past the end of a smaller, later region is simply not free.
    if (!region || !region->free.take_at(offset, block.nbytes) || !settle(*region, offset, block.nbytes)) {
      n.missed_busy++; plan.missed++;
      return nullptr;
    }
    n.planned++; plan.planned++;
    block.segment = region.get();
    block.offset = offset;
    return region->base + offset;
  }

  void* from_heap(Block& block) {
    Segment* s = nullptr;
    for (auto& candidate : heap) {
      if ((block.offset = candidate->free.take(block.nbytes)) >= 0) { s = candidate.get(); break; }
    }
    if (!s) {
      rlimit space{};
      getrlimit(RLIMIT_AS, &space);
      int64_t want = std::max(block.nbytes, space.rlim_cur == RLIM_INFINITY ? kReserve : kReserveBounded);
      auto fresh = reserve(want, block.nbytes);
      if (!fresh) {  // hand empty pieces back and try once more
        std::erase_if(heap, [&](auto& old) { return !old->live && unmap(*old); });
        fresh = reserve(block.nbytes, block.nbytes);
      }
      if (!fresh) return nullptr;
      s = heap.emplace_back(std::move(fresh)).get();
      block.offset = s->free.take(block.nbytes);
    }
    if (!settle(*s, block.offset, block.nbytes)) return nullptr;
    block.segment = s;
    return s->base + block.offset;
  }

  void* from_disk(Block& block, std::string& error) {
    block.file = spill;
    block.offset = spill->free.take(block.nbytes);
    int code = posix_fallocate(spill->fd, block.offset, block.nbytes);  // a hole met on a full disk would be a SIGBUS
    void* p = MAP_FAILED;
    if (!code) {
      p = mmap(nullptr, block.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, spill->fd, block.offset);
      if (p == MAP_FAILED) code = errno;
    }
    if (code) {
      struct statvfs disk{};
      statvfs(spill->directory.c_str(), &disk);
      spill->free.give(block.offset, block.nbytes);
      error = "zinf: cannot spill " + mib(block.nbytes) + " to " + spill->directory + ": " + std::strerror(code) +
              " (" + mib(int64_t(disk.f_bavail) * int64_t(disk.f_frsize)) + " free there, " + mib(n.spilled) +
              " spilled, " + mib(n.live) + " live of a limit of " + mib(n.limit) +
              "). Free disk space, name another store_dir, or raise mem_budget.";
      return nullptr;
    }
    n.spilled += block.nbytes;
    n.spilled_peak = std::max(n.spilled_peak, n.spilled);
    n.spills++;
    trimmer_spilled(n.spilled, n.limit, zinf_alloc_spill_drop);
    return p;
  }

  std::string refusal(int64_t asked, int64_t rounded) {
    return std::string("zinf: ") + (n.strict ? "strict budget" : "memory budget (no spill directory)") +
           " would be passed: this operation asks for " + mib(asked) + " (" + std::to_string(asked) + " bytes); " +
           mib(n.live) + " of " + mib(n.limit) + " are live. Raise mem_budget by at least " +
           mib(n.live + rounded - n.limit) + ", free tensors, or make the batch smaller" +
           (n.strict ? "; strict=False spills to store_dir instead."
                     : "; with a store_dir such blocks are spilled to disk.");
  }

  void* allocate(int64_t asked, std::string& error) {
    n.calls++;
    if (asked < kPageBlock) return allocate_small(asked, error);
    Frame* frame = cursor.depth ? &cursor.frames[cursor.depth - 1] : nullptr;
    int64_t k = frame ? frame->k++ : foreign++;
    if (asked > kLargest) {
      error = "zinf: an allocation of " + std::to_string(asked) + " bytes is not possible; is a size negative?";
      return nullptr;
    }
    Block block{page_round(asked), 0, nullptr, nullptr, -1, 0};
    bool over = n.limit && n.live + block.nbytes > n.limit, spillable = block.nbytes >= spill_threshold;
    void* p = nullptr;
    if (over && (n.strict || (spillable && !spill))) { error = refusal(asked, block.nbytes); return nullptr; }
    if (!(over && spillable)) {
      if (frame) p = from_plan(*frame, k, block);
      if (!p) p = from_heap(block);
      if (!p && !(spillable && spill)) {
        error = "zinf: the system refuses " + mib(asked) + " more memory (" + std::strerror(ENOMEM) + "; " +
                mib(n.live) + " live). Raise RLIMIT_DATA, RLIMIT_AS or vm.max_map_count, or lower mem_budget.";
        return nullptr;
      }
    }
    if (!p && !(p = from_disk(block, error))) return nullptr;
    if (recording) {
      block.log = int64_t(log.size());
      block.generation = generation;
      log.push_back({frame ? frame->instance : -1, k, block.nbytes, clock++, -1, place(block)});
    }
    account(block.segment ? block.nbytes : 0);
    blocks.emplace(p, std::move(block));
    return p;
  }

  void* allocate_small(int64_t asked, std::string& error) {
    int64_t nbytes = (asked + kSmallAlign - 1) / kSmallAlign * kSmallAlign;
    void* head = nullptr;
    make_room(nbytes);
    if (posix_memalign(&head, kSmallAlign, kSmallAlign + nbytes)) {
      error = "zinf: the system refuses " + std::to_string(asked) + " bytes more memory; lower mem_budget.";
      return nullptr;
    }
    *static_cast<int64_t*>(head) = nbytes;
    n.small += nbytes;
    account(nbytes);
    return static_cast<char*>(head) + kSmallAlign;
  }

  static int64_t place(const Block& b) { return !b.segment ? -2 : b.segment->region ? b.offset : -1; }

  bool unmap(Segment& s) {
    page_committed -= s.committed_bytes;
    return munmap(s.base, s.size) == 0;
  }

  void release(Block& b) {  // a page block; spilled ones have been unmapped by the caller
    if (b.log >= 0 && b.generation == generation) log[b.log].death = clock++;
    if (!b.segment) {
      b.file->free.give(b.offset, b.nbytes);
      n.spilled -= b.nbytes;
      trimmer_spilled(n.spilled, n.limit, zinf_alloc_spill_drop);
      return;
    }
    Segment& s = *b.segment;
    s.free.give(b.offset, b.nbytes);
    s.live -= b.nbytes;
    page_live -= b.nbytes;
    account(-b.nbytes);
    if (s.retired && s.live) uncommit(s, b.offset, b.offset + b.nbytes);
    else if (s.retired) std::erase_if(retired, [&](auto& old) { return old.get() == &s && unmap(s); });
    make_room(0);  // a block granted over the limit leaves pages that must not be kept
  }

  void retire_region() {
    if (!region) return;
    region->retired = true;
    if (!region->live) {
      unmap(*region);
    } else {
      std::vector<std::pair<int64_t, int64_t>> holes;
      region->free.each([&](int64_t a, int64_t b) {
        region->committed.parts(a, b, [&](int64_t x, int64_t y) { holes.emplace_back(x, y); });
      });
      for (auto [a, b] : holes) uncommit(*region, a, b);
      retired.push_back(std::move(region));
    }
    region.reset();
  }
};

}  // namespace zinf::alloc
