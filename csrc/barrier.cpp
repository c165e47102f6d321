// Write barrier: a protected block is read-only until somebody writes to it, by whatever way (`.data`, numpy, a fused
// optimizer). The first write faults; the handler marks the block dirty, makes it writable again and lets the write go on.
//
// The handler may only use what is safe in a signal: a fixed table of atomics and mprotect. A system call that writes into
// a protected block is not a fault but fails with EFAULT.
#include <signal.h>
#include <sys/mman.h>

#include <cerrno>

#include "engine.h"

namespace zinf {
namespace {

constexpr int kSlots = 65536;  // more mappings than that a process cannot have (vm.max_map_count)

struct Slot {
  std::atomic<uintptr_t> begin, end;
  std::atomic<int> dirty;
};

Slot slots[kSlots];  // zero pages until used
std::atomic<int> slots_used{0};
std::atomic<int64_t> faults{0};
std::atomic<int> passing_on{0};
struct sigaction previous;
std::mutex table_mutex;  // for those who add and remove, never for the handler
std::vector<int> free_slots;

void on_fault(int signal_number, siginfo_t* info, void* context) {
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  int saved = errno;
  if (info->si_code == SEGV_ACCERR) {
    for (int i = 0, n = slots_used.load(); i < n; ++i) {
      uintptr_t begin = slots[i].begin.load(), end = slots[i].end.load();
      if (address < begin || address >= end) continue;
      slots[i].dirty = 1;
      if (mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_READ | PROT_WRITE) != 0) break;
      ++faults;
      errno = saved;
      return;
    }
  }
  // A genuine fault: whoever was there before us decides; if it hands the signal back to us, the default ends the process.
  bool chain = previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN && passing_on.fetch_add(1) == 0;
  if (!chain) {
    signal(SIGSEGV, SIG_DFL);
    if (info->si_code <= 0) raise(SIGSEGV);  // sent, not caused: returning would not repeat it
  } else if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal_number, info, context);
  } else {
    previous.sa_handler(signal_number);
  }
  if (chain) passing_on = 0;
  errno = saved;
}

// Puts our handler in front; also when somebody has replaced it since (faulthandler.enable()).
void install() {
  struct sigaction now {};
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  previous = now;
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace

void barrier_forget(Block& block) {
  int slot = block.barrier_slot.exchange(-1);
  if (slot < 0) return;
  slots[slot].end = 0;
  slots[slot].begin = 0;
  if (engine().forked_child) return;
  std::lock_guard<std::mutex> lock(table_mutex);
  free_slots.push_back(slot);
}

}  // namespace zinf

using namespace zinf;

extern "C" {
int zinf_block_protect(void* address) {
  auto block = engine().find(address);
  if (!block) return fail("no block of a store starts at this address");
  if (engine().forked_child) return fail("a forked child process cannot protect the blocks of its parent");
  int slot;
  {
    std::lock_guard<std::mutex> lock(table_mutex);
    install();
    slot = block->barrier_slot;
    if (slot < 0) {
      if (!free_slots.empty()) {
        slot = free_slots.back();
        free_slots.pop_back();
      } else if (slots_used < kSlots) {
        slot = slots_used;
      } else {
        return fail("more than " + std::to_string(kSlots) + " blocks are write-protected");
      }
      auto begin = reinterpret_cast<uintptr_t>(block->base);
      slots[slot].begin = begin;
      slots[slot].end = begin + block->capacity;
      if (slot == slots_used) ++slots_used;
      block->barrier_slot = slot;
    }
  }
  slots[slot].dirty = 0;
  if (mprotect(block->base, block->capacity, PROT_READ) == 0) return 0;
  int error = errno;
  slots[slot].dirty = 1;
  return fail("cannot write-protect a block: " + errno_text(error));
}

int zinf_block_dirty(const void* address) {
  auto block = engine().find(address);
  if (!block) return 1;
  int slot = block->barrier_slot;
  return slot < 0 ? 1 : slots[slot].dirty.load();
}

int64_t zinf_barrier_faults(void) { return faults; }
}
