/* Products of `code_panels.h` with AMX, for many rows: the same sums, since they are exact.
 *
 * Codes of 16 bits are multiplied as their upper bytes, with a sign, and their lower ones, without:
 *
 *     sum = 65536 * upper * upper + 256 * (upper * lower + lower * upper) + lower * lower
 */
#ifndef CODE_TILES_H
#define CODE_TILES_H

#include "amx.h"
#include "code_panels.h"

enum {
    CODES_SIZE = TILE_ROWS * TILE_BYTES, /* bytes of a tile */
    DEEPEST = WIDEST / TILE_BYTES,       /* tiles of a row, at most */
};

/* Upper and lower bytes of 16 rows: [tiles of 64 codes][16 rows][64]. */
typedef int8_t code_rows_t[2][DEEPEST][CODES_SIZE];

/* Upper and lower bytes of columns: [tiles of 16 columns][tiles of 64 codes][16 words of 4 codes][16 columns]. */
typedef int8_t code_columns_t[2][KEYS / LANES * DEEPEST][CODES_SIZE];

/* A block: its columns are keys, with the codes of elements; and elements, with the codes of 64 keys. */
typedef struct {
    code_columns_t keys ALIGNED, values ALIGNED;
} code_bytes_t;

/* Tiles of a row of `width` codes. */
static inline int64_t
tiles_of_row(int64_t width)
{
    return (width + TILE_BYTES - 1) / TILE_BYTES;
}

/* Bytes of 0 for `rows` rows, of which some of the last tile and of each tile's bytes behind `width` will stay. */
static inline void
clear_rows(code_rows_t *rows, int count, int64_t width)
{
    for (int tile = 0; tile < (count + TILE_ROWS - 1) / TILE_ROWS; tile++)
        for (int part = 0; part < 2; part++)
            memset(rows[tile][part], 0, tiles_of_row(width) * CODES_SIZE);
}

#ifdef CAN_HAVE_TILES

enum {
    PLACES = 3, /* products of upper bytes, of upper and lower ones, and of lower ones */
    CODE_PRODUCTS = TILE_ROWS * LANES, /* of a tile */
};

static inline void
configure_code_tiles(void)
{
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = TILE_ROWS;
        config.row_bytes[tile] = TILE_BYTES;
    }
    configure_tiles(&config);
}

/* Stores 16 codes, which are whole numbers, from number `at` on: a multiple of 16. */
INLINED void
store_row_bytes(code_rows_t rows, int row, int64_t at, vec codes)
{
    const int64_t tile = at / TILE_BYTES, where = row * TILE_BYTES + at % TILE_BYTES;
    const __m512i x = _mm512_cvtps_epi32(codes);
    _mm_store_si128((__m128i *)(rows[0][tile] + where), _mm512_cvtepi32_epi8(_mm512_srai_epi32(x, 8)));
    _mm_store_si128((__m128i *)(rows[1][tile] + where), _mm512_cvtepi32_epi8(x));
}

/* Columns of a panel of `words` words of two codes, in `deep` tiles for each 16 columns, of which the first ones are number
 * `first`. Behind the last word is whatever the panel has there: it meets rows' bytes of 0.
 */
static void
split_panel(const int32_t *panel, int64_t words, int64_t deep, int64_t first, code_columns_t columns)
{
    const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    for (int64_t half = 0; half < COLUMNS / LANES; half++) {
        const int32_t *from = panel + half * LANES;
        int8_t *upper = columns[0][(first + half) * deep], *lower = columns[1][(first + half) * deep];
        for (int64_t word = 0; word < words; word += 2, from += 2 * COLUMNS, upper += TILE_BYTES, lower += TILE_BYTES) {
            const __m512i x = _mm512_shuffle_epi8(_mm512_load_si512(from), apart);
            const __m512i y = _mm512_shuffle_epi8(_mm512_load_si512(from + COLUMNS), apart);
            _mm512_store_si512(lower, _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16)));
            _mm512_store_si512(upper, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y));
        }
    }
}

static void
split_block(const code_block_t *block, int64_t width, code_bytes_t *bytes)
{
    const int64_t deep = tiles_of_row(width), words = (block->rows.count + CODES_PER_WORD - 1) / CODES_PER_WORD;
    for (int64_t key = 0; key < block->rows.count; key += COLUMNS)
        split_panel(keys_panel(block, key, width), width / CODES_PER_WORD, deep, key / LANES, bytes->keys);
    for (int64_t at = 0; at < width; at += COLUMNS)
        split_panel(values_panel(block, at), words, 1, at / LANES, bytes->values);
}

INLINED void
store_code_products(int is_odd, int32_t products[PLACES][CODE_PRODUCTS])
{
    if (is_odd) {
        STORE_TILE(3, products[0], TILE_BYTES);
        STORE_TILE(4, products[1], TILE_BYTES);
        STORE_TILE(5, products[2], TILE_BYTES);
    } else {
        STORE_TILE(0, products[0], TILE_BYTES);
        STORE_TILE(1, products[1], TILE_BYTES);
        STORE_TILE(2, products[2], TILE_BYTES);
    }
}

#define MULTIPLY_CODES(upper, middle, lower)                                                                           \
    LOAD_TILE(6, rows[0][tile], TILE_BYTES);                                                                           \
    LOAD_TILE(7, columns[0][first + tile], TILE_BYTES);                                                                \
    ADD_BYTES(ss, upper, 6, 7);                                                                                        \
    LOAD_TILE(7, columns[1][first + tile], TILE_BYTES);                                                                \
    ADD_BYTES(su, middle, 6, 7);                                                                                       \
    LOAD_TILE(6, rows[1][tile], TILE_BYTES);                                                                           \
    ADD_BYTES(uu, lower, 6, 7);                                                                                        \
    LOAD_TILE(7, columns[0][first + tile], TILE_BYTES);                                                                \
    ADD_BYTES(us, middle, 6, 7);

/* Sums of 16 rows and 16 columns, whose tiles begin with number `first`, in tiles 0 to 2, or 3 to 5 if it `is_odd`;
 * meanwhile those before, in the others, have become known, and are stored.
 */
INLINED void
multiply_code_tile(int is_odd, const code_rows_t rows, const code_columns_t columns, int64_t first, int64_t deep, int has_before,
                   int32_t before[PLACES][CODE_PRODUCTS])
{
    if (is_odd) {
        ZERO_TILE(3);
        ZERO_TILE(4);
        ZERO_TILE(5);
    } else {
        ZERO_TILE(0);
        ZERO_TILE(1);
        ZERO_TILE(2);
    }
    for (int64_t tile = 0; tile < deep; tile++) {
        if (is_odd) {
            MULTIPLY_CODES(3, 4, 5)
        } else {
            MULTIPLY_CODES(0, 1, 2)
        }
        if (tile == 0 && has_before)
            store_code_products(!is_odd, before);
    }
}

INLINED void
join_products(int32_t products[PLACES][CODE_PRODUCTS], float *sums, int64_t sums_stride)
{
#pragma GCC unroll 4
    for (int r = 0; r < TILE_ROWS; r++) {
        const ints upper = load_ints(products[0] + r * LANES), middle = load_ints(products[1] + r * LANES);
        const ints both = ints_add(_mm512_slli_epi32(upper, 16), _mm512_slli_epi32(middle, 8));
        vec_store(sums + r * sums_stride, vec_of_ints(ints_add(both, load_ints(products[2] + r * LANES))));
    }
}

/* Sums [16, columns] of the products of 16 rows and of `count` times 16 columns, which have `deep` tiles each. */
static void
multiply_code_tiles(const code_rows_t rows, const code_columns_t columns, int64_t deep, int64_t count, float *sums,
                    int64_t sums_stride)
{
    int32_t products[PLACES][CODE_PRODUCTS] ALIGNED;
    for (int64_t number = 0; number < count; number++) {
        if (number % 2)
            multiply_code_tile(1, rows, columns, number * deep, deep, 1, products);
        else
            multiply_code_tile(0, rows, columns, number * deep, deep, number > 0, products);
        if (number)
            join_products(products, sums + (number - 1) * LANES, sums_stride);
    }
    if ((count - 1) % 2)
        store_code_products(1, products);
    else
        store_code_products(0, products);
    join_products(products, sums + (count - 1) * LANES, sums_stride);
}

#else
INLINED void configure_code_tiles(void) {}
INLINED void release_tiles(void) {}

INLINED void
store_row_bytes(code_rows_t rows, int row, int64_t at, vec codes)
{
    (void)rows, (void)row, (void)at, (void)codes;
}

INLINED void
split_block(const code_block_t *block, int64_t width, code_bytes_t *bytes)
{
    (void)block, (void)width, (void)bytes;
}

INLINED void
multiply_code_tiles(const code_rows_t rows, const code_columns_t columns, int64_t deep, int64_t count, float *sums,
                    int64_t sums_stride)
{
    (void)rows, (void)columns, (void)deep, (void)count, (void)sums, (void)sums_stride;
}
#endif

#endif
