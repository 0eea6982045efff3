// Seeded sampling: a token depends only on its row's logits, the seed and the position.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t SUMMED = 64;  // weights that are added up together while a token is looked for

// SplitMix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
inline uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

inline double uniform(int64_t seed, int64_t position) {
  const uint64_t mixed = mix(mix(static_cast<uint64_t>(seed)) + static_cast<uint64_t>(position));
  return (static_cast<double>(mixed >> 11) + 0.5) * 0x1p-53;
}

// Samples from softmax(logits / temperature) by inverting the cumulative distribution; sets the token's log-prob.
// `weights` has room for the row. A logit of -inf is not sampled.
inline int32_t sample_row(const float* logits, float temperature, double drawn, float* weights, int64_t size,
                          float* log_prob) {
  const float inverse = 1.0f / temperature;
  vec most = fill(-INFINITY);
  for (int64_t i = 0; i < size; i += LANES) {
    vec here = fill(-INFINITY);
    std::memcpy(&here, logits + i, sizeof(float) * (size - i < LANES ? size - i : LANES));
    most = here > most ? here : most;
  }
  const float shift = largest(most);
  for (int64_t i = 0; i < size; i += LANES)
    store(weights + i, exp_negative((load(logits + i, size - i) - shift) * inverse), size - i);
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; i++) total += weights[i];
  const double target = drawn * total;
  int64_t start = 0;              // of the block with the token
  double below = 0, before = 0;  // sums of the weights before that block, and before the one that is looked at
  for (int64_t first = 0; first < size && before <= target; first += SUMMED) {
    const int64_t end = size - first < SUMMED ? size : first + SUMMED;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < end; i++) sum += weights[i];
    if (sum > 0) {
      start = first;
      below = before;
    }
    before += sum;
  }
  int64_t token = start;
  for (int64_t i = start; i < size && i < start + SUMMED && below <= target; i++) {
    if (weights[i] > 0) token = i;
    below += weights[i];
  }
  *log_prob = (logits[token] - shift) * inverse - static_cast<float>(std::log(total));
  return static_cast<int32_t>(token);
}

}  // namespace
