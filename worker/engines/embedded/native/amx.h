/* AMX: products of tiles, which are up to 16 rows of 64 bytes in registers of their own, tmm0 to tmm7.
 *
 * A product adds to each word of tile `to` the products of a row of tile `a` and of 16 words, one below the other, of tile
 * `b`: words of four bytes, or of two bfloat16. The instructions are written as assembly, since the files are compiled
 * for processors without them, too. The caller has asked the system for the state of tiles
 * (`native/libraries.py`), and releases them when done: a thread whose tiles are in use takes longer to be switched.
 */
#ifndef AMX_H
#define AMX_H

#include "vector.h"

enum {
    TILE_ROWS = 16,
    TILE_BYTES = 64, /* of a row */
};

/* Compilers whose systems' assemblers know AMX. */
#if defined(__x86_64__) && defined(__AVX512F__) && (__GNUC__ >= 12 || __clang_major__ >= 12)
#define CAN_HAVE_TILES

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* of each tile */
    uint8_t rows[16];
} tile_config_t;

INLINED void
configure_tiles(const tile_config_t *config)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*config));
}

/* For products of up to 32 rows: tiles 0 and 1 are sums of the first 16, 2 and 3 of the others, 4 and 5 their rows, 6 and 7
 * columns.
 */
static inline void
configure_products(int64_t rows)
{
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int is_second = tile == 2 || tile == 3 || tile == 5;
        const int64_t of_second = rows > TILE_ROWS ? rows - TILE_ROWS : 0;
        const int64_t count = tile > 5 ? TILE_ROWS : is_second ? of_second : smaller(rows, TILE_ROWS);
        config.rows[tile] = (uint8_t)count;
        config.row_bytes[tile] = count ? TILE_BYTES : 0;
    }
    configure_tiles(&config);
}

INLINED void
release_tiles(void)
{
    __asm__ volatile("tilerelease");
}

#define ZERO_TILE(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define LOAD_TILE(tile, from, stride)                                                                                  \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride)                                                                                   \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define ADD_SIGNED_BYTES(to, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #to : :)
#define ADD_UNSIGNED_BYTES(to, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #to : :) /* those of b */
#define ADD_BFLOAT16(to, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to : :)

/* DO(tile, where, bytes from row to row) for each tile of sums; they lie at `sums`, with this stride. */
#define EACH_SUM(DO, has_second, sums, stride)                                                                         \
    DO(0, sums, (stride) * sizeof(float));                                                                             \
    DO(1, (sums) + LANES, (stride) * sizeof(float));                                                                   \
    if (has_second) {                                                                                                  \
        DO(2, (sums) + TILE_ROWS * (stride), (stride) * sizeof(float));                                                \
        DO(3, (sums) + TILE_ROWS * (stride) + LANES, (stride) * sizeof(float));                                        \
    }
#define ZERO_SUM(tile, from, stride) ZERO_TILE(tile)

/* Adds the products, in bfloat16, of up to 32 rows and of two halves of the columns to the tiles of sums. */
INLINED void
add_tiles(int has_second, const void *rows, int64_t row_bytes, const void *left, const void *right, int64_t column_bytes)
{
    LOAD_TILE(6, left, column_bytes);
    LOAD_TILE(7, right, column_bytes);
    LOAD_TILE(4, rows, row_bytes);
    ADD_BFLOAT16(0, 4, 6);
    ADD_BFLOAT16(1, 4, 7);
    if (has_second) {
        LOAD_TILE(5, (const char *)rows + TILE_ROWS * row_bytes, row_bytes);
        ADD_BFLOAT16(2, 5, 6);
        ADD_BFLOAT16(3, 5, 7);
    }
}

#endif
#endif
