// Vectors of floats as wide as the processor's, in the notation of GCC and Clang.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef HEAD_DIM  // of the model's heads
#define HEAD_DIM 64
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

inline vec load(const float* from) {
  vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// The first `count` floats, and zeros.
inline vec load(const float* from, int64_t count) {
  if (count >= LANES) return load(from);
  vec value = {};
  if (count > 0) std::memcpy(&value, from, count * sizeof(float));
  return value;
}

// A bfloat16 is the upper half of a float.
inline vec load(const uint16_t* from, int64_t count = LANES) {
  ivec bits = {};
  for (int64_t i = 0; i < LANES && i < count; i++) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
  vec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void store(float* to, vec value) { std::memcpy(to, &value, sizeof value); }

inline void store(float* to, vec value, int64_t count) {
  if (count >= LANES)
    store(to, value);
  else if (count > 0)
    std::memcpy(to, &value, count * sizeof(float));
}

inline vec fill(float value) { return vec{} + value; }

// The first `count` of the values, and `other` for the rest.
inline vec keep(vec values, int64_t count, vec other) {
  ivec lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  return lane < ivec{} + static_cast<int32_t>(count) ? values : other;
}

// a * b + c in one rounding where the processor can. Were it left to compilers, which product of a sum is rounded would
// differ between tiles of different size.
inline vec multiply_add(vec a, float b, vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), _mm512_set1_ps(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), _mm256_set1_ps(b), reinterpret_cast<__m256>(c)));
#elif defined(__ARM_FEATURE_FMA) && defined(__ARM_NEON)
  return reinterpret_cast<vec>(vfmaq_n_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), b));
#else
  return a * b + c;
#endif
}

// exp(x) for x <= 0 with a relative error of 2e-7, and 0 below -87: 2^n times a polynomial of x - n log(2), where log(2)
// is a sum, so that the first product has no rounding error.
inline vec exp_negative(vec x) {
  const vec bounded = x < fill(-87.0f) ? fill(-87.0f) : x;
  const vec scaled = bounded * 1.44269504088896341f;
  const vec whole = (scaled + 12582912.0f) - 12582912.0f;  // rounded: 1.5 * 2^23 leaves no room for a fraction
  const vec f = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
  const vec rest = 1.6666667e-1f + f * (4.1666668e-2f + f * (8.3333338e-3f + f * 1.3888889e-3f));
  const vec p = 1.0f + f * (1.0f + f * (0.5f + f * rest));
  const ivec bits = (__builtin_convertvector(whole, ivec) + 127) << 23;
  vec power;
  std::memcpy(&power, &bits, sizeof power);
  return x < fill(-87.0f) ? vec{} : p * power;
}

inline float sum(vec values) {
  float lanes[LANES], total = 0;
  store(lanes, values);
#pragma omp simd reduction(+ : total)
  for (int i = 0; i < LANES; i++) total += lanes[i];
  return total;
}

inline float largest(vec values) {
  float lanes[LANES], found = -INFINITY;
  store(lanes, values);
#pragma omp simd reduction(max : found)
  for (int i = 0; i < LANES; i++) found = lanes[i] > found ? lanes[i] : found;
  return found;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ROLL_SHUFFLES 1
#endif
#endif

#ifdef ROLL_SHUFFLES
// Swaps the lanes of `a` whose number has the bit S with those of `b` whose number has not.
template <int S>
inline void exchange(vec& a, vec& b) {
#define LOW(l) ((l) & S ? LANES + (l) - S : (l))
#define HIGH(l) ((l) & S ? LANES + (l) : (l) + S)
#if defined(__AVX512F__)
#define ALL(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif defined(__AVX__)
#define ALL(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define ALL(f) f(0), f(1), f(2), f(3)
#endif
  const vec low = __builtin_shufflevector(a, b, ALL(LOW)), high = __builtin_shufflevector(a, b, ALL(HIGH));
#undef ALL
#undef HIGH
#undef LOW
  a = low;
  b = high;
}

// Row i of the block becomes its column i.
template <int S = LANES / 2>
inline void transpose(vec (&block)[LANES]) {
  for (int i = 0; i < LANES; i++)
    if (!(i & S)) exchange<S>(block[i], block[i + S]);
  if constexpr (S > 1) transpose<S / 2>(block);
}
#else
inline void transpose(vec (&block)[LANES]) {
  vec result[LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) result[j][i] = block[i][j];
  std::memcpy(block, result, sizeof result);
}
#endif

}  // namespace
