// Vectorised CPU loops over optimizer_kernels.h: one instance per rounding and set of options, all of it compiled once per
// instruction set (everything below is inlined into update_chunk_*) and chosen when the library is loaded.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "fp-contract=off", "no-trapping-math")
#elif defined(__clang__)
#pragma clang fp contract(off)
#endif
#include "optimizer_kernels.h"

#include <algorithm>
#include <atomic>
#if defined(__x86_64__) && defined(__GNUC__)
#define ZINF_X86 1
#include <immintrin.h>
#endif

namespace {

using zinf::adam_moments;

constexpr int64_t kChunk = 1024;  // elements: the arrays of one chunk (24 KiB) stay in the first-level cache

// MKL's functions inside of torch's library, set once a process: addresses, no state.
using MklSqrt = void (*)(int, const float*, float*, int64_t);
using MklThreads = int (*)(int);
std::atomic<MklSqrt> mkl_sqrt{nullptr};
std::atomic<MklThreads> mkl_threads{nullptr};
constexpr int64_t kMklMode = 0x2 | 0x140000 | 0x100;  // what ATen passes: high accuracy, denormals kept, errors ignored

struct Arrays { float* param; const float* grad; float* state[3]; };

template <int Rounding, int Flags, bool SmallWeight>
ZINF_HD void adam_moments_loop(const zinf_update_job& job, const Arrays& a, float* square, int64_t n) {
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
ZINF_HD void sgd_loop(const zinf_update_job& job, const Arrays& a, int64_t n) {
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
    ZINF_HD void NAME(const zinf_update_job& job, const Arrays& a, float* square, int64_t n) { \
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
    ZINF_HD void NAME(const zinf_update_job& job, const Arrays& a, int64_t n) {                \
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

ZINF_HD void adam_params(const zinf_update_job& job, float* __restrict param, const float* __restrict first,
                         const float* __restrict root, int64_t n) {
    const zinf_update_job local = job;
    for (int64_t i = 0; i < n; ++i) param[i] = zinf::adam_param(local, param[i], first[i], root[i]);
}

using Roots = void (*)(float*, int64_t);

ZINF_HD void adam_chunk(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n, Roots square_roots) {
    alignas(64) float root[kChunk];
    if (rounding == ZINF_ROUND_FMA) adam_moments_fma(job, a, root, n);
    else if (rounding == ZINF_ROUND_FMA_FIRST) adam_moments_fma_first(job, a, root, n);
    else adam_moments_separate(job, a, root, n);
    const MklSqrt mkl = job.mkl_sqrt ? mkl_sqrt.load(std::memory_order_relaxed) : nullptr;
    if (mkl) mkl(static_cast<int>(n), root, root, kMklMode);
    else square_roots(root, n);
    adam_params(job, a.param, a.state[0], root, n);
}

ZINF_HD void sgd_chunk(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    if (rounding == ZINF_ROUND_FMA) sgd_fma(job, a, n);
    else if (rounding == ZINF_ROUND_FMA_FIRST) sgd_fma_first(job, a, n);
    else sgd_separate(job, a, n);
}

ZINF_HD void update_chunk(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n, Roots square_roots) {
    if (job.kind == ZINF_ADAM) adam_chunk(job, rounding, a, n, square_roots);
    else sgd_chunk(job, rounding, a, n);
}

using Update = void (*)(const zinf_update_job&, int, const Arrays&, int64_t);

void square_roots_plain(float* values, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values[i] = __builtin_sqrtf(values[i]);
}

void update_chunk_plain(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    update_chunk(job, rounding, a, n, square_roots_plain);
}

#if defined(ZINF_X86)
#define ZINF_AVX2 __attribute__((target("avx2,fma")))
#define ZINF_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))

// By hand: sqrtf may have to set errno, which keeps compilers from vectorising it. `n` is rounded up to a whole vector.
ZINF_AVX2 void square_roots_avx2(float* values, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) _mm256_store_ps(values + i, _mm256_sqrt_ps(_mm256_load_ps(values + i)));
}

ZINF_AVX512 void square_roots_avx512(float* values, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 x = _mm512_load_ps(values + i);
        _mm512_store_ps(values + i, _mm512_mask_sqrt_ps(x, 0xffff, x));  // the maskless form draws a compiler warning
    }
}

ZINF_AVX2 void update_chunk_avx2(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    update_chunk(job, rounding, a, n, square_roots_avx2);
}

ZINF_AVX512 void update_chunk_avx512(const zinf_update_job& job, int rounding, const Arrays& a, int64_t n) {
    update_chunk(job, rounding, a, n, square_roots_avx512);
}

Update choose_update() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return update_chunk_plain;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? update_chunk_avx512 : update_chunk_avx2;
}
#else
Update choose_update() { return update_chunk_plain; }
#endif

const Update chosen_update = choose_update();

}  // namespace

extern "C" {

// Gives the kernels MKL's `vmsSqrt` and `MKL_Set_Num_Threads_Local` (null: there is none), found by the caller in torch's
// library. A job asks for this sqrt with mkl_sqrt = 1.
void zinf_update_set_mkl(void* sqrt, void* set_threads) {
    mkl_threads = reinterpret_cast<MklThreads>(set_threads);
    mkl_sqrt = reinterpret_cast<MklSqrt>(sqrt);
}

// Limits the calling thread's MKL calls to `n` threads; returns the former limit (0: none). Our threads share the work already.
int zinf_update_mkl_threads(int n) {
    const MklThreads set = mkl_threads.load();
    return set ? set(n) : 0;
}

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
        chosen_update(*job, rounding, a, count);
        at += count;
    }
}

}  // extern "C"
