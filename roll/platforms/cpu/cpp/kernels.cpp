// Functions of a CPU engine, which library.py builds and calls.

#include "attention.h"
#include "decoder.h"
#include "elementwise.h"
#include "linear.h"
#include "sampling.h"

// query, output: [tokens, heads, HEAD_DIM] float32, contiguous. Caches: float32, or bfloat16 where `half` is 1.
// slot_table: [rows, table_stride], the slot of each position; rows [requests] selects. Request b has query_lengths[b]
// queries from row query_starts[b] on, the last of its key_lengths[b] positions.
extern "C" void paged_attention(const float* query, float* output, const void* key_cache, const void* value_cache,
                                const int32_t* slot_table, const int64_t* rows, const int64_t* key_lengths,
                                const int64_t* query_lengths, const int64_t* query_starts, const int64_t* sizes,
                                float scale, int32_t half) {
  const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], scale};
  if (half)
    attend(query, output, static_cast<const uint16_t*>(key_cache), static_cast<const uint16_t*>(value_cache),
           slot_table, rows, key_lengths, query_lengths, query_starts, s);
  else
    attend(query, output, static_cast<const float*>(key_cache), static_cast<const float*>(value_cache), slot_table,
           rows, key_lengths, query_lengths, query_starts, s);
}

// out [rows, outputs] = x [rows, inputs] times the transposed weight [outputs, inputs], plus bias [outputs] or null.
// strides: of rows and columns of x, then of the weight, of which one is 1, and of rows of out.
extern "C" void multiply_rows(const float* x, const float* weight, const float* bias, float* out, int64_t rows,
                              int64_t outputs, int64_t inputs, const int64_t* strides) {
  linear({x, strides[0], strides[1]}, {weight, strides[2], strides[3]}, bias, out, strides[4], rows, outputs, inputs,
         false);
}

// out [rows, hidden] = x / rms(x) * weight. With a residual, x + residual is normalised, and written to `sum`.
extern "C" void rms_norm(const float* x, const float* residual, float* sum, const float* weight, float* out,
                         int64_t rows, int64_t hidden, float epsilon) {
#pragma omp parallel for if (rows * hidden > 65536)
  for (int64_t i = 0; i < rows; i++) {
    const float* from = x + i * hidden;
    if (residual) {
      const float* __restrict added = residual + i * hidden;
      float* __restrict kept = sum + i * hidden;
      for (int64_t d = 0; d < hidden; d++) kept[d] = from[d] + added[d];
      from = kept;
    }
    norm_row(from, weight, out + i * hidden, hidden, epsilon);
  }
}

// out [tokens, heads, HEAD_DIM] = x with its halves rotated by the token's position; x has rows of `stride` elements.
// table [size, HEAD_DIM]: cosines, then sines. Returns 1, and has written nothing, where a position is out of range.
extern "C" int32_t rotate(const float* x, float* out, const int64_t* positions, const float* table, int64_t tokens,
                          int64_t heads, int64_t stride, int64_t size) {
  for (int64_t t = 0; t < tokens; t++)
    if (positions[t] < 0 || positions[t] >= size) return 1;
#pragma omp parallel for if (tokens * heads * HEAD_DIM > 65536)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      rotate_head(x + t * stride + h * HEAD_DIM, table + positions[t] * HEAD_DIM, out + (t * heads + h) * HEAD_DIM);
  return 0;
}

// out [rows, size] = silu(first half of x) * second half; x [rows, 2 * size].
extern "C" void silu_multiply(const float* x, float* out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 65536)
  for (int64_t i = 0; i < rows; i++) swiglu_row(x + 2 * i * size, x + (2 * i + 1) * size, out + i * size, size);
}

// Floats of working memory that decoder_forward needs for this many tokens.
extern "C" int64_t decoder_room(const int64_t* sizes, int64_t tokens) {
  const int64_t hidden = sizes[0], width = sizes[1] * HEAD_DIM, intermediate = sizes[3];
  const int64_t projected = width + 2 * sizes[2] * HEAD_DIM;
  const int64_t wide = projected > 2 * intermediate ? projected : 2 * intermediate;
  return 2 * tokens * width + BLOCK * (hidden + wide + intermediate);
}

// The hidden states [tokens, hidden] after the last norm. Keys and values are written to `slots` [tokens] of the caches.
//
// sizes: hidden, heads, key heads, intermediate, layers, vocabulary, positions of `angles`. weights: embedding, angles,
// last norm, and 12 for each layer as in `Layer`. Requests and strides as in paged_attention.
// Returns 1, and has written nothing, where an id or a position is out of range.
extern "C" int32_t decoder_forward(const int64_t* sizes, const float* epsilons, void* const* weights, const int64_t* ids,
                                   const int64_t* positions, const int64_t* slots, int64_t tokens, float* hidden,
                                   float* work, const int32_t* slot_table, const int64_t* rows,
                                   const int64_t* key_lengths, const int64_t* query_lengths,
                                   const int64_t* query_starts, const int64_t* requests, float scale) {
  const float* const* shared = reinterpret_cast<const float* const*>(weights);
  const Model m{sizes[0],    sizes[1],    sizes[2],  sizes[3],  sizes[4],  sizes[5],
                sizes[6],    epsilons[0], epsilons[1], shared[0], shared[1], shared[2]};
  const Sizes s{requests[0], m.heads, m.key_heads, requests[1], requests[2], requests[3], requests[4], requests[5], scale};
  for (int64_t t = 0; t < tokens; t++)
    if (ids[t] < 0 || ids[t] >= m.vocabulary || positions[t] < 0 || positions[t] >= m.positions) return 1;
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(hidden + t * m.hidden, m.embedding + ids[t] * m.hidden, sizeof(float) * m.hidden);
  run_layers(m, reinterpret_cast<const Layer*>(weights + 3), s, hidden, work, positions, slots, tokens, slot_table, rows,
             key_lengths, query_lengths, query_starts);
  return 0;
}

// Copies `count` elements of each of `tokens` slots in every one of `caches`, from slot from[t] to slot to[t].
extern "C" void copy_tokens(float* const* caches, int64_t number, const int64_t* from, const int64_t* to, int64_t tokens,
                            int64_t slot_stride, int64_t count) {
#pragma omp parallel for if (number * tokens * count > 65536)
  for (int64_t i = 0; i < number; i++)
    for (int64_t t = 0; t < tokens; t++)
      std::memcpy(caches[i] + to[t] * slot_stride, caches[i] + from[t] * slot_stride, sizeof(float) * count);
}

// One token of each row of logits [rows, vocabulary], and its log-prob, at the row's temperature.
extern "C" void sample(const float* logits, const float* temperatures, const int64_t* seeds, const int64_t* positions,
                       int64_t rows, int64_t vocabulary, int32_t* tokens, float* log_probs) {
#pragma omp parallel if (rows > 1 && rows * vocabulary > 65536)
  {
    float* weights = static_cast<float*>(std::malloc(sizeof(float) * vocabulary));
#pragma omp for
    for (int64_t i = 0; i < rows; i++)
      tokens[i] = sample_row(logits + i * vocabulary, temperatures[i], uniform(seeds[i], positions[i]), weights,
                             vocabulary, log_probs + i);
    std::free(weights);
  }
}
