// One chunk between a store's file and memory: O_DIRECT wherever alignment allows, through an aligned bounce buffer where
// memory is not aligned, through the page cache only for partial pages that are written and on file systems without O_DIRECT.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "engine.h"

namespace zinf {
namespace {

std::atomic<int> fault_kind{kNoFault};
std::atomic<int64_t> fault_in{0};

void read_fault_environment() {
  // ZINF_FAULT=eio:3 makes the third system call fail; for tests that start a process of their own.
  const char* text = getenv("ZINF_FAULT");
  if (!text) return;
  static const char* names[] = {"", "short", "eio", "eintr", "enospc", "slow", "eof", "eagain"};
  const char* colon = strchr(text, ':');
  std::string name(text, colon ? static_cast<size_t>(colon - text) : strlen(text));
  for (int kind = 1; kind <= kEagain; ++kind)
    if (name == names[kind]) zinf_fault_inject(kind, colon ? atoll(colon + 1) : 1);
}

void pause_ms(int64_t ms) {
  timespec t{ms / 1000, (ms % 1000) * 1000000};
  while (nanosleep(&t, &t) != 0 && errno == EINTR) {
  }
}

// pread/pwrite with the injected fault, if it is due. Returns what the system call returns.
ssize_t call(bool write, int fd, char* memory, int64_t nbytes, int64_t offset) {
  static const bool environment_read = (read_fault_environment(), true);
  (void)environment_read;
  int kind = fault_kind.load(std::memory_order_relaxed);
  if (kind == kSlow) {
    pause_ms(fault_in.load());
  } else if (kind != kNoFault && fault_in.fetch_sub(1) == 1) {
    fault_kind = kNoFault;
    switch (kind) {
      case kShort: nbytes = std::max<int64_t>(1, nbytes / 3); break;
      case kEio: errno = EIO; return -1;
      case kEintr: errno = EINTR; return -1;
      case kEnospc: errno = ENOSPC; return -1;
      case kEagain: errno = EAGAIN; return -1;
      case kEof: return 0;
    }
    if (kind == kShort && nbytes >= kAlign) nbytes = nbytes / kAlign * kAlign;  // what O_DIRECT would do
  }
  return write ? ::pwrite(fd, memory, nbytes, offset) : ::pread(fd, memory, nbytes, offset);
}

struct Mover {
  const Request& request;
  Store& store;
  char* bounce;
  std::string error;

  std::string where(int64_t offset, int64_t nbytes) const {
    return std::string(request.write ? "cannot write " : "cannot read ") + std::to_string(nbytes) + " bytes at offset " +
           std::to_string(offset) + " of " + store.path;
  }

  bool fail_with(int64_t offset, int64_t nbytes, int code) {
    const char* remedy = code == ENOSPC || code == EDQUOT ? ": free space there or choose another store_dir"
                         : code == EIO                    ? ": the disk reports a fault; choose another store_dir"
                                                          : "";
    error = where(offset, nbytes) + ": " + errno_text(code) + remedy;
    return false;
  }

  // All of [offset, offset + nbytes) of the file, continuing short transfers. `direct`: all three are multiples of kAlign.
  bool move(char* memory, int64_t offset, int64_t nbytes, bool direct) {
    int64_t done = 0;
    while (done < nbytes) {
      int fd = direct ? store.direct_fd : store.buffered_fd;
      ssize_t n = call(request.write, fd, memory + done, nbytes - done, offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) {
        pause_ms(1);
        continue;
      }
      if (n < 0 && errno == EINVAL && direct) {  // this piece is refused: the page cache takes it
        direct = false;
        continue;
      }
      if (n < 0) return fail_with(offset + done, nbytes - done, errno);
      if (n == 0) {
        error = where(offset + done, nbytes - done) + ": the file ends there; was it truncated?";
        return false;
      }
      (direct ? engine().direct_bytes : engine().buffered_bytes) += n;
      done += n;
      if (direct && done % kAlign != 0 && done < nbytes) {
        done -= done % kAlign;  // O_DIRECT can only go on at an aligned place
        if (n < kAlign) direct = false;
      }
    }
    if (!direct) drop_cached(offset, nbytes);
    return true;
  }

  // What went through the page cache should not stay there: it would count against a container's limit.
  void drop_cached(int64_t offset, int64_t nbytes) const {
    if (store.in_memory) return;
    if (request.write) sync_file_range(store.buffered_fd, offset, nbytes, SYNC_FILE_RANGE_WRITE);
    posix_fadvise(store.buffered_fd, offset, nbytes, POSIX_FADV_DONTNEED);
  }

  bool read(char* memory, int64_t offset, int64_t nbytes) {
    if (store.direct_fd < 0) return move(memory, offset, nbytes, false);
    int64_t plain = offset % kAlign == 0 && reinterpret_cast<uintptr_t>(memory) % kAlign == 0 ? nbytes / kAlign * kAlign : 0;
    if (plain > 0 && !move(memory, offset, plain, true)) return false;
    for (int64_t at = plain; at < nbytes;) {  // whole pages into the bounce buffer, the wanted part out of it
      int64_t skip = (offset + at) % kAlign;
      int64_t take = std::min(nbytes - at, kBounce - skip);
      if (!move(bounce, offset + at - skip, round_up(skip + take, kAlign), true)) return false;
      memcpy(memory + at, bounce + skip, take);
      at += take;
    }
    return true;
  }

  bool write(char* memory, int64_t offset, int64_t nbytes) {
    if (store.direct_fd < 0) return move(memory, offset, nbytes, false);
    // A page that is written in part goes through the page cache, which merges it; the last page of a block belongs to
    // the block alone, so it is written whole, padded with zeros.
    const Block& block = *request.block;
    int64_t head = std::min(nbytes, round_up(offset, kAlign) - offset);
    if (head > 0 && !move(memory, offset, head, false)) return false;
    memory += head, offset += head, nbytes -= head;
    bool at_end = offset + nbytes == block.offset + block.nbytes;
    int64_t tail = nbytes % kAlign, body = nbytes - tail;
    if (reinterpret_cast<uintptr_t>(memory) % kAlign == 0) {
      if (body > 0 && !move(memory, offset, body, true)) return false;
    } else {
      for (int64_t at = 0; at < body; at += kBounce) {
        int64_t piece = std::min(kBounce, body - at);
        memcpy(bounce, memory + at, piece);
        if (!move(bounce, offset + at, piece, true)) return false;
      }
    }
    if (tail == 0) return true;
    if (!at_end) return move(memory + body, offset + body, tail, false);
    memcpy(bounce, memory + body, tail);
    memset(bounce + tail, 0, kAlign - tail);
    return move(bounce, offset + body, kAlign, true);
  }
};

}  // namespace

std::string transfer(const Request& request, int64_t begin, int64_t length, char* bounce) {
  Mover mover{request, *request.block->store, bounce, {}};
  int64_t offset = request.block->offset + request.offset + begin;
  bool ok = request.write ? mover.write(request.memory + begin, offset, length) : mover.read(request.memory + begin, offset, length);
  return ok ? "" : mover.error;
}

}  // namespace zinf

extern "C" void zinf_fault_inject(int kind, int64_t nth) {
  zinf::fault_in = nth;
  zinf::fault_kind = nth > 0 ? kind : zinf::kNoFault;
}
