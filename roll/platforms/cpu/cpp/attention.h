// Causal attention over the paged cache, for decode and for extend.
//
// One work item is one key head of one request. It reads every key of the request from its slot in the cache, once,
// into panels that all queries of the request are multiplied with, so nothing else is gathered or padded and the cost
// is that of the true lengths. A query's result does not depend on the other queries and requests of the batch, nor on
// the number of threads: a token has the same bits whether it was prefilled or decoded.
#pragma once

#include "linear.h"

namespace {

constexpr int64_t HEAD_VECTORS = (HEAD_DIM + LANES - 1) / LANES;
constexpr float LOWEST = -3.0e38f;

struct Sizes {
  int64_t requests, heads, key_heads, table_stride;
  int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
  float scale;
};

// Rows of one head of one request in a cache.
template <typename T>
struct Rows {
  const T* cache;
  const int32_t* slots;
  int64_t stride, count;

  const T* operator[](int64_t i) const { return cache + slots[i] * stride; }

  // Asks for all cache lines of a row, if there is such a row.
  void prefetch(int64_t i) const {
    if (i < count)
      for (size_t byte = 0; byte < HEAD_DIM * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>((*this)[i]) + byte);
  }
};

// The keys as panels of [HEAD_DIM, PANEL]; asks for the next keys, and for the values of the same tokens.
template <typename T>
inline void pack_keys(const Rows<T>& keys, const Rows<T>& values, float* panels) {
  for (int64_t i = 0; i < keys.count; i += PANEL) {
    const int64_t present = keys.count - i < PANEL ? keys.count - i : PANEL;
    for (int64_t j = 0; j < present; j++) {
      keys.prefetch(i + PANEL + j);
      values.prefetch(i + j);
    }
    float* panel = panels + i * HEAD_DIM;
    if constexpr (std::is_same_v<T, float>) {
      pack([&](int64_t j) { return keys[i + j]; }, present, HEAD_DIM, panel);
    } else {
      float converted[PANEL][HEAD_DIM];
      for (int64_t j = 0; j < present; j++)
        for (int64_t d = 0; d < HEAD_DIM; d += LANES)
          store(converted[j] + d, load(keys[i + j] + d, HEAD_DIM - d), HEAD_DIM - d);
      pack([&](int64_t j) { return converted[j]; }, present, HEAD_DIM, panel);
    }
  }
}

// The weights of `visible` keys from their scores, in place, and zeros up to `end`; returns the inverse of their sum.
inline float softmax(float* scores, int64_t visible, int64_t end) {
  vec most = fill(LOWEST), total = {};
  for (int64_t i = 0; i < visible; i += LANES) {
    const vec here = keep(load(scores + i), visible - i, most);
    most = here > most ? here : most;
  }
  const float shift = largest(most);
  for (int64_t i = 0; i < end; i += LANES) {
    const vec weights = keep(exp_negative(load(scores + i) - shift), visible - i, vec{});
    total += weights;
    store(scores + i, weights);
  }
  return 1.0f / sum(total);
}

// Adds `count` values, weighted, for C vectors of a head from number `first` on. Asks for the keys that are read next.
template <int R, int C, typename T>
inline void add_values(const float* weights, int64_t stride, const Rows<T>& values, int64_t count, int64_t first,
                       const Rows<T>& next, vec (&sums)[R][HEAD_VECTORS]) {
  for (int64_t i = 0; i < count; i++) {
    next.prefetch(i);
    vec row[C];
    for (int c = 0; c < C; c++) row[c] = load(values[i] + (first + c) * LANES, HEAD_DIM - (first + c) * LANES);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) sums[r][first + c] = multiply_add(row[c], weights[r * stride + i], sums[r][first + c]);
  }
}

template <typename T>
void attend(const float* query, float* output, const T* key_cache, const T* value_cache, const int32_t* slot_table,
            const int64_t* rows, const int64_t* key_lengths, const int64_t* query_lengths, const int64_t* query_starts,
            const Sizes& sizes) {
  const int64_t group = sizes.heads / sizes.key_heads, items = sizes.requests * sizes.key_heads;
  int64_t longest = 0;
  for (int64_t b = 0; b < sizes.requests; b++) longest = key_lengths[b] > longest ? key_lengths[b] : longest;
  const int64_t room = (longest + PANEL - 1) / PANEL * PANEL;
  const auto rows_of = [&](int64_t item, const T* cache, int64_t slot_stride, int64_t head_stride) {
    if (item >= items) return Rows<T>{nullptr, nullptr, 0, 0};
    const int64_t b = item / sizes.key_heads, h = item % sizes.key_heads;
    return Rows<T>{cache + h * head_stride, slot_table + rows[b] * sizes.table_stride, slot_stride, key_lengths[b]};
  };
#pragma omp parallel if (items > 1 && sizes.requests * longest > 64)
  {
    float* panels = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * room * (HEAD_DIM + TILE_ROWS)));
    float* scores = panels + room * HEAD_DIM;
#pragma omp for schedule(dynamic, 2)
    for (int64_t item = 0; item < items; item++) {
      const int64_t b = item / sizes.key_heads, h = item % sizes.key_heads;
      const auto keys = rows_of(item, key_cache, sizes.key_slot_stride, sizes.key_head_stride);
      const auto values = rows_of(item, value_cache, sizes.value_slot_stride, sizes.value_head_stride);
      const auto next = rows_of(item + 1, key_cache, sizes.key_slot_stride, sizes.key_head_stride);
      const int64_t prefix = keys.count - query_lengths[b];
      pack_keys(keys, values, panels);
      for_tiles(query_lengths[b] * group, [&](auto width, int64_t first) {
        constexpr int R = decltype(width)::value, C = HEAD_VECTORS < 2 ? 1 : 2;
        alignas(64) float scaled[R][HEAD_DIM];
        float inverse[R];
        int64_t offsets[R], visible[R];
        for (int r = 0; r < R; r++) {
          const int64_t step = (first + r) / group, head = h * group + (first + r) % group;
          offsets[r] = ((query_starts[b] + step) * sizes.heads + head) * HEAD_DIM;
          visible[r] = prefix + step + 1;
          for (int d = 0; d < HEAD_DIM; d++) scaled[r][d] = query[offsets[r] + d] * sizes.scale;
        }
        const int64_t most = visible[R - 1];
        for (int64_t i = 0; i < most; i += PANEL) {
          vec sums[R][WIDE] = {};
          multiply<R>(Matrix{scaled[0], HEAD_DIM, 1}, 0, 0, panels + i * HEAD_DIM, HEAD_DIM, sums);
          for (int r = 0; r < R; r++)
            for (int c = 0; c < WIDE; c++) store(scores + r * room + i + c * LANES, sums[r][c]);
        }
        const int64_t end = (most + PANEL - 1) / PANEL * PANEL;
        for (int r = 0; r < R; r++) inverse[r] = softmax(scores + r * room, visible[r], end);
        vec sums[R][HEAD_VECTORS] = {};
        int64_t vector = 0;
        for (; vector + C <= HEAD_VECTORS; vector += C)
          add_values<R, C>(scores, room, values, most, vector, next, sums);
        for (; vector < HEAD_VECTORS; vector++) add_values<R, 1>(scores, room, values, most, vector, next, sums);
        for (int r = 0; r < R; r++)
          for (int64_t c = 0; c < HEAD_VECTORS; c++)
            store(output + offsets[r] + c * LANES, sums[r][c] * inverse[r], HEAD_DIM - c * LANES);
      });
    }
    std::free(panels);
  }
}

}  // namespace
