// Kernels of a CPU engine: attention over the paged cache, RMSNorm, rotary embedding, SwiGLU. Built by cpu_kernels.py.
//
// Attention is causal, for decode and for extend. One work item is one key head of a few queries of one request. It
// reads every key of the request from its slot in the cache, so nothing is gathered or padded, and the cost is that of
// the true lengths. A query's result does not depend on the other requests of the batch, nor on the number of threads.

#include <cmath>
#include <cstdint>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif

namespace {

constexpr int64_t AHEAD = 12;        // keys that are prefetched ahead of their use
constexpr int64_t QUERIES = 4;       // queries of one request that share a pass over its keys
constexpr float LOWEST = -3.0e38f;

// exp(x) for x <= 0 with a relative error of 2e-7: 2^n times a polynomial of the rest, which compilers vectorise.
inline float exp_negative(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float scaled = x * 1.44269504088896341f;
  const float whole = __builtin_floorf(scaled + 0.5f);
  const float f = (scaled - whole) * 0.693147180559945f;
  const float rest = 1.6666667e-1f + f * (4.1666668e-2f + f * (8.3333338e-3f + f * 1.3888889e-3f));
  const float p = 1.0f + f * (1.0f + f * (0.5f + f * rest));
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// The first HEAD_DIM elements at `from` as float32; a bfloat16 is the upper half of a float32.
template <typename T>
inline void load(const T* __restrict from, float* __restrict to) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, HEAD_DIM * sizeof(float));
  } else {
    for (int d = 0; d < HEAD_DIM; d++) {
      const uint32_t bits = static_cast<uint32_t>(from[d]) << 16;
      std::memcpy(to + d, &bits, sizeof bits);
    }
  }
}

// Asks for all cache lines of the first HEAD_DIM elements at `from`.
template <typename T>
inline void prefetch(const T* from) {
  for (size_t byte = 0; byte < HEAD_DIM * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte);
}

// Attention of R query rows, of which row r attends to the first `visible[r]` keys of `keys`.
template <int R, typename T>
void attend(const float* const* query, float* const* output, const int64_t* visible, const T* key_cache,
            const T* value_cache, const int32_t* slots, int64_t keys, int64_t key_stride, int64_t value_stride,
            float scale, float* __restrict scores) {
  float scaled[R][HEAD_DIM], sum[R][HEAD_DIM], row[HEAD_DIM], inverse[R];
  for (int r = 0; r < R; r++)
    for (int d = 0; d < HEAD_DIM; d++) {
      scaled[r][d] = query[r][d] * scale;
      sum[r][d] = 0;
    }
  for (int64_t i = 0; i < keys; i++) {
    prefetch(key_cache + slots[i + AHEAD < keys ? i + AHEAD : i] * key_stride);
    load(key_cache + slots[i] * key_stride, row);
    for (int r = 0; r < R; r++) {
      float dot = 0;
      for (int d = 0; d < HEAD_DIM; d++) dot += scaled[r][d] * row[d];
      scores[r * keys + i] = dot;
    }
  }
  for (int r = 0; r < R; r++) {
    float* __restrict weights = scores + r * keys;
    float largest = LOWEST, total = 0;
    for (int64_t i = 0; i < visible[r]; i++) largest = weights[i] > largest ? weights[i] : largest;
    for (int64_t i = 0; i < visible[r]; i++) {
      weights[i] = exp_negative(weights[i] - largest);
      total += weights[i];
    }
    for (int64_t i = visible[r]; i < keys; i++) weights[i] = 0;
    inverse[r] = 1.0f / total;
  }
  for (int64_t i = 0; i < keys; i++) {
    prefetch(value_cache + slots[i + AHEAD < keys ? i + AHEAD : i] * value_stride);
    load(value_cache + slots[i] * value_stride, row);
    for (int r = 0; r < R; r++) {
      const float weight = scores[r * keys + i];
      for (int d = 0; d < HEAD_DIM; d++) sum[r][d] += weight * row[d];
    }
  }
  for (int r = 0; r < R; r++)
    for (int d = 0; d < HEAD_DIM; d++) output[r][d] = sum[r][d] * inverse[r];
}

struct Sizes {
  int64_t requests, heads, key_heads, table_stride;
  int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
  float scale;
};

template <typename T>
void run(const float* query, float* output, const T* key_cache, const T* value_cache, const int32_t* slot_table,
         const int64_t* rows, const int64_t* key_lengths, const int64_t* query_lengths, const int64_t* query_starts,
         const Sizes& sizes) {
  const int64_t group = sizes.heads / sizes.key_heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < sizes.requests; b++) longest = key_lengths[b] > longest ? key_lengths[b] : longest;
#pragma omp parallel
  {
    float* scores = static_cast<float*>(std::malloc(sizeof(float) * 8 * longest));
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t b = 0; b < sizes.requests; b++)
      for (int64_t h = 0; h < sizes.key_heads; h++) {
        const int32_t* slots = slot_table + rows[b] * sizes.table_stride;
        const T* keys = key_cache + h * sizes.key_head_stride;
        const T* values = value_cache + h * sizes.value_head_stride;
        const int64_t prefix = key_lengths[b] - query_lengths[b];
        for (int64_t first = 0; first < query_lengths[b]; first += QUERIES) {
          const int64_t last = first + QUERIES < query_lengths[b] ? first + QUERIES : query_lengths[b];
          const int64_t count = (last - first) * group;
          for (int64_t done = 0; done < count;) {
            const float* in[8];
            float* out[8];
            int64_t visible[8], most = 0;
            const int64_t left = count - done, width = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int64_t r = 0; r < width; r++) {
              const int64_t step = first + (done + r) / group, head = h * group + (done + r) % group;
              const int64_t offset = ((query_starts[b] + step) * sizes.heads + head) * HEAD_DIM;
              in[r] = query + offset;
              out[r] = output + offset;
              visible[r] = prefix + step + 1;
              most = visible[r] > most ? visible[r] : most;
            }
#define ATTEND(R)                                                                                 \
  attend<R, T>(in, out, visible, keys, values, slots, most, sizes.key_slot_stride,                \
               sizes.value_slot_stride, sizes.scale, scores)
            if (width == 8) ATTEND(8);
            else if (width == 4) ATTEND(4);
            else if (width == 2) ATTEND(2);
            else ATTEND(1);
#undef ATTEND
            done += width;
          }
        }
      }
    std::free(scores);
  }
}

}  // namespace

// query, output: [tokens, heads, HEAD_DIM] float32, contiguous. Caches: float32, or bfloat16 where `half` is 1.
// slot_table: [rows, table_stride], the slot of each position; rows [requests] selects. Request b has query_lengths[b]
// queries from row query_starts[b] on, the last of its key_lengths[b] positions.
extern "C" void paged_attention(const float* query, float* output, const void* key_cache, const void* value_cache,
                                const int32_t* slot_table, const int64_t* rows, const int64_t* key_lengths,
                                const int64_t* query_lengths, const int64_t* query_starts, const int64_t* sizes,
                                float scale, int32_t half) {
  const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], scale};
  if (half)
    run(query, output, static_cast<const uint16_t*>(key_cache), static_cast<const uint16_t*>(value_cache), slot_table,
        rows, key_lengths, query_lengths, query_starts, s);
  else
    run(query, output, static_cast<const float*>(key_cache), static_cast<const float*>(value_cache), slot_table, rows,
        key_lengths, query_lengths, query_starts, s);
}

// out [rows, hidden] = x / rms(x) * weight. With a residual, x + residual is normalised, and written to `sum`.
extern "C" void rms_norm(const float* x, const float* residual, float* sum, const float* weight, float* out,
                         int64_t rows, int64_t hidden, float epsilon) {
#pragma omp parallel for if (rows * hidden > 65536)
  for (int64_t i = 0; i < rows; i++) {
    const float* __restrict from = x + i * hidden;
    float* __restrict to = out + i * hidden;
    float squares = 0;
    if (residual) {
      const float* __restrict added = residual + i * hidden;
      float* __restrict kept = sum + i * hidden;
      for (int64_t d = 0; d < hidden; d++) kept[d] = from[d] + added[d];
      from = kept;
    }
    for (int64_t d = 0; d < hidden; d++) squares += from[d] * from[d];
    const float factor = 1.0f / std::sqrt(squares / hidden + epsilon);
    for (int64_t d = 0; d < hidden; d++) to[d] = from[d] * factor * weight[d];
  }
}

// out [tokens, heads, HEAD_DIM] = x with its halves rotated by the token's position; x has rows of `stride` elements.
// table [positions, HEAD_DIM]: cosines, then sines.
extern "C" void rotate(const float* x, float* out, const int64_t* positions, const float* table, int64_t tokens,
                       int64_t heads, int64_t stride) {
  constexpr int HALF = HEAD_DIM / 2;
#pragma omp parallel for if (tokens * heads * HEAD_DIM > 65536)
  for (int64_t t = 0; t < tokens; t++) {
    const float* __restrict cosine = table + positions[t] * HEAD_DIM;
    const float* __restrict sine = cosine + HALF;
    for (int64_t h = 0; h < heads; h++) {
      const float* __restrict from = x + t * stride + h * HEAD_DIM;
      float* __restrict to = out + (t * heads + h) * HEAD_DIM;
      for (int d = 0; d < HALF; d++) {
        to[d] = from[d] * cosine[d] - from[d + HALF] * sine[d];
        to[d + HALF] = from[d + HALF] * cosine[d] + from[d] * sine[d];
      }
    }
  }
}

// out [rows, size] = silu(first half of x) * second half; x [rows, 2 * size].
extern "C" void silu_multiply(const float* x, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 65536)
  for (int64_t i = 0; i < rows; i++) {
    const float* __restrict gate = x + 2 * i * size;
    const float* __restrict up = gate + size;
    float* __restrict to = out + i * size;
    for (int64_t d = 0; d < size; d++) {
      const float e = exp_negative(gate[d] < 0 ? gate[d] : -gate[d]);  // sigmoid(g) = 1 / (1 + e) or e / (1 + e)
      to[d] = gate[d] * ((gate[d] < 0 ? e : 1.0f) / (1.0f + e)) * up[d];
    }
  }
}
