// Matrix products with weights as torch keeps them, [outputs, inputs]. An element of a product is summed in the order
// of the inputs, whatever the other rows are: a row has the same bits in every batch and with any number of threads.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t WIDE = 2;                     // vectors of a panel
constexpr int64_t TILE_ROWS = LANES == 8 ? 6 : 12;  // with which the sums of a tile fit into 16 or 32 registers
constexpr int64_t PANEL = WIDE * LANES;         // columns that are multiplied together
constexpr int64_t DEPTH = 512;                  // inputs of a packed panel

// `count` <= PANEL rows of `depth` numbers, of which row(i) is the address, as panel [depth, PANEL]; zeros after them.
template <typename Row>
inline void pack(Row row, int64_t count, int64_t depth, float* __restrict panel) {
  for (int64_t first = 0; first < PANEL; first += LANES)
    for (int64_t k = 0; k < depth; k += LANES) {
      vec block[LANES];
      for (int64_t i = 0; i < LANES; i++) block[i] = first + i < count ? load(row(first + i) + k, depth - k) : vec{};
      transpose(block);
      for (int64_t i = 0; i < LANES && k + i < depth; i++) store(panel + (k + i) * PANEL + first, block[i]);
    }
}

// sums[r] += x[r] [depth] times the panel, for R rows that are `stride` apart.
template <int R>
inline void multiply(const float* x, int64_t stride, const float* panel, int64_t depth, vec (&sums)[R][WIDE]) {
  for (int64_t k = 0; k < depth; k++) {
    vec columns[WIDE];
    for (int c = 0; c < WIDE; c++) columns[c] = load(panel + k * PANEL + c * LANES);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < WIDE; c++) sums[r][c] = multiply_add(columns[c], x[r * stride + k], sums[r][c]);
  }
}

// Calls function(R, row) with a constant R for tiles of at most TILE_ROWS rows.
template <typename Function>
inline void for_tiles(int64_t rows, Function function) {
  int64_t row = 0;
  for (; rows - row >= TILE_ROWS; row += TILE_ROWS) function(std::integral_constant<int, TILE_ROWS>{}, row);
  for (; rows - row >= 4; row += 4) function(std::integral_constant<int, 4>{}, row);
  for (; rows - row >= 2; row += 2) function(std::integral_constant<int, 2>{}, row);
  for (; rows - row >= 1; row += 1) function(std::integral_constant<int, 1>{}, row);
}

// out [rows, outputs] = x [rows, inputs] times the transposed weight, plus the bias if there is one, plus `out` itself
// with `add`. Rows of x and out may lie apart.
void linear(const float* x, int64_t x_stride, const float* weight, const float* bias, float* out, int64_t out_stride,
            int64_t rows, int64_t outputs, int64_t inputs, bool add) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) if (panels > 1 && rows * outputs * inputs > 65536)
  for (int64_t number = 0; number < panels; number++) {
    alignas(64) float panel[DEPTH * PANEL];
    const int64_t column = number * PANEL, count = outputs - column < PANEL ? outputs - column : PANEL;
    for (int64_t k = 0; k < inputs; k += DEPTH) {
      const int64_t depth = inputs - k < DEPTH ? inputs - k : DEPTH;
      pack([&](int64_t i) { return weight + (column + i) * inputs + k; }, count, depth, panel);
      for_tiles(rows, [&](auto width, int64_t row) {
        constexpr int R = decltype(width)::value;
        vec sums[R][WIDE];
        float* to = out + row * out_stride + column;
        for (int r = 0; r < R; r++)
          for (int c = 0; c < WIDE; c++) {
            const int64_t left = count - c * LANES;
            sums[r][c] = k || add ? load(to + r * out_stride + c * LANES, left) : vec{};
            if (bias && !k) sums[r][c] += load(bias + column + c * LANES, left);
          }
        multiply<R>(x + row * x_stride + k, x_stride, panel, depth, sums);
        for (int r = 0; r < R; r++)
          for (int c = 0; c < WIDE; c++) store(to + r * out_stride + c * LANES, sums[r][c], count - c * LANES);
      });
    }
  }
}

}  // namespace
