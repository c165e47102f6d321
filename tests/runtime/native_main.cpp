// Exercises the engine without torch or Python, to be built with a sanitizer (test_native_sanitized.py): many threads make,
// fill, read back, protect, drop and free blocks, freed ones with transfers still in flight, while others re-tune the trimmer,
// inject faults and drain. Every byte read is compared with what was written. Ends with "ok", or with what went wrong.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"

namespace {

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::printf("line %d: %s: %s\n", __LINE__, #condition, zinf_last_error());             \
      std::_Exit(1);                                                                         \
    }                                                                                        \
  } while (0)

int64_t store;
std::atomic<int> alive{0};  // buffers that a write still needs
std::atomic<int64_t> spill_drops{0};

struct Buffer {
  std::vector<char> bytes;
  explicit Buffer(int64_t n, int seed) : bytes(n) {
    std::mt19937 random(seed);
    for (auto& b : bytes) b = static_cast<char>(random());
    ++alive;
  }
  ~Buffer() { --alive; }
};

void drop_buffer(void* context) { delete static_cast<Buffer*>(context); }

// Blocks of one thread: written whole, changed in part, read back; sometimes freed before the disk is done with them.
void churn(int seed, int rounds) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round) {
    int64_t n = 1 + random() % (round % 8 == 0 ? 5'000'000 : 300'000);
    char* block = static_cast<char*>(zinf_block_new(store, n));
    CHECK(block != nullptr);
    CHECK(zinf_block_bytes(block) == n && zinf_block_store(block) == store);
    auto* source = new Buffer(n, seed + round);
    std::vector<char> want = source->bytes;
    int64_t whole = zinf_write(block, 0, source->bytes.data(), n, drop_buffer, source);
    CHECK(whole > 0);
    int64_t begin = random() % n, length = 1 + random() % (n - begin);
    auto* part = new Buffer(length, seed - round);
    std::memcpy(want.data() + begin, part->bytes.data(), length);
    CHECK(zinf_write(block, begin, part->bytes.data(), length, drop_buffer, part) > 0);
    std::vector<char> got(n), piece(length);
    int64_t all = zinf_read(block, 0, got.data(), n), some = zinf_read(block, begin, piece.data(), length);
    CHECK(all > 0 && some > 0);
    int way = random() % 4;
    if (way == 0) CHECK(zinf_block_free(block) == 0);  // its transfers go on, and the bytes still arrive
    CHECK(zinf_wait(all) == 0 && zinf_wait_quiet(some) == 0);
    CHECK(got == want && std::memcmp(piece.data(), want.data() + begin, length) == 0);
    if (way == 0) continue;
    if (way == 1) CHECK(zinf_block_drop(block) == 0);
    if (way == 2) {
      CHECK(zinf_block_protect(block) == 0 && zinf_block_dirty(block) == 0);
      CHECK(std::memcmp(block, want.data(), n) == 0 && zinf_block_dirty(block) == 0);
      block[n / 2] = static_cast<char>(~want[n / 2]);
      CHECK(zinf_block_dirty(block) == 1);
      want[n / 2] = static_cast<char>(~want[n / 2]);
    }
    CHECK(std::memcmp(block, want.data(), n) == 0);
    CHECK(zinf_block_free(block) == 0);
  }
}

// Two threads write one block, each whole: a reader sees the one or the other on every page, never a mixture.
void shared_block(char* block, int64_t n, char value, int rounds) {
  std::vector<char> source(n, value), got(n);
  for (int round = 0; round < rounds; ++round) {
    int64_t written = zinf_write(block, 0, source.data(), n, nullptr, nullptr);
    int64_t read = zinf_read(block, 0, got.data(), n);
    CHECK(written > 0 && read > 0);
    CHECK(zinf_wait(read) == 0 && zinf_wait(written) == 0 && zinf_poll(read) == 1);
    for (int64_t i = 1; i < n; ++i) CHECK(got[i] == got[0]);
  }
}

int64_t drop_spilled() { return ++spill_drops; }

void disturb(std::atomic<bool>& stop) {
  for (int i = 0; !stop; ++i) {
    CHECK(zinf_trimmer(i % 3 == 0 ? -1 : 64 << 10) == 0);
    zinf::trimmer_spilled(i % 2 ? 1 << 20 : 0, 64 << 20, drop_spilled);
    static const int harmless[] = {zinf::kShort, zinf::kEintr, zinf::kEagain};
    zinf_fault_inject(harmless[i % 3], 1 + i % 5);
    if (i % 7 == 0) CHECK(zinf_store_drain(store) == 0);
    if (i % 5 == 0) CHECK(zinf_store_write_window(store, i % 2 ? 0 : 4 << 20) == 0);
    zinf_io_stats stats;
    zinf_io_stats_get(&stats);
    CHECK(stats.bytes_read >= 0 && zinf_block_count() >= 0 && zinf_store_free_bytes(store) >= 0);
    usleep(3000);
  }
  zinf_fault_inject(0, 0);
}

// A write that fails is reported to who waits for it, and once by drain.
void failures() {
  auto* block = static_cast<char*>(zinf_block_new(store, 10'000));
  std::vector<char> source(10'000, 1);
  zinf_fault_inject(zinf::kEio, 1);
  int64_t ticket = zinf_write(block, 0, source.data(), 10'000, nullptr, nullptr);
  CHECK(zinf_wait(ticket) == -1 && std::strstr(zinf_last_error(), "Input/output error"));
  CHECK(zinf_store_drain(store) == -1 && zinf_store_drain(store) == 0);
  CHECK(zinf_block_free(block) == 0 && zinf_block_free(block) == -1 && zinf_read(block, 0, source.data(), 1) == -1);
  CHECK(zinf_block_new(store, -1) == nullptr && zinf_store_drain(99) == -1 && zinf_wait(int64_t{1} << 40) == -1);
}

// A child reads its parent's blocks and writes nothing.
void fork_in_flight() {
  auto* block = static_cast<char*>(zinf_block_new(store, 3'000'000));
  std::vector<char> source(3'000'000, 7);
  CHECK(zinf_wait(zinf_write(block, 0, source.data(), 3'000'000, nullptr, nullptr)) == 0);
  int64_t ticket = zinf_write(block, 0, source.data(), 3'000'000, nullptr, nullptr);
  pid_t child = fork();
  if (child == 0) {
    std::vector<char> got(1'000'000);
    bool ok = zinf_wait(zinf_read(block, 5, got.data(), 1'000'000)) == 0 && got.front() == 7 && got.back() == 7;
    ok = ok && zinf_write(block, 0, source.data(), 10, nullptr, nullptr) == -1 && zinf_block_new(store, 10) == nullptr;
    ok = ok && zinf_trimmer(1 << 20) == 0 && zinf_block_free(block) == 0;
    _exit(ok ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0 && zinf_wait(ticket) == 0 && zinf_block_free(block) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  int rounds = std::atoi(argv[2]);
  CHECK(zinf_store_open((std::string(argv[1]) + "/missing").c_str(), 1 << 20) == -1);
  store = zinf_store_open(argv[1], 4 << 20);  // too little: the blocks make it grow
  CHECK(store > 0 && zinf_store_write_window(store, 4 << 20) == 0);
  std::atomic<bool> stop{false};
  std::thread disturber([&] { disturb(stop); });
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(churn, 1000 * (i + 1), rounds);
  auto* block = static_cast<char*>(zinf_block_new(store, 200'000));
  for (char value : {1, 2}) threads.emplace_back(shared_block, block, 200'000, value, rounds);
  for (auto& thread : threads) thread.join();
  stop = true;
  disturber.join();
  CHECK(zinf_store_drain(store) == 0 && alive == 0);
  failures();
#ifndef __SANITIZE_THREAD__  // which does not follow a fork of a process with threads
  fork_in_flight();
#endif
  CHECK(zinf_store_write_window(store, 4 << 20) == 0);
  std::vector<char> got(200'000);
  int64_t late = zinf_read(block, 0, got.data(), 200'000);
  CHECK(late > 0 && zinf_store_close(store) == 0 && zinf_wait(late) == 0);
  CHECK(zinf_store_close(store) == -1 && zinf_block_new(store, 1) == nullptr);
  CHECK(zinf_wait(zinf_read(block, 0, got.data(), 200'000)) == 0 && (got[0] == 1 || got[0] == 2));  // by the mapping
  CHECK(zinf_block_free(block) == 0 && zinf_block_count() == 0);
  zinf_trimmer(-1);
  std::printf("ok, %lld trims, %lld of spilled memory, %lld barrier faults\n", static_cast<long long>(zinf_trimmer_drops()),
              static_cast<long long>(spill_drops), static_cast<long long>(zinf_barrier_faults()));
  return 0;
}
