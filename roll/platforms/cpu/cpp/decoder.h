// The decoder layers of Llama, Qwen2 and Qwen3 in one call, in float32.
#pragma once

#include "attention.h"
#include "elementwise.h"

namespace {

constexpr int64_t BLOCK = 192;  // tokens that go through a linear together

struct Model {
  int64_t hidden, heads, key_heads, intermediate, layers, vocabulary, positions;
  float epsilon, head_epsilon;
  const float *embedding, *angles, *norm;
};

// Pointers of one layer, in the order of decoder.py; those that a model lacks are null.
struct Layer {
  const float *norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
  float *keys, *values;
};

// Writes rotated queries [rows, heads, HEAD_DIM], and keys and values to their slots.
void split_heads(const Model& m, const Layer& layer, const Sizes& sizes, const float* projected, const int64_t* positions,
                 const int64_t* slots, float* queries, int64_t rows) {
  const int64_t width = (m.heads + 2 * m.key_heads) * HEAD_DIM;
#pragma omp parallel for if (rows * width > 65536)
  for (int64_t t = 0; t < rows; t++) {
    const float* from = projected + t * width;
    const float* angles = m.angles + positions[t] * HEAD_DIM;
    float normed[HEAD_DIM];
    for (int64_t h = 0; h < m.heads + m.key_heads; h++) {
      const bool is_key = h >= m.heads;
      const float* weight = is_key ? layer.key_norm : layer.query_norm;
      const float* head = from + h * HEAD_DIM;
      if (weight) {
        norm_row(head, weight, normed, HEAD_DIM, m.head_epsilon);
        head = normed;
      }
      rotate_head(head, angles,
                  is_key ? layer.keys + slots[t] * sizes.key_slot_stride + (h - m.heads) * sizes.key_head_stride
                         : queries + (t * m.heads + h) * HEAD_DIM);
    }
    for (int64_t h = 0; h < m.key_heads; h++)
      std::memcpy(layer.values + slots[t] * sizes.value_slot_stride + h * sizes.value_head_stride,
                  from + (m.heads + m.key_heads + h) * HEAD_DIM, sizeof(float) * HEAD_DIM);
  }
}

void norm_rows(const float* from, const float* weight, float* to, int64_t rows, int64_t size, float epsilon) {
#pragma omp parallel for if (rows * size > 65536)
  for (int64_t t = 0; t < rows; t++) norm_row(from + t * size, weight, to + t * size, size, epsilon);
}

// hidden [tokens, H]: from embeddings to the output of the last norm. `work` has room for decoder_room() floats.
void run_layers(const Model& m, const Layer* layers, const Sizes& sizes, float* hidden, float* work,
                const int64_t* positions, const int64_t* slots, int64_t tokens, const int32_t* slot_table,
                const int64_t* rows, const int64_t* key_lengths, const int64_t* query_lengths,
                const int64_t* query_starts) {
  const int64_t size = m.hidden, width = m.heads * HEAD_DIM, projected_width = width + 2 * m.key_heads * HEAD_DIM;
  float* queries = work;
  float* attended = queries + tokens * width;
  float* normed = attended + tokens * width;
  float* wide = normed + BLOCK * size;
  float* activated = wide + BLOCK * (projected_width > 2 * m.intermediate ? projected_width : 2 * m.intermediate);
  for (int64_t number = 0; number < m.layers; number++) {
    const Layer& layer = layers[number];
    for (int64_t first = 0; first < tokens; first += BLOCK) {
      const int64_t count = tokens - first < BLOCK ? tokens - first : BLOCK;
      norm_rows(hidden + first * size, layer.norm, normed, count, size, m.epsilon);
      linear({normed, size, 1}, {layer.qkv, size, 1}, layer.qkv_bias, wide, projected_width, count, projected_width,
             size, false);
      split_heads(m, layer, sizes, wide, positions + first, slots + first, queries + first * width, count);
    }
    attend(queries, attended, layer.keys, layer.values, slot_table, rows, key_lengths, query_lengths, query_starts,
           sizes);
    for (int64_t first = 0; first < tokens; first += BLOCK) {
      const int64_t count = tokens - first < BLOCK ? tokens - first : BLOCK;
      float* residual = hidden + first * size;
      linear({attended + first * width, width, 1}, {layer.out, width, 1}, layer.out_bias, residual, size, count, size,
             width, true);
      norm_rows(residual, layer.mlp_norm, normed, count, size, m.epsilon);
      linear({normed, size, 1}, {layer.gate_up, size, 1}, nullptr, wide, 2 * m.intermediate, count, 2 * m.intermediate,
             size, false);
#pragma omp parallel for if (count * m.intermediate > 65536)
      for (int64_t t = 0; t < count; t++) {
        const float* gate = wide + 2 * t * m.intermediate;
        swiglu_row(gate, gate + m.intermediate, activated + t * m.intermediate, m.intermediate);
      }
      linear({activated, m.intermediate, 1}, {layer.down, m.intermediate, 1}, nullptr, residual, size, count, size,
             m.intermediate, true);
    }
  }
  norm_rows(hidden, m.norm, hidden, tokens, size, m.epsilon);
}

}  // namespace
