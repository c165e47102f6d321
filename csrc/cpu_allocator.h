// C interface of the CPU allocator: every CPU tensor of this process, counted, under a limit, at planned addresses.
// All sizes and offsets are bytes. Every function is thread-safe, never needs Python's GIL and never throws. Functions
// that can fail return -1 and leave a message in zinf_alloc_last_error(), which is per calling thread.
#pragma once
#include <cstdint>

extern "C" {
const char* zinf_alloc_last_error(void);

// ---- installation: counted, so two models can share it --------------------------------------------------------------
int64_t zinf_alloc_install(void);    // makes it torch's CPU allocator; returns the number of installations
int64_t zinf_alloc_uninstall(void);  // the last one restores the allocator before it; live blocks stay valid; external is 0
void zinf_alloc_fork_handlers(void);  // once, before whatever frees tensors while its own fork handler waits (the engine)
int64_t zinf_alloc_page(void);       // unit to which blocks of at least 16 KiB are rounded and aligned

// ---- the limit: live + retained + external stays under it -----------------------------------------------------------
// limit 0: none. A block that would pass it: strict -> an error (blocks under 16 KiB are granted and counted); else
// blocks >= spill_threshold go to an unlinked file in spill_dir (null: an error), smaller ones are granted and counted
// in over_limit. spill_threshold 0: 1 MiB.
int zinf_alloc_set_limit(int64_t limit, int strict, const char* spill_dir, int64_t spill_threshold);
int64_t zinf_alloc_external(int64_t delta);   // bytes held elsewhere but promised under the limit; returns their sum
int64_t zinf_alloc_trim(int64_t keep);        // gives retained pages back until `keep` bytes are left; bytes given back
int64_t zinf_alloc_spill_drop(void);          // takes spilled pages out of this process (contents stay); bytes covered

struct zinf_alloc_stats {
  int64_t limit, strict;
  int64_t live, peak;                 // small + page blocks + external; spilled blocks are not in it
  int64_t external, small;            // parts of live
  int64_t retained;                   // pages of freed blocks kept for reuse
  int64_t committed, committed_peak;  // live + retained
  int64_t spilled, spilled_peak, spills;
  int64_t over_limit, over_limit_peak;  // by how much live passes the limit
  int64_t calls, blocks;                // allocations so far; live blocks of at least 16 KiB
  int64_t trimmed;                      // bytes given back to the kernel so far
  int64_t region, region_committed;     // the planned region: reserved and touched
  int64_t planned, missed_size, missed_busy;  // blocks at their planned address; wrong size or order; slot in use
};
void zinf_alloc_stats_get(struct zinf_alloc_stats* out);
void zinf_alloc_reset_peak(void);  // every peak becomes its present value

// ---- instances: one run of one graph on the calling thread; nestable ------------------------------------------------
int zinf_alloc_begin(int64_t instance);  // instance >= 0; the k-th allocation of at least 16 KiB until end has index k
int zinf_alloc_end(void);

// ---- planned addresses ----------------------------------------------------------------------------------------------
// Reserves at least this much for planned blocks. It only grows; blocks in a former region stay valid; 0 drops it.
int zinf_alloc_region(int64_t nbytes);
void* zinf_alloc_region_base(void);
// The k-th block of the instance goes to region + offsets[k] if its rounded size is that of sizes[k] and the slot is
// free; offset -1: the heap.
int zinf_alloc_plan(int64_t instance, int64_t n, const int64_t* sizes, const int64_t* offsets);
int zinf_alloc_plan_clear(int64_t instance);                                  // -1: no such plan
int zinf_alloc_plan_counts(int64_t instance, int64_t* planned, int64_t* missed);
// Region offset >= 0, -1 heap, -2 spilled, -3: no block of at least 16 KiB starts there.
int64_t zinf_alloc_place(const void* address);

// ---- recording: one process-wide event clock, ticking at each logged birth, death, begin and end --------------------
struct zinf_alloc_record_t {
  int64_t instance, k, nbytes;  // instance -1: outside any instance, k counts those; nbytes rounded
  int64_t birth, death;         // death -1: alive
  int64_t place;                // as zinf_alloc_place
};
struct zinf_alloc_mark_t {  // one finished run of an instance
  int64_t instance, begin, end;  // clock
  int64_t live_begin, live_end, peak, allocations;  // live bytes of the process; the highest in between; number of k
};
void zinf_alloc_record(int on);
int64_t zinf_alloc_log_size(void);
int64_t zinf_alloc_log_get(struct zinf_alloc_record_t* out, int64_t n);  // number copied, oldest first
int64_t zinf_alloc_marks_size(void);
int64_t zinf_alloc_marks_get(struct zinf_alloc_mark_t* out, int64_t n);
void zinf_alloc_log_clear(void);
}
