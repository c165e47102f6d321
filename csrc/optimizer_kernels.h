// Arithmetic of the adopted optimizers, one element at a time, shared by the vectorised CPU loops and a CUDA kernel.
//
// The reference is torch.optim's for-loop implementation, which is a sequence of ATen ops; each op rounds where its kernel
// rounds. Found by comparing bits with ATen (torch 2.13, AVX2 and AVX-512; body and tail of ATen's loops agree):
//   lerp      fma(weight, end - start, start), or fma(weight - 1, end - start, end) when |weight| >= 1/2
//   addcmul   fma(value * a, b, self)              add with alpha   fma(other, alpha, self)
//   addcdiv   self + (value * a) / b               mul, div         one rounding
//   sqrt      MKL's vmsSqrt where torch is built with MKL: up to 1 ulp from the correctly rounded root, so it is called
//             on a whole chunk through a pointer (cpu_optimizer.cpp)
// Where ATen has no fma (ATEN_CPU_CAPABILITY=default) each `fma` above is a product and a sum. torch's fused=True kernels
// round like this too, with a correctly rounded sqrt, except in the last numel % (vector length) elements, where the sum of
// two products is contracted at the other product. Which of these a process needs is found by a self-check
// (runtime/optimizer.py). Compile without contraction: every fma here is explicit.
#pragma once
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define ZINF_HD __host__ __device__ __forceinline__
#else
#define ZINF_HD inline __attribute__((always_inline))
#endif

extern "C" {
enum zinf_update_kind : int32_t { ZINF_ADAM = 0, ZINF_SGD = 1 };

enum zinf_update_flags : int32_t {
    ZINF_AMSGRAD = 1,         // Adam: state[2] holds the running maximum of exp_avg_sq
    ZINF_L2 = 2,              // grad += weight_decay * param (SGD, and Adam without decoupled_weight_decay)
    ZINF_MOMENTUM = 4,        // SGD: state[0] is the momentum buffer
    ZINF_FIRST = 8,           // SGD: the momentum buffer is created by this step, its old contents are not read
    ZINF_NESTEROV = 16,
    ZINF_UNSCALE = 32,        // divide the gradient by grad_scale first
};

enum zinf_rounding : int32_t { ZINF_ROUND_SEPARATE = 0, ZINF_ROUND_FMA = 1, ZINF_ROUND_FMA_FIRST = 2 };

// One parameter's update. Pointers are to float32: memory, or the start of a block (zinf_block_bytes(pointer) >= 0).
struct zinf_update_job {
    void* param;
    const void* grad;
    void* state[3];           // Adam: exp_avg, exp_avg_sq, max_exp_avg_sq; SGD: momentum_buffer
    int64_t numel;
    int32_t kind, flags, rounding, mkl_sqrt;
    int64_t tail;             // the last `tail` elements round as ZINF_ROUND_FMA_FIRST
    float sign;               // -1 with maximize, else 1
    float grad_scale;
    float weight_decay;       // the L2 factor
    float decay;              // decoupled: param is multiplied by this first (1 - lr * weight_decay, or 1)
    float lerp_weight;        // 1 - beta1
    float beta2, one_minus_beta2;
    float correction;         // sqrt(1 - beta2 ** step)
    float eps;
    float step_size;          // added: -lr / (1 - beta1 ** step) for Adam, -lr for SGD
    float momentum, one_minus_dampening;
};
}

namespace zinf {

template <int Rounding>
ZINF_HD float multiply_add(float a, float b, float c) {
    if constexpr (Rounding == ZINF_ROUND_SEPARATE) return a * b + c;
    else return __builtin_fmaf(a, b, c);
}

// a * b + c * d: `mul_` then `add` or `addcmul` in the for-loop implementation.
template <int Rounding>
ZINF_HD float two_products(float a, float b, float c, float d) {
    if constexpr (Rounding == ZINF_ROUND_SEPARATE) return a * b + c * d;
    else if constexpr (Rounding == ZINF_ROUND_FMA_FIRST) return __builtin_fmaf(a, b, c * d);
    else return __builtin_fmaf(c, d, a * b);
}

template <int Rounding, int Flags>
ZINF_HD float effective_gradient(const zinf_update_job& job, float param, float grad) {
    if constexpr (Flags & ZINF_UNSCALE) grad = grad / job.grad_scale;
    grad = grad * job.sign;
    if constexpr (Flags & ZINF_L2) grad = multiply_add<Rounding>(param, job.weight_decay, grad);
    return grad;
}

// First half of Adam: the moments. Returns the element whose square root the second half divides by.
template <int Rounding, int Flags, bool SmallWeight>
ZINF_HD float adam_moments(const zinf_update_job& job, float param, float grad, float& exp_avg, float& exp_avg_sq,
                           float* max_exp_avg_sq) {
    grad = effective_gradient<Rounding, Flags>(job, param, grad);
    const float difference = grad - exp_avg;
    if constexpr (SmallWeight) exp_avg = multiply_add<Rounding>(job.lerp_weight, difference, exp_avg);
    else if constexpr (Rounding == ZINF_ROUND_SEPARATE) exp_avg = grad - difference * (1.0f - job.lerp_weight);
    else exp_avg = __builtin_fmaf(job.lerp_weight - 1.0f, difference, grad);
    exp_avg_sq = two_products<Rounding>(exp_avg_sq, job.beta2, job.one_minus_beta2 * grad, grad);
    if constexpr (Flags & ZINF_AMSGRAD) {
        const float old = *max_exp_avg_sq;
        *max_exp_avg_sq = (old > exp_avg_sq || old != old) ? old : exp_avg_sq;  // NaN wins, as in torch.maximum
        return *max_exp_avg_sq;
    }
    return exp_avg_sq;
}

// Second half of Adam: the parameter.
ZINF_HD float adam_param(const zinf_update_job& job, float param, float exp_avg, float root) {
    const float denominator = root / job.correction + job.eps;
    return param * job.decay + (job.step_size * exp_avg) / denominator;
}

template <int Rounding, int Flags>
ZINF_HD float sgd_param(const zinf_update_job& job, float param, float grad, float* momentum_buffer) {
    grad = effective_gradient<Rounding, Flags>(job, param, grad);
    if constexpr (Flags & ZINF_MOMENTUM) {
        const float buffer = (Flags & ZINF_FIRST) ? grad
            : two_products<Rounding>(*momentum_buffer, job.momentum, grad, job.one_minus_dampening);
        *momentum_buffer = buffer;
        grad = (Flags & ZINF_NESTEROV) ? multiply_add<Rounding>(buffer, job.momentum, grad) : buffer;
    }
    return multiply_add<Rounding>(grad, job.step_size, param);
}

}  // namespace zinf
