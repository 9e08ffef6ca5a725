// Tiles of the matrix unit: permission, configuration and the order of memory accesses.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

namespace quire {

// All eight tiles with 16 rows of 64 bytes, for the life of the object, on its thread.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    sync();
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Before tiles are loaded from memory that plain code has just written: the compiler does not know that
  // `_tile_loadd` reads memory.
  static void sync() { asm volatile("" ::: "memory"); }
};

}  // namespace quire

#endif
