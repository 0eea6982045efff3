// Matrix products with weights as torch keeps them, [outputs, inputs]. An element of a product is summed in the order
// of the inputs, whatever the other rows are: a row has the same bits in every batch and with any number of threads.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t WIDE = 2;                     // vectors of a panel
constexpr int64_t TILE_ROWS = LANES == 8 ? 6 : 12;  // with which the sums of a tile fit into 16 or 32 registers
constexpr int64_t PANEL = WIDE * LANES;         // columns that are multiplied together
constexpr int64_t DEPTH = 512;                  // inputs of a packed panel
constexpr int64_t ROWS = 768;                   // that a thread multiplies with a panel

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

// A matrix whose element (i, j) is at data[i * rows + j * columns].
struct Matrix {
  const float* data;
  int64_t rows, columns;
};

// sums[r] += row r of x, from its element `k` on, times the panel [depth, PANEL].
template <int R>
inline void multiply(const Matrix& x, int64_t row, int64_t k, const float* panel, int64_t depth, vec (&sums)[R][WIDE]) {
  const float* from = x.data + row * x.rows + k * x.columns;
  for (int64_t d = 0; d < depth; d++) {
    vec columns[WIDE];
    for (int c = 0; c < WIDE; c++) columns[c] = load(panel + d * PANEL + c * LANES);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < WIDE; c++)
        sums[r][c] = multiply_add(columns[c], from[r * x.rows + d * x.columns], sums[r][c]);
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

// out [rows, outputs] = x [rows, inputs] times the transposed weight [outputs, inputs], plus the bias if there is one,
// plus `out` itself with `add`. Rows of out may lie apart.
void linear(const Matrix& x, const Matrix& weight, const float* bias, float* out, int64_t out_stride, int64_t rows,
            int64_t outputs, int64_t inputs, bool add) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL, parts = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static) if (panels * parts > 1 && rows * outputs * inputs > 65536)
  for (int64_t item = 0; item < panels * parts; item++) {
    alignas(64) float panel[DEPTH * PANEL];
    const int64_t column = item % panels * PANEL, count = outputs - column < PANEL ? outputs - column : PANEL;
    const int64_t start = item / panels * ROWS, height = rows - start < ROWS ? rows - start : ROWS;
    for (int64_t k = 0; k < inputs; k += DEPTH) {
      const int64_t depth = inputs - k < DEPTH ? inputs - k : DEPTH;
      const float* corner = weight.data + column * weight.rows + k * weight.columns;
      if (weight.columns == 1)
        pack([&](int64_t i) { return corner + i * weight.rows; }, count, depth, panel);
      else
        for (int64_t d = 0; d < depth; d++)
          for (int64_t c = 0; c < PANEL; c += LANES)
            store(panel + d * PANEL + c, load(corner + d * weight.columns + c, count - c));
      for_tiles(height, [&](auto width, int64_t offset) {
        constexpr int R = decltype(width)::value;
        const int64_t row = start + offset;
        vec sums[R][WIDE] = {};  // what is in `out` is added last: next to a large number every product would be rounded
        multiply<R>(x, row, k, panel, depth, sums);
        for (int r = 0; r < R; r++)
          for (int c = 0; c < WIDE; c++) {
            const int64_t left = count - c * LANES;
            float* to = out + (row + r) * out_stride + column + c * LANES;
            if (bias && !k) sums[r][c] += load(bias + column + c * LANES, left);
            if (k || add) sums[r][c] += load(to, left);
            store(to, sums[r][c], left);
          }
      });
    }
  }
}

}  // namespace
