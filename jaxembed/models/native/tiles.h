// Configures the AMX tiles of a thread. Without AMX these functions do nothing.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "sizes.h"
#include "vectors.h"

#ifdef __AMX_BF16__
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} TileConfig;

static const TileConfig all_whole = {  // all eight tiles of full size
    .palette = 1,
    .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE},
};

static void tiles_on(void) { _tile_loadconfig(&all_whole); }

static void tiles_off(void) { _tile_release(); }
#else
static void tiles_on(void) {}
static void tiles_off(void) {}
#endif

// Request the permission to use AMX tiles, once for the process. Returns 0 if it is granted or not
// needed, else 1.
int jaxembed_prepare(void) {
#ifdef __AMX_BF16__
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? 1 : 0;
#else
  return 0;
#endif
}
