// Inside of the native engine: stores, blocks, transfer requests and the threads that serve them. zinf.h is what others see.
//
// Locks, in the order in which they may be taken: Engine::mutex (queues, tables), then Store::extent_mutex (free space).
// No lock is ever held over a system call that transfers data, over a callback, or over code of somebody else.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "trimmer.h"
#include "zinf.h"

extern "C" {
// Beyond zinf.h: for tests and for ops.cpp.
int zinf_wait_quiet(int64_t ticket);                            // zinf_wait that no signal interrupts
void zinf_fault_inject(int kind, int64_t nth);                  // kinds below; the nth system call from now on (1: the next)
void zinf_set_block_free_hook(void (*hook)(void* address));     // called before a block disappears
int64_t zinf_store_free_bytes(int64_t store);                   // bytes of the reserved file that no block occupies
int64_t zinf_block_count(void);
int64_t zinf_barrier_faults(void);                              // writes that the barrier has caught so far
int64_t zinf_trimmer_drops(void);                               // how often the trimmer has dropped pages

// Working copies (ops.cpp); for whoever runs graphs.
void zinf_set_current_store(int64_t store);      // where zinf::offload puts activations
int64_t zinf_held_count(void);                   // copies gathered and not yet released
int64_t zinf_held_bytes(void);                   // their bytes, prefetches in flight included
int64_t zinf_prefetch_count(void);               // prefetches that no gather has taken yet
void zinf_held_forget_all(void);                 // drops copies, waits for prefetches; after an exception
void zinf_prefetch_cancel_all(void);             // only the prefetches: none may outlive a graph instance
void zinf_block_invalidate(void* block);         // somebody writes the block: its copy and prefetch are stale

// States read ahead of their update (read_ahead.cpp). None of these blocks.
void zinf_ahead_states(const void* master, int32_t count, void* const* blocks);  // which blocks hold a parameter's states
void zinf_ahead_allow(int allowed);              // whether zinf_ahead_start does anything
void zinf_ahead_start(const void* master);       // starts to read the states of the parameter at this address
int64_t zinf_ahead_count(void);                  // copies that no update has taken yet
int64_t zinf_ahead_bytes(void);                  // memory under the budget that they take, abandoned ones included
int64_t zinf_ahead_taken(void);                  // bytes that updates have found read, since the process started
void zinf_ahead_drop(void* block);               // the block's copy is stale
void zinf_ahead_forget(void);                    // drops all copies, and what zinf_ahead_states has said
int zinf_held_arm(void);                         // write-protects the block of every held copy, so that a write makes it stale
}

namespace zinf {

constexpr int64_t kAlign = 4096;       // what O_DIRECT needs of addresses, offsets and lengths on every device in use
constexpr int64_t kChunk = 4 << 20;    // largest single system call
constexpr int64_t kBounce = 1 << 20;   // staging buffer of each engine thread, for memory that is not aligned

enum Fault { kNoFault = 0, kShort = 1, kEio = 2, kEintr = 3, kEnospc = 4, kSlow = 5 /* nth: ms, each call */, kEof = 6, kEagain = 7 };

int64_t page_size();
int64_t round_up(int64_t value, int64_t unit);
std::string errno_text(int error);
int fail(const std::string& message);  // remembers the message for zinf_last_error; returns -1

// Free space of a file as extents [offset, offset + length). Best fit; neighbours are merged.
class Extents {
 public:
  int64_t take(int64_t length);  // offset, or -1
  void give(int64_t offset, int64_t length);
  int64_t free_bytes() const { return free_; }

 private:
  std::map<int64_t, int64_t> by_offset_;
  std::set<std::pair<int64_t, int64_t>> by_length_;  // (length, offset)
  int64_t free_ = 0;
};

struct Store {
  int64_t handle = 0;
  std::string path;
  int buffered_fd = -1, direct_fd = -1;  // two descriptions of one file; the page cache keeps them coherent
  bool in_memory = false;                // tmpfs: nothing to drop from the page cache
  std::mutex extent_mutex;
  Extents extents;
  int64_t file_bytes = 0;
  // Guarded by Engine::mutex:
  bool closed = false;
  int64_t window = 64 << 20, write_bytes_in_flight = 0;
  int writes_in_flight = 0, reads_in_flight = 0;
  int dying_blocks = 0;  // freed by their owner, kept by a transfer
  std::string first_write_error;
  ~Store();
};

struct Request;

struct Block {
  std::shared_ptr<Store> store;
  int64_t offset = 0, nbytes = 0, capacity = 0;  // capacity: whole pages
  char* base = nullptr;
  std::list<std::shared_ptr<Request>> pending;  // in order of submission; guarded by Engine::mutex
  bool dying = false;          // freed by its owner
  bool counted_dying = false;  // in Store::dying_blocks
  std::atomic<int> barrier_slot{-1};
  ~Block();  // unmaps, gives the extent back
};

struct Request {
  int64_t ticket = 0;
  bool write = false;
  std::shared_ptr<Block> block;
  int64_t offset = 0, nbytes = 0;
  char* memory = nullptr;
  void (*done)(void*) = nullptr;
  void* context = nullptr;
  // Guarded by Engine::mutex:
  int64_t issued = 0;   // bytes handed to threads so far
  int running = 0;      // chunks with threads now
  bool ready = false;   // every earlier transfer that it must wait for has finished
  bool finished = false;
  std::string error;
};

// Moves one chunk between the file and memory; returns "" or the error. Runs without locks.
std::string transfer(const Request& request, int64_t begin, int64_t length, char* bounce);

class Engine {
 public:
  std::mutex mutex;
  std::atomic<bool> forked_child{false};  // set in a child process: files and threads belong to the parent
  std::unordered_map<const void*, std::shared_ptr<Block>> blocks;
  std::unordered_map<int64_t, std::shared_ptr<Store>> stores;
  int64_t next_store = 1;

  int64_t submit(void* address, int64_t offset, char* memory, int64_t nbytes, bool write, void (*done)(void*), void* context);
  int wait(int64_t ticket, bool interruptible);
  int poll(int64_t ticket);
  int drain(const std::shared_ptr<Store>& store);
  void quiesce(const std::shared_ptr<Store>& store);  // waits until no transfer of the store is in flight
  bool interrupted();                                 // asks the interrupt check, without holding the lock
  std::shared_ptr<Block> find(const void* address);
  std::shared_ptr<Store> find_store(int64_t handle);

  void before_fork();
  void after_fork(bool child);

  std::atomic<int (*)(void)> interrupt_check{nullptr};
  std::atomic<void (*)(void*)> block_free_hook{nullptr};
  std::condition_variable finished_cv;
  std::atomic<int64_t> bytes[2]{}, counts[2]{}, nanoseconds[2]{}, wait_nanoseconds{0}, direct_bytes{0}, buffered_bytes{0};

 private:
  template <class Condition>
  bool wait_sliced(std::unique_lock<std::mutex>& lock, bool interruptible, Condition condition);
  void start_threads();
  void work(int lane);
  bool pick(int lane, std::shared_ptr<Request>& request, int64_t& begin, int64_t& length);
  bool may_start(const Request& request) const;
  void complete(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& request);

  std::deque<std::shared_ptr<Request>> queue_[2];  // [0] reads, [1] writes
  std::condition_variable work_cv_[2], idle_cv_;
  std::unordered_map<int64_t, std::shared_ptr<Request>> tickets_;  // in flight, and the latest failures
  std::deque<int64_t> failures_;
  int64_t next_ticket_ = 1;
  int executing_ = 0;
  bool forking_ = false, started_ = false;
};

Engine& engine();  // made at the first call, never destroyed: its threads may outlive main()

void barrier_forget(Block& block);

// A block's contents as read ahead: complete once `ticket` is. memory is null where there is no valid copy.
struct AheadCopy {
  char* memory = nullptr;
  int64_t ticket = 0;
};
AheadCopy ahead_find(void* block, int64_t nbytes);
void ahead_took(int64_t nbytes);  // an update has used so much of them
void ahead_fork_handlers();

}  // namespace zinf
