/* GEMMs of integers with AMX, for many rows: the bits of those in `integer.c`, since sums of integers are exact.
 *
 * One product of tiles has the sums of a block, of 16 rows and 16 columns. They are stored, and turned into
 * float32 while the next blocks are multiplied.
 */
#ifndef INTEGER_TILES_H
#define INTEGER_TILES_H

#include "amx.h"
#include "rounded_rows.h"

#ifdef CAN_HAVE_TILES

enum {
    AT_ONCE = 4,                   /* blocks whose products are computed before the first one is read */
    PART = 32,                     /* blocks of a panel, 32 KiB once they are unpacked */
    ROW_TILES = 8,                 /* tiles of rows that share them */
    PANEL_BYTES = BLOCK * COLUMNS, /* of a block of a panel, unpacked */
    PRODUCTS = TILE_ROWS * LANES,  /* of a tile */
};

/* Tiles 0 to 3 are products, 4 and 5 rows, 6 and 7 columns. */
static void
configure_integer_tiles(void)
{
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile < 6 ? TILE_ROWS : BLOCK / WORD_BYTES;
        config.row_bytes[tile] = tile == 4 || tile == 5 ? BLOCK : TILE_BYTES;
    }
    configure_tiles(&config);
}

/* Whether a weight's codes are signed bytes without a `zero`, or become so by `unpack`, in whole blocks. */
static int
fits_tiles(const quantised_t *q)
{
    const int has_zero = !q->offsets && q->zero != 0.0f;
    return q->inner % BLOCK == 0 && q->group % BLOCK == 0 &&
           (!has_zero || (q->bits == 4 && q->zero >= -128.0f && q->zero <= 112.0f));
}

/* Codes of 4 bits of `words` words of a panel as signed bytes, [words][32 columns], in the order of rounded rows. */
static void
unpack_codes(const quantised_t *q, const char *codes, int64_t words, int8_t *to)
{
    const __m512i zero = _mm512_set1_epi8(q->offsets ? 0 : (char)q->zero);
    for (int64_t word = 0; word < words; word += 2, codes += COLUMNS * WORD_BYTES)
        for (int part = 0; part < 2; part++)
            for (int half = 0; half < 2; half++, to += LANES * WORD_BYTES) {
                const words_t w = load_words((const element *)(codes + half * LANES * WORD_BYTES));
                const words_t bytes = q->is_e2m1 ? split_e2m1(0, w, part) : split_nibbles(w, part);
                _mm512_store_si512(to, _mm512_add_epi8(bytes, zero));
            }
}

/* The products of up to AT_ONCE blocks. */
INLINED void
multiply_blocks(const int8_t *rows, const int8_t *codes, int64_t count, int32_t products[AT_ONCE][PRODUCTS])
{
#define MULTIPLY_BLOCK(number, a, b)                                                                                   \
    if (number < count) {                                                                                              \
        ZERO_TILE(number);                                                                                             \
        LOAD_TILE(a, rows + number * TILE_ROWS * BLOCK, BLOCK);                                                        \
        LOAD_TILE(b, codes + number * PANEL_BYTES, COLUMNS * WORD_BYTES);                                              \
        ADD_SIGNED_BYTES(number, a, b);                                                                                \
        STORE_TILE(number, products[number], TILE_BYTES);                                                              \
    }
    MULTIPLY_BLOCK(0, 4, 6)
    MULTIPLY_BLOCK(1, 5, 7)
    MULTIPLY_BLOCK(2, 4, 6)
    MULTIPLY_BLOCK(3, 5, 7)
#undef MULTIPLY_BLOCK
}

/* A part of a GEMM: a tile of rows times blocks of one half of a panel's columns. */
typedef struct {
    const int8_t *rows;           /* codes: [blocks][16][32] */
    const float *scales, *totals; /* [blocks][16] */
    const int8_t *codes;          /* of the panel: [blocks][8 words][32 columns] */
    int64_t column;               /* among all scales of the weight: that of the first group */
    int64_t first, count;         /* blocks */
} part_t;

/* Adds to sums [16, 32], of which half a row is. */
INLINED void
add_part(int has_offsets, const quantised_t *q, const part_t *p, float *sums)
{
    int32_t products[2][AT_ONCE][PRODUCTS] ALIGNED;
    vec sum[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++)
        sum[i] = vec_load(sums + i * COLUMNS);
    multiply_blocks(p->rows, p->codes, p->count, products[0]);
    for (int64_t begin = 0; begin < p->count; begin += AT_ONCE) {
        const int64_t next = begin + AT_ONCE;
        multiply_blocks(p->rows + next * TILE_ROWS * BLOCK, p->codes + next * PANEL_BYTES, p->count - next,
                        products[next / AT_ONCE % 2]);
        for (int64_t block = begin; block < smaller(next, p->count); block++) {
            const int32_t *found = products[begin / AT_ONCE % 2][block - begin];
            const float *scales = p->scales + block * TILE_ROWS, *totals = p->totals + block * TILE_ROWS;
            const int64_t at = p->column + (p->first + block) * BLOCK / q->group * COLUMNS;
            const vec scale = load_scales(q->scales, at, q->is_half);
            const vec offset = has_offsets ? load_scales(q->offsets, at, q->is_half) : scale;
#pragma GCC unroll 16
            for (int i = 0; i < TILE_ROWS; i++) {
                vec term = vec_mul(scale, vec_of_ints(_mm512_load_si512(found + i * LANES)));
                if (has_offsets)
                    term = vec_fmadd(offset, vec_all(totals[i]), term);
                sum[i] = vec_fmadd(vec_all(scales[i]), term, sum[i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++)
        vec_store(sums + i * COLUMNS, sum[i]);
}

/* All rows times the panels from `first` on, before `stop`. */
static void
compute_panels_in_tiles(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    float sums[ROW_TILES][TILE_ROWS * COLUMNS] ALIGNED;
    int8_t unpacked[PART * PANEL_BYTES] ALIGNED;
    const int64_t tiles = tiles_of(r, q->rows), groups = q->inner / q->group;
    configure_integer_tiles();
    for (int64_t begin = 0; begin < tiles; begin += ROW_TILES)
        for (int64_t panel = first; panel < stop; panel++) {
            const int64_t end = smaller(begin + ROW_TILES, tiles);
            memset(sums, 0, sizeof sums);
            for (int64_t block = 0; block < r->blocks; block += PART) {
                part_t p = {.first = block, .count = smaller(PART, r->blocks - block)};
                const char *codes = q->codes + (panel * r->blocks + block) * PANEL_BYTES * q->bits / 8;
                p.codes = (const int8_t *)codes;
                if (q->bits == 4) {
                    unpack_codes(q, codes, p.count * BLOCK / WORD_BYTES, unpacked);
                    p.codes = unpacked;
                }
                for (int half = 0; half < 2; half++, p.codes += LANES * WORD_BYTES) {
                    p.column = panel * groups * COLUMNS + half * LANES;
                    for (int64_t tile = begin; tile < end; tile++) {
                        const int64_t place = (tile * r->blocks + block) * TILE_ROWS;
                        p.rows = r->codes + place * BLOCK;
                        p.scales = r->scales + place;
                        p.totals = r->totals + place;
                        if (q->offsets)
                            add_part(1, q, &p, sums[tile - begin] + half * LANES);
                        else
                            add_part(0, q, &p, sums[tile - begin] + half * LANES);
                    }
                }
            }
            for (int64_t row = begin * TILE_ROWS; row < smaller(end * TILE_ROWS, q->rows); row++) {
                float *found = sums[0] + (row - begin * TILE_ROWS) * COLUMNS;
                add_outliers(q, r, row, panel, found);
                finish(q, row, panel * COLUMNS, found);
            }
        }
    release_tiles();
}

#else
INLINED int fits_tiles(const quantised_t *q) { (void)q; return 0; }
INLINED void
compute_panels_in_tiles(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    (void)q, (void)r, (void)first, (void)stop;
}
#endif
#endif
