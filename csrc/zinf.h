// The engine's C interface. Plain C++20 behind it, no torch: csrc/ops.cpp and Python (ctypes) are its two callers.
// Every function is thread-safe and never needs Python's GIL. Functions that can fail return a negative number or a null
// pointer and leave a message (path, offset, errno, remedy) in zinf_last_error(), which is per calling thread.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
const char* zinf_last_error(void);

// ---- stores: one preallocated file in a directory that the caller has made and locked -------------------------------
int64_t zinf_store_open(const char* directory, int64_t reserve_bytes);  // handle > 0; reserves with fallocate, never sparse
int zinf_store_grow(int64_t store, int64_t more_bytes);                 // reserve further room
int zinf_store_close(int64_t store);        // waits for transfers, closes descriptors; mappings of live blocks stay valid,
                                            // and transfers of them are from then on copies through the mappings
int zinf_store_direct(int64_t store);       // 1: O_DIRECT works and is coherent with the mapping here, 0: buffered
int zinf_store_drain(int64_t store);        // waits until no write is in flight; reports the first write that failed
int zinf_store_write_window(int64_t store, int64_t nbytes);  // a new write waits until in-flight + its size fit; a larger one is synchronous

// ---- blocks: page-aligned extents of a store's file, each with a shared mapping of its own ---------------------------
void* zinf_block_new(int64_t store, int64_t nbytes);  // address of the mapping (its length is rounded up to a page)
int zinf_block_free(void* address);                   // the extent may be reused at once; waits for its transfers
int64_t zinf_block_bytes(const void* address);        // nbytes of the block that starts there, -1: no block starts there
int64_t zinf_block_store(const void* address);
int zinf_block_drop(void* address);                   // takes the mapping's pages out of this process (contents stay)
int zinf_block_protect(void* address);                // read-only until the next write by anybody, which marks it dirty
int zinf_block_dirty(const void* address);            // 1: written since zinf_block_protect (or never protected)

// ---- transfers between a block and memory; dst/src need no alignment (an unaligned one goes through the page cache) -----
int64_t zinf_read(void* block, int64_t offset, void* dst, int64_t nbytes);         // ticket > 0
int64_t zinf_write(void* block, int64_t offset, const void* src, int64_t nbytes,   // ticket > 0; `done(context)` runs on an
                   void (*done)(void*), void* context);                            // engine thread once src may be reused
int zinf_wait(int64_t ticket);              // 0, or -1 with the transfer's error. Waits in slices and looks for signals.
int zinf_poll(int64_t ticket);              // 1 finished, 0 not yet

// ---- page trimmer: keeps pages of blocks and of spilled tensors in this process under an allowance ----------------------
// < 0: blocks are left alone, and spilled tensors are kept under an allowance of their own (1/16 of the limit, 1 to 16 MiB).
// With < 0 no block is dropped any more on return, unless there are spilled tensors.
// The thread that does it starts when there is something to trim, and sleeps while there is nothing.
int zinf_trimmer(int64_t allowance_bytes);

// ---- signals: called about every 50 ms by whatever waits; a non-zero return interrupts the wait with an error -----------
void zinf_set_interrupt_check(int (*check)(void));

// ---- counters -----------------------------------------------------------------------------------------------------------
struct zinf_io_stats { int64_t bytes_read, bytes_written, reads, writes, direct_bytes, buffered_bytes; double read_seconds, write_seconds, wait_seconds; };
void zinf_io_stats_get(zinf_io_stats* out);
}
