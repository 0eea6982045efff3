// RMSNorm, rotary embedding and SwiGLU of one row.
#pragma once

#include "vectors.h"

namespace {

// to [size] = from / rms(from) * weight; `to` may be `from`.
inline void norm_row(const float* from, const float* __restrict weight, float* to, int64_t size, float epsilon) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < size; d++) squares += from[d] * from[d];
  const float factor = 1.0f / std::sqrt(squares / size + epsilon);
#pragma omp simd
  for (int64_t d = 0; d < size; d++) to[d] = from[d] * factor * weight[d];
}

// to [HEAD_DIM] = one head with its halves rotated; angles [HEAD_DIM]: cosines, then sines. `to` is not `from`.
inline void rotate_head(const float* __restrict from, const float* __restrict angles, float* __restrict to) {
  constexpr int HALF = HEAD_DIM / 2;
  for (int d = 0; d < HALF; d++) {
    to[d] = from[d] * angles[d] - from[d + HALF] * angles[d + HALF];
    to[d + HALF] = from[d + HALF] * angles[d] + from[d] * angles[d + HALF];
  }
}

// to [size] = silu(gate) * up.
inline void swiglu_row(const float* gate, const float* up, float* to, int64_t size) {
  for (int64_t d = 0; d < size; d += LANES) {
    const vec x = load(gate + d, size - d);
    const vec e = exp_negative(x < vec{} ? x : -x);  // sigmoid(x) = 1 / (1 + e) or e / (1 + e)
    store(to + d, x * ((x < vec{} ? e : fill(1.0f)) / (1.0f + e)) * load(up + d, size - d), size - d);
  }
}

}  // namespace
