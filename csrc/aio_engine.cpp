// Threads that read and write blocks: two queues (reads, writes), requests cut into chunks, served in order of submission.
//
// Ordering. Two transfers of one block conflict when their pages overlap and one of them writes. A request becomes ready
// when every conflicting request submitted before it has finished, so read-after-write, write-after-read and
// write-after-write hold. Waits go only from later to earlier submissions, hence there is no deadlock.
//
// Fork. Before a fork, threads finish the chunks they are at (a page that a device is writing into must not become
// copy-on-write) and the lock is taken; the child starts with a consistent table, no threads and forked_child set: it reads
// blocks through their mappings and never touches files.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine.h"

namespace zinf {
namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(50);  // how long a wait goes without looking for signals
constexpr size_t kFailuresKept = 256;
constexpr int kThreadsPerLane = 2;

thread_local std::string last_error;

int64_t since(Clock::time_point start) { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count(); }

bool conflict(const Request& a, const Request& b) {
  if (!a.write && !b.write) return false;
  int64_t a_begin = a.offset / kAlign, a_end = (a.offset + a.nbytes + kAlign - 1) / kAlign;
  int64_t b_begin = b.offset / kAlign, b_end = (b.offset + b.nbytes + kAlign - 1) / kAlign;
  return a_begin < b_end && b_begin < a_end;
}
}  // namespace

int fail(const std::string& message) {
  last_error = message;
  return -1;
}

std::string errno_text(int error) {
  char text[128] = "";
  return std::string(strerror_r(error, text, sizeof text)) + " (errno " + std::to_string(error) + ")";
}

Engine& engine() {
  static Engine* one = [] {
    auto* made = new Engine;
    pthread_atfork([] { engine().before_fork(); }, [] { engine().after_fork(false); }, [] { engine().after_fork(true); });
    return made;
  }();
  return *one;
}

void Engine::before_fork() {
  std::unique_lock<std::mutex> lock(mutex);
  forking_ = true;
  idle_cv_.wait_for(lock, std::chrono::seconds(5), [&] { return executing_ == 0; });
  lock.release();  // stays locked until after the fork, in both processes
}

void Engine::after_fork(bool child) {
  forking_ = false;
  if (child) forked_child = true;
  mutex.unlock();
  if (!child)
    for (auto& cv : work_cv_) cv.notify_all();
}

void Engine::start_threads() {
  if (started_) return;
  started_ = true;
  sigset_t all, before;  // signals are for the threads that run Python; faults must reach whoever faults
  sigfillset(&all);
  for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, s);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int lane = 0; lane < 2; ++lane)
    for (int i = 0; i < kThreadsPerLane; ++i) std::thread([this, lane] { work(lane); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::shared_ptr<Block> Engine::find(const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = blocks.find(address);
  return it == blocks.end() ? nullptr : it->second;
}

std::shared_ptr<Store> Engine::find_store(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = stores.find(handle);
  if (it == stores.end()) fail("store " + std::to_string(handle) + " is not open");
  return it == stores.end() ? nullptr : it->second;
}

bool Engine::may_start(const Request& request) const {
  for (const auto& earlier : request.block->pending) {
    if (earlier.get() == &request) return true;
    if (conflict(*earlier, request)) return false;
  }
  return true;
}

bool Engine::pick(int lane, std::shared_ptr<Request>& request, int64_t& begin, int64_t& length) {
  auto& queue = queue_[lane];
  for (auto it = queue.begin(); it != queue.end(); ++it) {
    Request& r = **it;
    if (!r.ready && !(r.ready = may_start(r))) continue;
    request = *it;
    begin = r.issued;
    // The first chunk ends where the file offset is aligned, so that all further ones start aligned.
    length = std::min(r.nbytes - begin, kChunk - (r.offset + begin) % kAlign);
    if (!r.error.empty()) length = r.nbytes - begin;  // failed already: the rest is not attempted
    r.issued += length;
    ++r.running;
    if (r.issued == r.nbytes) queue.erase(it);
    return true;
  }
  return false;
}

void Engine::work(int lane) {
  pthread_setname_np(pthread_self(), lane ? "zinf-write" : "zinf-read");
  void* bounce = mmap(nullptr, kBounce, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    std::shared_ptr<Request> request;
    int64_t begin = 0, length = 0;
    work_cv_[lane].wait(lock, [&] { return !forking_ && pick(lane, request, begin, length); });
    ++executing_;
    std::string error = bounce == MAP_FAILED ? "no memory for a staging buffer of 1 MiB" : request->error;
    if (error.empty()) {
      lock.unlock();
      auto start = Clock::now();
      error = transfer(*request, begin, length, static_cast<char*>(bounce));
      nanoseconds[lane] += since(start);
      if (error.empty()) bytes[lane] += length;
      lock.lock();
    }
    if (request->error.empty()) request->error = error;
    --request->running;
    if (request->running == 0 && request->issued == request->nbytes) complete(lock, request);
    if (--executing_ == 0 && forking_) idle_cv_.notify_all();
  }
}

void Engine::complete(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Request>& request) {
  if (request->done) {  // before the waiters wake: who has waited finds the source's memory free again
    lock.unlock();
    request->done(request->context);
    lock.lock();
  }
  Block& block = *request->block;
  Store& store = *block.store;
  request->finished = true;
  block.pending.remove(request);
  if (block.counted_dying && block.pending.empty()) {
    block.counted_dying = false;
    --store.dying_blocks;
  }
  ++counts[request->write];
  if (request->write) {
    --store.writes_in_flight;
    store.write_bytes_in_flight -= request->nbytes;
    if (!request->error.empty() && store.first_write_error.empty()) store.first_write_error = request->error;
  } else {
    --store.reads_in_flight;
  }
  if (request->error.empty()) {
    tickets_.erase(request->ticket);
  } else {
    failures_.push_back(request->ticket);
    if (failures_.size() > kFailuresKept) {
      tickets_.erase(failures_.front());
      failures_.pop_front();
    }
  }
  request->block.reset();  // a dying block goes here: unmapped, its extent free
  for (auto& cv : work_cv_) cv.notify_all();
  finished_cv.notify_all();
}

// Waits for `condition`, and looks for signals once a slice, without the lock. False: a signal ends the wait.
template <class Condition>
bool Engine::wait_sliced(std::unique_lock<std::mutex>& lock, bool interruptible, Condition condition) {
  while (!finished_cv.wait_for(lock, kSlice, condition)) {
    if (!interruptible) continue;
    lock.unlock();
    bool stop = interrupted();
    lock.lock();
    if (stop) return false;  // even if the condition holds by now: the handler's exception must reach the caller
  }
  return true;
}

bool Engine::interrupted() {
  auto check = interrupt_check.load();
  return check && check() != 0;
}

int64_t Engine::submit(void* address, int64_t offset, char* memory, int64_t nbytes, bool write, void (*done)(void*), void* context) {
  auto request = std::make_shared<Request>();
  request->block = find(address);
  if (!request->block) return fail("no block of a store starts at this address");
  Block& block = *request->block;
  if (offset < 0 || nbytes < 0 || offset + nbytes > block.nbytes)
    return fail("bytes [" + std::to_string(offset) + ", " + std::to_string(offset + nbytes) + ") are outside of a block of " + std::to_string(block.nbytes) + " bytes");
  std::unique_lock<std::mutex> lock(mutex);
  Store& store = *block.store;
  if (forked_child || store.closed || nbytes == 0) {  // no file to go to: the mapping has the contents
    int64_t ticket = next_ticket_++;
    lock.unlock();
    if (write && forked_child && nbytes > 0) return fail("a forked child process cannot write to the store of its parent");
    if (write) memcpy(block.base + offset, memory, nbytes);
    else memcpy(memory, block.base + offset, nbytes);
    if (done) done(context);
    return ticket;
  }
  start_threads();
  if (write) {
    bool room = wait_sliced(lock, true, [&] {
      return store.write_bytes_in_flight == 0 || store.write_bytes_in_flight + nbytes <= store.window;
    });
    if (!room) return fail("interrupted");
  }
  request->ticket = next_ticket_++;
  request->write = write;
  request->offset = offset;
  request->nbytes = nbytes;
  request->memory = memory;
  request->done = done;
  request->context = context;
  block.pending.push_back(request);
  tickets_[request->ticket] = request;
  queue_[write].push_back(request);
  if (write) {
    ++store.writes_in_flight;
    store.write_bytes_in_flight += nbytes;
  } else {
    ++store.reads_in_flight;
  }
  work_cv_[write].notify_all();
  if (write && nbytes > store.window) finished_cv.wait(lock, [&] { return request->finished; });
  return request->ticket;
}

int Engine::wait(int64_t ticket, bool interruptible) {
  std::unique_lock<std::mutex> lock(mutex);
  auto it = tickets_.find(ticket);
  if (it == tickets_.end()) return ticket > 0 && ticket < next_ticket_ ? 0 : fail("no transfer has the ticket " + std::to_string(ticket));
  std::shared_ptr<Request> request = it->second;
  if (!request->finished && forked_child) return fail("the transfer belongs to the parent process");
  auto start = Clock::now();
  if (!wait_sliced(lock, interruptible, [&] { return request->finished; })) return fail("interrupted");
  wait_nanoseconds += since(start);
  return request->error.empty() ? 0 : fail(request->error);
}

int Engine::poll(int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex);
  auto it = tickets_.find(ticket);
  return it == tickets_.end() || it->second->finished ? 1 : 0;
}

int Engine::drain(const std::shared_ptr<Store>& store) {
  std::unique_lock<std::mutex> lock(mutex);
  if (!wait_sliced(lock, true, [&] { return store->writes_in_flight == 0 || forked_child; })) return fail("interrupted");
  if (store->first_write_error.empty()) return 0;
  std::string error;
  error.swap(store->first_write_error);
  return fail(error);
}

void Engine::quiesce(const std::shared_ptr<Store>& store) {
  std::unique_lock<std::mutex> lock(mutex);
  if (forked_child) return;
  finished_cv.wait(lock, [&] { return store->writes_in_flight + store->reads_in_flight == 0; });
}

}  // namespace zinf

using zinf::engine;

extern "C" {
const char* zinf_last_error(void) { return zinf::last_error.c_str(); }

int64_t zinf_read(void* block, int64_t offset, void* dst, int64_t nbytes) {
  return engine().submit(block, offset, static_cast<char*>(dst), nbytes, false, nullptr, nullptr);
}
int64_t zinf_write(void* block, int64_t offset, const void* src, int64_t nbytes, void (*done)(void*), void* context) {
  return engine().submit(block, offset, static_cast<char*>(const_cast<void*>(src)), nbytes, true, done, context);
}
int zinf_wait(int64_t ticket) { return engine().wait(ticket, true); }
int zinf_wait_quiet(int64_t ticket) { return engine().wait(ticket, false); }
int zinf_poll(int64_t ticket) { return engine().poll(ticket); }
void zinf_set_interrupt_check(int (*check)(void)) { engine().interrupt_check = check; }

void zinf_io_stats_get(zinf_io_stats* out) {
  auto& e = engine();
  *out = {e.bytes[0], e.bytes[1], e.counts[0], e.counts[1], e.direct_bytes, e.buffered_bytes,
          e.nanoseconds[0] * 1e-9, e.nanoseconds[1] * 1e-9, e.wait_nanoseconds * 1e-9};
}
}

#ifdef ZINF_SOURCE_HASH
// Found by runtime/native.py in the file's bytes: tells whether a prebuilt library belongs to the sources at hand.
extern "C" const char* zinf_source_hash(void) { return ZINF_SOURCE_HASH; }
#endif
