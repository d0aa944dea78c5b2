/* GEMMs of integers with AMX, for many rows: the bits of those in `integer.c`, since sums of integers are exact.
 *
 * A weight's elements as whole numbers of their unit, `(code - base) * step + offset`, have 16 bits. The lower bytes,
 * without a sign, and the upper ones, with one, are multiplied apart, and a span is summed up without leaving the tiles:
 * 256 times the sum of the upper products and that of the lower ones is the sum. A span of a panel is unpacked into the
 * cache and multiplied by many rows.
 */
#ifndef INTEGER_TILES_H
#define INTEGER_TILES_H

#include "amx.h"
#include "rounded_rows.h"

#ifdef CAN_HAVE_TILES

enum {
    PAIR_ROWS = 2 * TILE_ROWS,      /* of two tiles of rows, which are multiplied together */
    CHUNK_ROWS = 256,               /* that share a panel once it is unpacked */
    TILE_SIZE = TILE_ROWS * DEPTH,  /* bytes of a tile of columns: [16 words][16 columns] */
    PRODUCTS = TILE_ROWS * LANES,   /* of a tile */
    FETCHED = 16384,                /* bytes by which codes are fetched before they are read */
};

/* Columns of a span: [halves][upper bytes, lower bytes][tiles of 64 elements]. */
typedef int8_t columns_t[2][2][SPAN / DEPTH][TILE_SIZE];

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
unpack_half(int bits, int is_e2m1, const quantised_t *q, int64_t panel, int half, int64_t begin, int64_t end,
            int8_t (*columns)[SPAN / DEPTH][TILE_SIZE])
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
unpack_span(const quantised_t *q, int64_t panel, int64_t begin, int64_t end, columns_t columns)
{
    for (int half = 0; half < 2; half++)
        if (q->is_e2m1)
            unpack_half(4, 1, q, panel, half, begin, end, columns[half]);
        else if (q->bits == 4)
            unpack_half(4, 0, q, panel, half, begin, end, columns[half]);
        else
            unpack_half(8, 0, q, panel, half, begin, end, columns[half]);
}

/* Sums of the upper bytes are in tiles 0 and 2, those of the lower ones in 1 and 3. Up to 16 rows are both tiles of rows, and
 * meet a half of the columns in each.
 */
static void
configure_integer_tiles(int64_t rows)
{
    configure_pair(smaller(rows, TILE_ROWS), rows > TILE_ROWS ? rows - TILE_ROWS : rows);
}

/* A tile of rows times half of a panel's columns, in a span. */
typedef struct {
    const int8_t *rows; /* the first ones; n rows lie below each other for each 64 elements */
    int8_t (*columns)[SPAN / DEPTH][TILE_SIZE]; /* upper bytes, lower bytes */
    const float *scales;
    float *sums;        /* [rows][32], of which half a row is */
    int64_t count;      /* rows */
} product_t;

/* Multiplies a span, and stores the products before it, which have become known meanwhile: to wait for a tile would
 * take longer than to multiply some.
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
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int8_t *rows = p->rows + tile * n * DEPTH;
        LOAD_TILE(6, p->columns[0][tile], TILE_BYTES);
        LOAD_TILE(7, p->columns[1][tile], TILE_BYTES);
        if (is_odd) {
            LOAD_TILE(5, rows, DEPTH);
            ADD_SIGNED_BYTES(2, 5, 6);
            ADD_UNSIGNED_BYTES(3, 5, 7);
        } else {
            LOAD_TILE(4, rows, DEPTH);
            ADD_SIGNED_BYTES(0, 4, 6);
            ADD_UNSIGNED_BYTES(1, 4, 7);
        }
        if (tile == (tiles - 1) / 2 && has_before) {
            if (is_odd) {
                STORE_TILE(0, before[0], TILE_BYTES);
                STORE_TILE(1, before[1], TILE_BYTES);
            } else {
                STORE_TILE(2, before[0], TILE_BYTES);
                STORE_TILE(3, before[1], TILE_BYTES);
            }
        }
    }
}

/* Adds products that are stored to their sums. */
INLINED void
add_products_to(const product_t *p, int32_t products[2][PRODUCTS])
{
    for (int64_t i = 0; i < p->count; i++) {
        const ints upper = load_ints(products[0] + i * LANES), lower = load_ints(products[1] + i * LANES);
        float *to = p->sums + i * COLUMNS;
        vec_store(to, add_span(p->scales[i], ints_add(_mm512_slli_epi32(upper, 8), lower), vec_load(to)));
    }
}

/* Stores the last products, and adds them. */
INLINED void
add_last(const product_t *p, int32_t products[2][PRODUCTS])
{
    STORE_TILE(2, products[0], TILE_BYTES);
    STORE_TILE(3, products[1], TILE_BYTES);
    add_products_to(p, products);
}

/* A panel times the rows from `first` on, before `stop`, up to 32 of them together, whose tiles of rows and halves of the
 * columns take turns. In the last span rows are finished, while the results of the next ones are fetched.
 */
static void
compute_panel_in_tiles(const quantised_t *q, const rounded_t *r, int64_t panel, int64_t first, int64_t stop,
                       int64_t *configured)
{
    float sums[CHUNK_ROWS * COLUMNS] ALIGNED;
    columns_t columns ALIGNED;
    int32_t products[2][PRODUCTS] ALIGNED;
    memset(sums, 0, (stop - first) * COLUMNS * sizeof *sums);
    for (int64_t span = 0; span < r->spans; span++) {
        const int is_last = span + 1 == r->spans;
        const int64_t begin = span * q->span, end = smaller(begin + q->span, q->inner);
        const int64_t tiles = (end - begin + DEPTH - 1) / DEPTH;
        unpack_span(q, panel, begin, end, columns);
        product_t before = {0};
        for (int64_t row = first; row < stop; row += PAIR_ROWS) {
            const int64_t n = smaller(PAIR_ROWS, q->rows - row), tiles_of_rows = n > TILE_ROWS ? 2 : 1;
            const int8_t *codes = r->codes + row * r->words * WORD_BYTES + begin * n;
            const float *scales = r->scales + row * r->spans + span * n;
            float *of_row = sums + (row - first) * COLUMNS;
            if (*configured != n) {
                if (before.count)
                    add_last(&before, products);
                before.count = 0;
                configure_integer_tiles(*configured = n);
            }
            for (int64_t i = 0; is_last && i < n; i++)
                prefetch_row(q, row + i, panel * COLUMNS);
            for (int64_t number = 0; number < 2 * tiles_of_rows; number++) {
                const int64_t half = number / tiles_of_rows, at = number % tiles_of_rows * TILE_ROWS;
                const product_t p = {codes + at * DEPTH, columns[half], scales + at, of_row + at * COLUMNS + half * LANES,
                                     smaller(n - at, TILE_ROWS)};
                if (number % 2)
                    multiply_span(1, &p, n, tiles, 1, products);
                else
                    multiply_span(0, &p, n, tiles, before.count > 0, products);
                add_products_to(&before, products);
                before = p;
            }
            if (!is_last && row + PAIR_ROWS < stop)
                continue;
            add_last(&before, products);
            before.count = 0;
            for (int64_t i = 0; is_last && i < n; i++)
                finish_row(q, r, row + i, panel, of_row + i * COLUMNS);
        }
    }
}

/* All rows times the panels from `first` on, before `stop`. */
static void
compute_panels_in_tiles(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    int64_t configured = 0;
    for (int64_t row = 0; row < q->rows; row += CHUNK_ROWS)
        for (int64_t panel = first; panel < stop; panel++)
            compute_panel_in_tiles(q, r, panel, row, smaller(row + CHUNK_ROWS, q->rows), &configured);
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
