/* GEMMs of integers with AMX, for many rows: the bits of those in `integer.c`, since sums of integers are exact.
 *
 * A weight's elements as whole numbers of their unit, `(code - base) * step + offset`, have 16 bits. The lower bytes,
 * without a sign, and the upper ones, with one, are multiplied apart, and a span is summed up without leaving the tiles:
 * 256 times the sum of the upper products and that of the lower ones is the sum. Half of a panel is unpacked into the
 * cache, for as many spans as the L1 cache holds, and multiplied by many rows.
 */
#ifndef INTEGER_TILES_H
#define INTEGER_TILES_H

#include "amx.h"
#include "rounded_rows.h"

#ifdef CAN_HAVE_TILES

enum {
    PAIR_ROWS = 2 * TILE_ROWS,      /* of two tiles of rows, which are multiplied together */
    CHUNK_ROWS = 512,               /* that share a panel once it is unpacked */
    TILE_SIZE = TILE_ROWS * DEPTH,  /* bytes of a tile of columns: [16 words][16 columns] */
    PRODUCTS = TILE_ROWS * LANES,   /* of a tile */
    FEW_ROWS = 2 * PAIR_ROWS,
    STRETCH = 5,                    /* spans that are unpacked together, at most: 20 KiB of half a panel's columns */
    FETCHED = 16384,                /* bytes by which codes are fetched before they are read */
};

/* Half of a panel's columns in a span: [upper bytes, lower bytes][tiles of 64 elements]. */
typedef int8_t columns_t[2][SPAN / DEPTH][TILE_SIZE];

/* Four signed bytes of each of 16 columns times a step, plus an offset, both twice in a word: the upper bytes, as signed
 * ones, and the lower ones.
 */
INLINED void
store_elements(words_t bytes, __m512i step, __m512i offset, int8_t *upper, int8_t *lower)
{
    enum { FIRST_AND_MASK_OR_SECOND = 0xea };
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), odd = _mm512_srai_epi16(bytes, 8);
    const __m512i x = _mm512_add_epi16(_mm512_mullo_epi16(even, step), offset);
    const __m512i y = _mm512_add_epi16(_mm512_mullo_epi16(odd, step), offset);
    const __m512i low_bytes = _mm512_set1_epi16(0xff);
    _mm512_store_si512(lower, _mm512_ternarylogic_epi32(x, low_bytes, _mm512_slli_epi16(y, 8), FIRST_AND_MASK_OR_SECOND));
    _mm512_store_si512(upper, _mm512_or_si512(_mm512_srli_epi16(x, 8), _mm512_andnot_si512(low_bytes, y)));
}

/* Elements of a half of a panel's columns from `begin` on, before `end`, a span: upper bytes and lower ones. */
INLINED void
unpack_codes(int bits, int is_e2m1, const quantised_t *q, int64_t panel, int half, int64_t begin, int64_t end,
             columns_t columns)
{
    const int64_t per_word = 32 / bits, words = (q->inner + per_word - 1) / per_word, size = q->offsets ? 4 : 2;
    const char *codes = q->codes + ((panel * words + begin / per_word) * COLUMNS + half * LANES) * WORD_BYTES;
    const __m512i lowest = _mm512_set1_epi32(0xffff);
    int8_t *upper = columns[0][0], *lower = columns[1][0];
    for (int64_t from = begin, to; from < end; from = to) {
        const int64_t step = (panel * q->steps_of_row + from / q->step) * COLUMNS + half * LANES;
        to = smaller(from + q->step, end);
        fetch_to_l2(q->steps + step * size + FETCHED / 4);
        const ints both = load_steps(q, q->offsets != NULL, 1, step);
        const __m512i low = _mm512_and_si512(both, lowest), high = _mm512_andnot_si512(lowest, both);
        const __m512i steps = _mm512_or_si512(low, _mm512_slli_epi32(both, 16));
        const __m512i offsets = _mm512_or_si512(high, _mm512_srli_epi32(both, 16));
        for (int64_t at = from; at < to; at += per_word, codes += COLUMNS * WORD_BYTES) {
            const words_t w = load_words((const element *)codes);
            fetch_to_l2(codes + FETCHED);
            for (int part = 0; part < (bits == 4 ? 2 : 1); part++, upper += LANES * WORD_BYTES, lower += LANES * WORD_BYTES) {
                const words_t bytes = bits == 8 ? w
                                      : is_e2m1 ? split_e2m1(0, w, part)
                                                : _mm512_sub_epi8(split_nibbles(w, part), _mm512_set1_epi8(NIBBLES_BASE));
                store_elements(bytes, steps, offsets, upper, lower);
            }
        }
    }
}

static void
unpack_span(const quantised_t *q, int64_t panel, int half, int64_t span, columns_t columns)
{
    const int64_t begin = span * q->span, end = smaller(begin + q->span, q->inner);
    if (q->is_e2m1)
        unpack_codes(4, 1, q, panel, half, begin, end, columns);
    else if (q->bits == 4)
        unpack_codes(4, 0, q, panel, half, begin, end, columns);
    else
        unpack_codes(8, 0, q, panel, half, begin, end, columns);
}

/* A tile of rows times half of a panel, in a span. */
typedef struct {
    const int8_t *rows; /* the first ones; n rows lie below each other for each 64 elements */
    const columns_t *columns;
    const float *scales;
    float *sums;        /* [rows][32], of which half a row is */
    int64_t count;      /* rows, or 0 if there is no product */
    __mmask16 others;   /* 0 if no span was added to the sums before, which then have any values; else of all columns */
} product_t;

/* Stores sums of upper bytes and of lower ones: tiles 0 and 1, or 2 and 3. */
INLINED void
store_product(int is_odd, int32_t products[2][PRODUCTS])
{
    if (is_odd) {
        STORE_TILE(2, products[0], TILE_BYTES);
        STORE_TILE(3, products[1], TILE_BYTES);
    } else {
        STORE_TILE(0, products[0], TILE_BYTES);
        STORE_TILE(1, products[1], TILE_BYTES);
    }
}

/* Multiplies a span. Sums of upper bytes are in tile 0, those of lower ones in 1, or in 2 and 3 if it `is_odd`; meanwhile
 * the product before it, in the others, has become known, and is stored: to wait for a tile would take longer than to
 * multiply some.
 */
INLINED void
multiply_span(int is_odd, const product_t *p, int64_t n, int64_t tiles, int has_before, int32_t before[2][PRODUCTS])
{
    if (is_odd) {
        ZERO_TILE(2);
        ZERO_TILE(3);
    } else {
        ZERO_TILE(0);
        ZERO_TILE(1);
    }
#pragma GCC unroll 2
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int8_t *rows = p->rows + tile * n * DEPTH;
        LOAD_TILE(6, (*p->columns)[0][tile], TILE_BYTES);
        LOAD_TILE(7, (*p->columns)[1][tile], TILE_BYTES);
        if (is_odd) {
            LOAD_TILE(5, rows, DEPTH);
            ADD_SIGNED_BYTES(2, 5, 6);
            ADD_UNSIGNED_BYTES(3, 5, 7);
        } else {
            LOAD_TILE(4, rows, DEPTH);
            ADD_SIGNED_BYTES(0, 4, 6);
            ADD_UNSIGNED_BYTES(1, 4, 7);
        }
        if (tile == 0 && has_before)
            store_product(!is_odd, before);
    }
}

/* Adds products of `count` rows, which are stored, to their sums. */
INLINED void
add_products_to(const product_t *p, int64_t count, int32_t products[2][PRODUCTS])
{
    for (int64_t i = 0; i < count; i++) {
        const ints upper = load_ints(products[0] + i * LANES), lower = load_ints(products[1] + i * LANES);
        float *to = p->sums + i * COLUMNS;
        const vec before = _mm512_maskz_loadu_ps(p->others, to);
        vec_store(to, add_span(p->scales[i], ints_add(_mm512_slli_epi32(upper, 8), lower), before));
    }
}

/* Waits for the last product, if there is one, and adds it. */
static void
add_last(int is_odd, product_t *last, int32_t products[2][PRODUCTS])
{
    if (!last->count)
        return;
    store_product(is_odd, products);
    add_products_to(last, last->count, products);
    last->count = 0;
}

/* The tiles for up to 32 rows, from `row` on, times half of a panel in the spans from `first` on, before `stop`. A second
 * tile of rows is left in `last`, to be added while the next ones are multiplied.
 *
 * Behind 32 rows a tile has 16 even where fewer are left: to configure it anew takes longer than to multiply whatever lies
 * behind them, and nobody adds those products.
 */
INLINED void
multiply_spans(const quantised_t *q, const rounded_t *r, int64_t row, int64_t n, int64_t first, int64_t stop,
               const columns_t *columns, float *sums, product_t *last, int32_t products[2][PRODUCTS])
{
    for (int64_t span = first; span < stop; span++, columns++) {
        const int64_t begin = span * q->span, tiles = (smaller(q->span, q->inner - begin) + DEPTH - 1) / DEPTH;
        const int8_t *rows = r->codes + row * r->words * WORD_BYTES + begin * n;
        const float *scales = r->scales + row * r->spans + span * n;
        const __mmask16 others = span ? UINT16_MAX : 0;
        product_t top = {rows, columns, scales, sums, smaller(n, TILE_ROWS), others};
        const product_t bottom = {rows + TILE_ROWS * DEPTH, columns, scales + TILE_ROWS, sums + TILE_ROWS * COLUMNS,
                                  n - TILE_ROWS, others};
        if (n == PAIR_ROWS && tiles == SPAN / DEPTH && last->count == TILE_ROWS) { /* numbers that the compiler knows */
            multiply_span(0, &top, PAIR_ROWS, SPAN / DEPTH, 1, products);
            add_products_to(last, TILE_ROWS, products);
            multiply_span(1, &bottom, PAIR_ROWS, SPAN / DEPTH, 1, products);
            add_products_to(&top, TILE_ROWS, products);
            *last = bottom;
            continue;
        }
        multiply_span(0, &top, n, tiles, last->count > 0, products);
        add_products_to(last, last->count, products);
        last->count = 0;
        if (n <= TILE_ROWS) {
            add_last(0, &top, products);
            continue;
        }
        multiply_span(1, &bottom, n, tiles, 1, products);
        add_products_to(&top, top.count, products);
        *last = bottom;
    }
}

/* A panel times the rows from `first` on, before `stop`. */
static void
compute_panel_in_tiles(const quantised_t *q, const rounded_t *r, int64_t panel, int64_t first, int64_t stop)
{
    float sums[CHUNK_ROWS * COLUMNS] ALIGNED;
    columns_t columns[STRETCH] ALIGNED;
    int32_t products[2][PRODUCTS] ALIGNED;
    product_t last = {0};
    const int64_t most = stop - first > FEW_ROWS ? STRETCH : 1; /* few: their products overlap with unpacking */
    const int64_t stretches = (r->spans + most - 1) / most;
    for (int64_t stretch = 0; stretch < 2 * stretches; stretch++) {
        const int half = stretch % 2;
        const int64_t span = r->spans * (stretch / 2) / stretches, end = r->spans * (stretch / 2 + 1) / stretches;
        for (int64_t i = span; i < end; i++)
            unpack_span(q, panel, half, i, columns[i - span]);
        for (int64_t row = first; row < stop; row += PAIR_ROWS) {
            const int64_t n = smaller(PAIR_ROWS, q->rows - row);
            for (int64_t i = 0; stretch == 2 * stretches - 1 && i < n; i++)
                prefetch_row(q, row + i, panel * COLUMNS);
            multiply_spans(q, r, row, n, span, end, columns, sums + (row - first) * COLUMNS + half * LANES, &last, products);
        }
    }
    add_last(1, &last, products);
    finish_rounded_rows(q, r, first, stop - first, panel, sums);
}

/* All rows times the panels from `first` on, before `stop`. */
static void
compute_panels_in_tiles(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    configure_products(smaller(PAIR_ROWS, q->rows));
    for (int64_t row = 0; row < q->rows; row += CHUNK_ROWS)
        for (int64_t panel = first; panel < stop; panel++)
            compute_panel_in_tiles(q, r, panel, row, smaller(row + CHUNK_ROWS, q->rows));
    release_tiles();
}

#else
enum { PAIR_ROWS = 1 };
INLINED void
compute_panels_in_tiles(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    (void)q, (void)r, (void)first, (void)stop;
}
#endif
#endif
