// Runs the updates of one optimizer step out of core: tiles of the tensors that live in blocks are read ahead into staging
// buffers, updated by all threads, and written behind; tensors in memory are updated in place. One pipeline over all
// parameters, so that the disk does not idle between two of them.
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "optimizer_kernels.h"

extern "C" void zinf_update_apply(const zinf_update_job* job, float* param, const float* grad, float* const* state,
                                  int64_t first, int64_t n);
extern "C" int zinf_update_mkl_threads(int n);

namespace {

constexpr int kTensors = 5;                  // param, grad, three states
constexpr int64_t kPiece = 32 << 10;         // elements a thread takes at a time
constexpr int64_t kElement = sizeof(float);

// A few threads for the time of one run. `run` calls body(i) for i in [0, count), the caller takes part.
class Workers {
 public:
    explicit Workers(int extra) {
        sigset_t all, before;  // signals are for the threads that run Python
        sigfillset(&all);
        for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, s);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < extra; ++i) threads_.emplace_back([this] { work(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Workers() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        start_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void run(int64_t count, const std::function<void(int64_t)>& body) {
        if (threads_.empty() || count <= 1) {
            for (int64_t i = 0; i < count; ++i) body(i);
            return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        body_ = &body;
        count_ = count;
        next_ = 0;
        running_ = static_cast<int>(threads_.size());
        ++round_;
        lock.unlock();
        start_.notify_all();
        take(body, count);
        lock.lock();
        done_.wait(lock, [&] { return running_ == 0; });
    }

 private:
    void take(const std::function<void(int64_t)>& body, int64_t count) {
        for (int64_t i; (i = next_.fetch_add(1)) < count;) body(i);
    }

    void work() {
        zinf_update_mkl_threads(1);
        std::unique_lock<std::mutex> lock(mutex_);
        for (int64_t seen = 0;;) {
            start_.wait(lock, [&] { return stop_ || round_ != seen; });
            if (stop_) return;
            seen = round_;
            const auto* body = body_;
            const int64_t count = count_;
            lock.unlock();
            take(*body, count);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> threads_;
    const std::function<void(int64_t)>* body_ = nullptr;
    std::atomic<int64_t> next_{0};
    int64_t count_ = 0, round_ = 0;
    int running_ = 0;
    bool stop_ = false;
};

void* tensor(const zinf_update_job& job, int i) {
    return i == 0 ? job.param : i == 1 ? const_cast<void*>(job.grad) : job.state[i - 2];
}

bool is_read(const zinf_update_job& job, int i) { return !(i >= 2 && (job.flags & ZINF_FIRST)); }
bool is_written(int i) { return i != 1; }

// How the jobs are cut: sizes that the caller must know before the run, to account for the staging memory.
struct Layout {
    std::vector<int> blocks;   // per job: bit i is set where tensor i lives in a block
    std::vector<std::array<zinf::AheadCopy, kTensors>> ahead;  // per job: states that were read during the backward
    int buffers = 0;           // staging buffers of one slot: the most blocks that a job has
    int64_t buffer_bytes = 0, staged_tiles = 0, tile = 0;
    int slots = 0;

    Layout(const zinf_update_job* jobs, int64_t njobs, int64_t tile_bytes, int depth) : blocks(njobs), ahead(njobs) {
        tile_bytes = std::max<int64_t>(tile_bytes / zinf::kAlign, 1) * zinf::kAlign;
        tile = tile_bytes / kElement;
        for (int64_t j = 0; j < njobs; ++j) {
            for (int i = 0; i < kTensors; ++i)
                if (jobs[j].numel > 0 && tensor(jobs[j], i) && zinf_block_bytes(tensor(jobs[j], i)) >= 0) blocks[j] |= 1 << i;
            if (!blocks[j]) continue;
            int staged = blocks[j];
            for (int i = 2; i < kTensors; ++i) {
                if (!(blocks[j] >> i & 1)) continue;
                ahead[j][i] = zinf::ahead_find(tensor(jobs[j], i), jobs[j].numel * kElement);
                if (ahead[j][i].memory) staged &= ~(1 << i);
            }
            buffers = std::max(buffers, __builtin_popcount(staged));
            buffer_bytes = std::max(buffer_bytes, std::min(tile_bytes, zinf::round_up(jobs[j].numel * kElement, zinf::kAlign)));
            staged_tiles += (jobs[j].numel + tile - 1) / tile;
        }
        slots = static_cast<int>(std::min<int64_t>(std::max(depth, 1), staged_tiles));
    }

    int64_t bytes() const { return buffer_bytes * buffers * slots; }
};

struct Tile { int64_t job, first, count; bool staged; };

struct Slot {
    int64_t job = -1;               // whose transfers these are
    int64_t tickets[kTensors];      // in flight: reads, later writes; 0: none
    char* buffers[kTensors];        // by tensor; null: the tensor is in memory
};

class Update {
 public:
    Update(const zinf_update_job* jobs, int64_t njobs, const Layout& layout, char* staging, Workers& workers)
        : jobs_(jobs), layout_(layout), staging_(staging), workers_(workers), slots_(layout.slots) {
        for (auto& slot : slots_) memset(slot.tickets, 0, sizeof slot.tickets);
        for (int64_t j = 0; j < njobs; ++j) {
            const int64_t n = jobs[j].numel, step = layout.blocks[j] ? layout.tile : std::max<int64_t>(n, 1);
            for (int64_t first = 0; first < n; first += step) {
                tiles_.push_back({j, first, std::min(step, n - first), layout.blocks[j] != 0});
                if (layout.blocks[j]) staged_.push_back(tiles_.back());
            }
        }
    }

    // True when every update is on its disk or in its memory. Transfers are finished on return, whatever happened.
    bool run(int64_t* failed_job) {
        int64_t k = 0;  // staged tiles so far
        for (size_t t = 0; t < tiles_.size() && error_.empty(); ++t) {
            const Tile& tile = tiles_[t];
            if (tile.staged) {
                read_ahead(k);
                Slot& slot = slots_[k % slots_.size()];
                if (finish(slot)) {
                    compute(tile, &slot);
                    start_writes(slot, tile);
                }
                ++k;
            } else {
                if (k < static_cast<int64_t>(staged_.size())) read_ahead(k);
                compute(tile, nullptr);
            }
        }
        for (auto& slot : slots_) finish(slot);
        if (error_.empty()) return true;
        *failed_job = failed_job_;
        zinf::fail(error_);
        return false;
    }

 private:
    // Starts the reads of staged tile k, and of later ones whose slot has nothing in flight.
    void read_ahead(int64_t k) {
        const int64_t slots = static_cast<int64_t>(slots_.size());
        const int64_t end = std::min<int64_t>(staged_.size(), k + slots);
        for (; next_read_ < end && error_.empty(); ++next_read_) {
            Slot& slot = slots_[next_read_ % slots];
            if (next_read_ > k && !idle(slot)) return;
            if (finish(slot)) start_reads(slot, staged_[next_read_]);
        }
    }

    static bool idle(const Slot& slot) {
        return std::all_of(slot.tickets, slot.tickets + kTensors, [](int64_t t) { return t <= 0 || zinf_poll(t) == 1; });
    }

    void start_reads(Slot& slot, const Tile& tile) {
        const zinf_update_job& job = jobs_[tile.job];
        slot.job = tile.job;
        char* buffer = staging_ + (&slot - slots_.data()) * layout_.buffers * layout_.buffer_bytes;
        for (int i = 0; i < kTensors; ++i) {
            slot.buffers[i] = nullptr;
            if (!(layout_.blocks[tile.job] >> i & 1)) continue;
            if (const zinf::AheadCopy& copy = layout_.ahead[tile.job][i]; copy.memory) {
                slot.buffers[i] = copy.memory + tile.first * kElement;  // updated and written back in place
                slot.tickets[i] = copy.ticket;
                continue;
            }
            slot.buffers[i] = buffer;
            buffer += layout_.buffer_bytes;
            if (!is_read(job, i) || !error_.empty()) continue;
            slot.tickets[i] = zinf_read(tensor(job, i), tile.first * kElement, slot.buffers[i], tile.count * kElement);
            check(slot.tickets[i], tile.job);
        }
    }

    void start_writes(Slot& slot, const Tile& tile) {
        for (int i = 0; i < kTensors; ++i) {
            if (!slot.buffers[i] || !is_written(i) || !error_.empty()) continue;
            void* block = tensor(jobs_[tile.job], i);
            do slot.tickets[i] = zinf_write(block, tile.first * kElement, slot.buffers[i], tile.count * kElement, nullptr, nullptr);
            while (slot.tickets[i] < 0 && !strcmp(zinf_last_error(), "interrupted"));  // a half-applied step helps nobody
            check(slot.tickets[i], tile.job);
        }
    }

    void check(int64_t& ticket, int64_t job) {
        if (ticket >= 0) return;
        ticket = 0;
        note_error(job);
    }

    void note_error(int64_t job) {
        if (!error_.empty()) return;
        error_ = zinf_last_error();
        if (error_.empty()) error_ = "a transfer failed without a message";
        failed_job_ = job;
    }

    // Waits for the slot's transfers; false once anything has failed.
    bool finish(Slot& slot) {
        for (int64_t& ticket : slot.tickets) {
            if (ticket > 0 && zinf_wait_quiet(ticket) != 0) note_error(slot.job);
            ticket = 0;
        }
        return error_.empty();
    }

    void compute(const Tile& tile, const Slot* slot) {
        const zinf_update_job& job = jobs_[tile.job];
        float* base[kTensors];
        for (int i = 0; i < kTensors; ++i) {
            auto* memory = static_cast<float*>(tensor(job, i));
            if (slot && slot->buffers[i]) base[i] = reinterpret_cast<float*>(slot->buffers[i]);
            else base[i] = memory ? memory + tile.first : nullptr;
        }
        workers_.run((tile.count + kPiece - 1) / kPiece, [&](int64_t piece) {
            const int64_t at = piece * kPiece;
            float* state[3];
            for (int s = 0; s < 3; ++s) state[s] = base[s + 2] ? base[s + 2] + at : nullptr;
            zinf_update_apply(&job, base[0] + at, base[1] + at, state, tile.first + at, std::min(kPiece, tile.count - at));
        });
    }

    const zinf_update_job* jobs_;
    const Layout& layout_;
    char* staging_;
    Workers& workers_;
    std::vector<Slot> slots_;
    std::vector<Tile> tiles_, staged_;
    int64_t next_read_ = 0, failed_job_ = -1;
    std::string error_;
};

}  // namespace

extern "C" {

// Bytes of staging memory that zinf_update_run takes for these jobs: 0 when all tensors are in memory.
int64_t zinf_update_staging_bytes(const zinf_update_job* jobs, int64_t njobs, int64_t tile_bytes, int32_t depth) {
    return Layout(jobs, njobs, tile_bytes, depth).bytes();
}

// Runs all jobs. tile_bytes: of one staging buffer (rounded down to a page); depth: sets of buffers in flight; staging:
// page-aligned memory of zinf_update_staging_bytes, or null to map and unmap it here. No signal interrupts it: a step applied
// to half of the parameters could be neither continued nor repeated. 0, or -1 with *failed_job and zinf_last_error().
int zinf_update_run(const zinf_update_job* jobs, int64_t njobs, int64_t tile_bytes, int32_t depth, int32_t threads,
                    void* staging, int64_t* failed_job) {
    *failed_job = -1;
    const Layout layout(jobs, njobs, tile_bytes, depth);
    int64_t total = 0;
    for (int64_t j = 0; j < njobs; ++j) {
        total += jobs[j].numel;
        for (int i = 0; i < kTensors; ++i) {
            if (!(layout.blocks[j] >> i & 1) || zinf_block_bytes(tensor(jobs[j], i)) >= jobs[j].numel * kElement) continue;
            *failed_job = j;
            return zinf::fail("a tensor of " + std::to_string(jobs[j].numel) + " elements starts in a block of " +
                              std::to_string(zinf_block_bytes(tensor(jobs[j], i))) + " bytes");
        }
    }
    void* own = nullptr;
    if (layout.bytes() > 0 && !staging) {
        own = mmap(nullptr, layout.bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (own == MAP_FAILED)
            return zinf::fail("no memory for " + std::to_string(layout.bytes()) + " bytes of optimizer staging: " +
                              zinf::errno_text(errno) + "; use smaller tiles");
        madvise(own, layout.bytes(), MADV_DONTFORK);  // a fork must not turn pages under direct I/O into copies
    }
    bool ok;
    {
        // Starting a thread costs more than updating a few thousand elements.
        Workers workers(total >= 2 * kPiece ? std::max(threads, 1) - 1 : 0);
        const int mkl_threads = zinf_update_mkl_threads(1);
        ok = Update(jobs, njobs, layout, static_cast<char*>(own ? own : staging), workers).run(failed_job);
        for (int64_t j = 0; j < njobs; ++j)  // updated, so they are no longer what their blocks held
            for (int i = 2; i < kTensors; ++i)
                if (layout.ahead[j][i].memory) {
                    zinf::ahead_took(jobs[j].numel * kElement);
                    zinf_ahead_drop(tensor(jobs[j], i));
                }
        zinf_update_mkl_threads(mkl_threads);
    }
    if (own) munmap(own, layout.bytes());
    return ok ? 0 : -1;
}

}  // extern "C"
