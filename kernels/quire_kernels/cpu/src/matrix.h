// Activations as operators hand them to each other.
#pragma once

#include <cstdint>

namespace quire {

// One row from some column on. 32 columns at a time lie behind each other, `piece` elements from the next 32.
template <class T>
struct Row {
  T* data;
  uint64_t column, piece;

  T* at(uint64_t c) const { return data + (column + c) / 32 * piece + (column + c) % 32; }
};

// Rows `ld` elements apart; or, with `is_tiled`, what the matrix unit takes: tiles of 16 rows and 32 columns, 1 KiB
// each in bfloat16, those of the same rows behind each other, `ld` the number of columns. Rows of a plain matrix that
// lie some KiB apart share few sets of the first-level cache, and would drive weights out of it.
template <class T>
struct Matrix {
  T* data;
  int64_t ld;
  bool is_tiled = false;

  static int64_t tiled_size(int64_t rows, int64_t columns) { return (rows + 15) / 16 * 16 * columns; }

  Row<T> row(int64_t r, int64_t column = 0) const {
    if (is_tiled) return {data + r / 16 * 16 * ld + r % 16 * 32, uint64_t(column), 16 * 32};
    return {data + r * ld, uint64_t(column), 32};
  }
  // Elements from `row(r).at(c)` to the next row, but for every sixteenth of a tiled matrix.
  int64_t row_stride() const { return is_tiled ? 32 : ld; }
  operator Matrix<const T>() const { return {data, ld, is_tiled}; }
};

}  // namespace quire
