// Vectorised CPU loops over optimizer_kernels.h: one instance per rounding and set of options, one clone per instruction set.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=off", "no-math-errno", "no-trapping-math")
#elif defined(__clang__)
#pragma clang fp contract(off)
#endif
#include "optimizer_kernels.h"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ZINF_CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define ZINF_CLONES
#endif

namespace {

using zinf::adam_moments;

constexpr int64_t kChunk = 1024;  // elements: the arrays of one chunk (24 KiB) stay in the first-level cache

using MklSqrt = void (*)(int, const float*, float*, int64_t);
std::atomic<MklSqrt> mkl_sqrt{nullptr};  // set once a process; a function's address, no state
constexpr int64_t kMklMode = 0x2 | 0x140000 | 0x100;  // what ATen passes: high accuracy, denormals kept, errors ignored

struct Arrays { float* param; const float* grad; float* state[3]; };

template <int Rounding, int Flags, bool SmallWeight>
inline __attribute__((always_inline)) void adam_moments_loop(const zinf_update_job& job, const Arrays& a, float* square,
                                                             int64_t n) {
    const float* __restrict param = a.param;
    const float* __restrict grad = a.grad;
    float* __restrict first = a.state[0];
    float* __restrict second = a.state[1];
    float* __restrict maximum = a.state[2];
    float* __restrict out = square;
    const zinf_update_job local = job;
    for (int64_t i = 0; i < n; ++i)
        out[i] = adam_moments<Rounding, Flags, SmallWeight>(local, param[i], grad[i], first[i], second[i],
                                                           (Flags & ZINF_AMSGRAD) ? maximum + i : nullptr);
}

template <int Rounding, int Flags>
inline __attribute__((always_inline)) void sgd_loop(const zinf_update_job& job, const Arrays& a, int64_t n) {
    float* __restrict param = a.param;
    const float* __restrict grad = a.grad;
    float* __restrict buffer = a.state[0];
    const zinf_update_job local = job;
    for (int64_t i = 0; i < n; ++i)
        param[i] = zinf::sgd_param<Rounding, Flags>(local, param[i], grad[i], (Flags & ZINF_MOMENTUM) ? buffer + i : nullptr);
}

#define ZINF_ADAM_LOOP(ROUNDING, FLAGS)                                                        \
    case FLAGS:                                                                                \
        if (small) adam_moments_loop<ROUNDING, FLAGS, true>(job, a, square, n);                \
        else adam_moments_loop<ROUNDING, FLAGS, false>(job, a, square, n);                     \
        break;
#define ZINF_ADAM_FUNCTION(NAME, ROUNDING)                                                     \
    ZINF_CLONES void NAME(const zinf_update_job& job, const Arrays& a, float* square, int64_t n) { \
        const bool small = job.lerp_weight < 0.5f && job.lerp_weight > -0.5f;                  \
        switch (job.flags & (ZINF_AMSGRAD | ZINF_L2 | ZINF_UNSCALE)) {                         \
            ZINF_ADAM_LOOP(ROUNDING, 0) ZINF_ADAM_LOOP(ROUNDING, 1)                            \
            ZINF_ADAM_LOOP(ROUNDING, 2) ZINF_ADAM_LOOP(ROUNDING, 3)                            \
            ZINF_ADAM_LOOP(ROUNDING, 32) ZINF_ADAM_LOOP(ROUNDING, 33)                          \
            ZINF_ADAM_LOOP(ROUNDING, 34) ZINF_ADAM_LOOP(ROUNDING, 35)                          \
        }                                                                                      \
    }
ZINF_ADAM_FUNCTION(adam_moments_separate, ZINF_ROUND_SEPARATE)
ZINF_ADAM_FUNCTION(adam_moments_fma, ZINF_ROUND_FMA)
ZINF_ADAM_FUNCTION(adam_moments_fma_first, ZINF_ROUND_FMA_FIRST)

#define ZINF_SGD_LOOP(ROUNDING, FLAGS)                                                         \
    case FLAGS: sgd_loop<ROUNDING, FLAGS>(job, a, n); break;                                   \
    case (FLAGS) | ZINF_UNSCALE: sgd_loop<ROUNDING, (FLAGS) | ZINF_UNSCALE>(job, a, n); break;
#define ZINF_SGD_FUNCTION(NAME, ROUNDING)                                                      \
    ZINF_CLONES void NAME(const zinf_update_job& job, const Arrays& a, int64_t n) {            \
        switch (job.flags & ~ZINF_AMSGRAD) {                                                   \
            ZINF_SGD_LOOP(ROUNDING, 0) ZINF_SGD_LOOP(ROUNDING, 2)                              \
            ZINF_SGD_LOOP(ROUNDING, 4) ZINF_SGD_LOOP(ROUNDING, 6)                              \
            ZINF_SGD_LOOP(ROUNDING, 12) ZINF_SGD_LOOP(ROUNDING, 14)                            \
            ZINF_SGD_LOOP(ROUNDING, 20) ZINF_SGD_LOOP(ROUNDING, 22)                            \
            ZINF_SGD_LOOP(ROUNDING, 28) ZINF_SGD_LOOP(ROUNDING, 30)                            \
        }                                                                                      \
    }
ZINF_SGD_FUNCTION(sgd_separate, ZINF_ROUND_SEPARATE)
ZINF_SGD_FUNCTION(sgd_fma, ZINF_ROUND_FMA)
ZINF_SGD_FUNCTION(sgd_fma_first, ZINF_ROUND_FMA_FIRST)

ZINF_CLONES void square_roots(float* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values[i] = __builtin_sqrtf(values[i]);
}

ZINF_CLONES void adam_params(const zinf_update_job& job, float* __restrict param, const float* __restrict first,
                             const float* __restrict root, int64_t n) {
    const zinf_update_job local = job;
    for (int64_t i = 0; i < n; ++i) param[i] = zinf::adam_param(local, param[i], first[i], root[i]);
}

void adam_chunk(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    alignas(64) float root[kChunk];
    if (rounding == ZINF_ROUND_FMA) adam_moments_fma(job, a, root, n);
    else if (rounding == ZINF_ROUND_FMA_FIRST) adam_moments_fma_first(job, a, root, n);
    else adam_moments_separate(job, a, root, n);
    const MklSqrt mkl = job.mkl_sqrt ? mkl_sqrt.load(std::memory_order_relaxed) : nullptr;
    if (mkl) mkl(static_cast<int>(n), root, root, kMklMode);
    else square_roots(root, n);
    adam_params(job, a.param, a.state[0], root, n);
}

void sgd_chunk(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    if (rounding == ZINF_ROUND_FMA) sgd_fma(job, a, n);
    else if (rounding == ZINF_ROUND_FMA_FIRST) sgd_fma_first(job, a, n);
    else sgd_separate(job, a, n);
}

}  // namespace

extern "C" {

// Gives the kernels MKL's `vmsSqrt` (found by the caller in torch's library); a job asks for it with mkl_sqrt = 1.
void zinf_update_set_mkl_sqrt(void* function) { mkl_sqrt = reinterpret_cast<MklSqrt>(function); }

// Applies `job`'s arithmetic to its elements [first, first + n), which lie in memory at param, grad and state[0..2] (each
// already advanced to element `first`); the job's own pointers are not looked at. Only the missing states may be null.
void zinf_update_apply(const zinf_update_job* job, float* param, const float* grad, float* const* state, int64_t first,
                       int64_t n) {
    const int64_t body = job->numel - job->tail - first;  // elements of this range before the tail
    for (int64_t at = 0; at < n;) {
        int64_t count = std::min(kChunk, n - at);
        if (at < body) count = std::min(count, body - at);
        const int rounding = at < body ? job->rounding : static_cast<int>(ZINF_ROUND_FMA_FIRST);
        Arrays a{param + at, grad + at, {}};
        for (int s = 0; s < 3; ++s) a.state[s] = state[s] ? state[s] + at : nullptr;
        if (job->kind == ZINF_ADAM) adam_chunk(*job, rounding, a, count);
        else sgd_chunk(*job, rounding, a, count);
        at += count;
    }
}

}  // extern "C"
