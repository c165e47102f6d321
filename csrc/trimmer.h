// The page trimmer as the engine and the CPU allocator see it; needs neither of their headers.
#pragma once
#include <cstdint>

namespace zinf {

void trimmer_notify();  // a block has appeared
void trimmer_look();    // trims now, if that is due, in the calling thread; which must hold no lock of ours

// The CPU allocator has `bytes` spilled now, under a limit of `limit` (0: none); `drop` takes their pages out of this
// process. Never calls back, so the allocator may hold its lock.
void trimmer_spilled(int64_t bytes, int64_t limit, int64_t (*drop)(void));

}  // namespace zinf
