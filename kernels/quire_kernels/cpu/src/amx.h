// Tiles of the matrix unit: permission, configuration and the order of memory accesses.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

namespace quire {

// What LDTILECFG reads: rows of each tile, and bytes of a row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int row_bytes) {
    rows[tile] = uint8_t(num_rows);
    bytes[tile] = uint16_t(row_bytes);
  }
  inline void load() const;
};

// All eight tiles with 16 rows of 64 bytes, for the life of the object, on its thread.
class Tiles {
 public:
  Tiles() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
    config.load();
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Called before tiles are loaded from memory that plain code has just written: the compiler does not know that
  // `_tile_loadd` reads memory.
  static void sync() { asm volatile("" ::: "memory"); }
};

inline void TileConfig::load() const {
  Tiles::sync();
  _tile_loadconfig(this);
}

}  // namespace quire

#endif
