/* GEMMs of integers of a panel and of a tile of rows, in registers: the micro-kernel of `integer.c`, which defines the result. */
#ifndef INTEGER_PANELS_H
#define INTEGER_PANELS_H

#include "rounded_rows.h"

enum {
    AHEAD = 32768,    /* bytes by which codes are fetched before they are read, at most */
    CACHED = 16384,   /* bytes of rows' codes that panels are multiplied by in turn: half of an L1 cache */
    MOST_TILES = 16,  /* of rows, that are multiplied by a panel in turn */
    SHARED = 262144,  /* bytes of panels that all rows meet before the next ones: a quarter of an L2 cache */
    EVEN_ROWS = 48,   /* up to which codes of 8 bits are multiplied at an even pace */
    EVEN_SPANS = 2,   /* of a panel, that tiles are then multiplied by in turn */
};

/* A specialization of the micro-kernel: numbers that the compiler knows. */
typedef struct {
    int rows, halves, bits, is_e2m1, has_dot;
} kind_t;

/* Elements of a row, whole spans of it. */
typedef struct {
    int64_t begin, end;
} part_t;

/* `count` elements of a panel's columns times those of some rows: products are added to `part`. */
INLINED void
add_block(kind_t k, const char *codes, int64_t ahead, const int8_t *x, int64_t count, ints part[][2])
{
#pragma GCC unroll 1 /* unrolled, its speed depends on where the code lies */
    for (int64_t at = 0; at < count; at += 32 / k.bits, codes += COLUMNS * WORD_BYTES, x += 32 / k.bits * k.rows) {
        const int parts = k.bits == 4 ? 2 : 1;
        words_t columns[2][2];
#pragma GCC unroll 2
        for (int half = 0; half < k.halves; half++) {
            fetch_to_l2(codes + half * LANES * WORD_BYTES + ahead);
            const words_t w = load_words((const element *)(codes + half * LANES * WORD_BYTES));
#pragma GCC unroll 2
            for (int p = 0; p < parts; p++)
                columns[half][p] = k.is_e2m1     ? split_e2m1(k.has_dot, w, p)
                                   : k.bits == 4 ? split_nibbles(w, p)
                                                 : split_bytes(k.has_dot, w);
        }
#pragma GCC unroll 6
        for (int i = 0; i < k.rows; i++)
#pragma GCC unroll 2
            for (int p = 0; p < parts; p++)
#pragma GCC unroll 2
                for (int half = 0; half < k.halves; half++) { /* innermost: both read the same codes of the row */
                    const int8_t *of_row = x + (p * k.rows + i) * WORD_BYTES;
                    ints *to = &part[i][half];
                    *to = k.bits == 4 && !k.is_e2m1 ? add_nibbles(k.has_dot, *to, columns[half][p], of_row)
                                                    : add_bytes(k.has_dot, *to, columns[half][p], of_row);
                }
    }
}

/* Adds to `sum` the sum of a block's products times its step, and the sum of its rows' codes times its offset. Sums of
 * codes of 4 bits are within 16 bits.
 */
INLINED ints
add_scaled(kind_t k, int has_offsets, ints sum, ints part, const int32_t *total, ints steps)
{
    if (k.bits == 4 && !k.is_e2m1)
        return add_pairs(k.has_dot, sum, has_offsets ? join_halves(part, total) : part, steps);
    if (!has_offsets)
        return ints_add(sum, ints_mul(part, steps));
    return ints_add(ints_add(sum, ints_mul(part, low_halves(steps))), ints_mul(high_halves(ints_all(*total)), high_halves(steps)));
}

/* A part of a tile of rows, of which `row` is the first, times one or both halves of a panel's columns, from `first` on: is
 * added to the sums [rows, 32] of the parts before it.
 */
INLINED void
multiply_codes(kind_t k, int has_offsets, const quantised_t *q, const rounded_t *r, int64_t panel, int first, part_t part,
               int64_t row, float *sums)
{
    const int is_nibbles = k.bits == 4 && !k.is_e2m1, is_short = is_nibbles && !k.has_dot; /* products are added in 16 bits */
    const int64_t words = (q->inner * k.bits + 31) / 32, ahead = smaller(words * COLUMNS * WORD_BYTES, AHEAD);
    const int64_t ahead_steps = ahead * 8 / k.bits / q->step; /* those of the weights that are fetched, of all columns */
    const char *codes = q->codes + ((panel * words + part.begin * k.bits / 32) * COLUMNS + first * LANES) * WORD_BYTES;
    const int8_t *x = r->codes + row * r->words * WORD_BYTES + part.begin * k.rows;
    const float *scales = r->scales + row * r->spans + part.begin / q->span * k.rows;
    const int64_t blocks = row * r->blocks + part.begin / r->size * k.rows;
    const int32_t *starts = r->starts + blocks, *totals = r->totals + blocks;
    int64_t step = (panel * q->steps_of_row + part.begin / q->step) * COLUMNS + first * LANES;
    int64_t left = q->step - part.begin % q->step; /* elements of the step */
#pragma GCC unroll 6
    for (int i = 0; i < k.rows; i++)
        for (int half = 0; !part.begin && half < k.halves; half++)
            vec_store(sums + i * COLUMNS + (first + half) * LANES, vec_zero());
    for (int64_t begin = part.begin; begin < part.end; begin += q->span, scales += k.rows) {
        const int64_t end = smaller(begin + q->span, q->inner);
        ints sum[INT_ROWS][2];
        __asm__("" ::: "memory"); /* sums of float32 stay there, and leave the registers to those of integers */
#pragma GCC unroll 6
        for (int i = 0; i < k.rows; i++)
            for (int half = 0; half < k.halves; half++)
                sum[i][half] = ints_all(0);
        for (int64_t at = begin; at < end; at += r->size, totals += k.rows, starts += k.rows) {
            const int64_t count = smaller(r->size, end - at);
            ints products[INT_ROWS][2];
#pragma GCC unroll 6
            for (int i = 0; i < k.rows; i++)
                for (int half = 0; half < k.halves; half++)
                    products[i][half] = ints_all(is_short ? 0 : starts[i]);
            add_block(k, codes, ahead, x, count, products);
            codes += (count * k.bits + 31) / 32 * COLUMNS * WORD_BYTES;
            x += (count + 3) / WORD_BYTES * k.rows * WORD_BYTES;
#pragma GCC unroll 2
            for (int half = 0; half < k.halves; half++) {
                fetch_to_l2(q->steps + (step + ahead_steps + half * LANES) * (has_offsets ? 4 : 2));
                const ints step_of = load_steps(q, has_offsets, is_nibbles, step + half * LANES);
#pragma GCC unroll 6
                for (int i = 0; i < k.rows; i++) {
                    ints all = products[i][half];
                    if (is_short)
                        all = ints_add(nibble_sums(k.has_dot, all), ints_all(starts[i]));
                    sum[i][half] = add_scaled(k, has_offsets, sum[i][half], all, totals + i, step_of);
                }
            }
            left -= count;
            if (left <= 0) {
                left = q->step;
                step += COLUMNS;
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < k.rows; i++)
            for (int half = 0; half < k.halves; half++) {
                float *to = sums + i * COLUMNS + (first + half) * LANES;
                vec_store(to, add_span(scales[i], sum[i][half], vec_load(to)));
            }
    }
}

/* `multiply_codes` of both halves of a panel. */
INLINED void
multiply_panel(kind_t k, const quantised_t *q, const rounded_t *r, int64_t panel, part_t part, int64_t row, float *sums)
{
    k.halves = k.rows <= INT_WIDE_ROWS ? 2 : 1;
    if (k.bits == 4)
        part = (part_t){0, q->inner}; /* which it is, and the compiler does not know */
    for (int half = 0; half < 2; half += k.halves)
        if (k.is_e2m1)
            multiply_codes(k, 0, q, r, panel, half, part, row, sums);
        else if (k.bits == 8) /* few have offsets */
            multiply_codes(k, q->offsets != NULL, q, r, panel, half, part, row, sums);
        else if (q->offsets)
            multiply_codes(k, 1, q, r, panel, half, part, row, sums);
        else
            multiply_codes(k, 0, q, r, panel, half, part, row, sums);
}

#define EACH_NUMBER(name, ...)                                                                                         \
    static void name(int rows, const quantised_t *q, const rounded_t *r, int64_t panel, part_t part, int64_t row,      \
                     float *sums)                                                                                      \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
            NUMBER(1, __VA_ARGS__) NUMBER(2, __VA_ARGS__) NUMBER(3, __VA_ARGS__) NUMBER(4, __VA_ARGS__)                \
            NUMBER(5, __VA_ARGS__) NUMBER(6, __VA_ARGS__)                                                              \
        }                                                                                                              \
    }
#define NUMBER(n, ...)                                                                                                 \
    case n:                                                                                                            \
        if (n <= INT_ROWS)                                                                                             \
            multiply_panel((kind_t){n <= INT_ROWS ? n : 1, 0, __VA_ARGS__}, q, r, panel, part, row, sums);             \
        break;
EACH_NUMBER(multiply_nibbles, 4, 0, 0)
EACH_NUMBER(multiply_e2m1, 4, 1, 0)
EACH_NUMBER(multiply_bytes, 8, 0, 0)
#ifdef CAN_HAVE_DOT
EACH_NUMBER(multiply_nibbles_dot, 4, 0, 1)
EACH_NUMBER(multiply_e2m1_dot, 4, 1, 1)
EACH_NUMBER(multiply_bytes_dot, 8, 0, 1)
#endif
_Static_assert(INT_ROWS <= 6, "a number of rows is missing");
#undef NUMBER
#undef EACH_NUMBER

typedef void multiply_t(int, const quantised_t *, const rounded_t *, int64_t, part_t, int64_t, float *);

static multiply_t *
multiply_of(const quantised_t *q)
{
    enum { NIBBLES, E2M1, BYTES };
    const int codes = q->is_e2m1 ? E2M1 : q->bits == 4 ? NIBBLES : BYTES;
#ifdef CAN_HAVE_DOT
    static multiply_t *const dot[3] = {multiply_nibbles_dot, multiply_e2m1_dot, multiply_bytes_dot};
    if (processor_has_dot())
        return dot[codes];
#endif
    static multiply_t *const plain[3] = {multiply_nibbles, multiply_e2m1, multiply_bytes};
    return plain[codes];
}

/* Panels from `first` on, before `stop`, times as many tiles of rows at a time as the L1 cache holds.
 *
 * Few rows wait for memory as long as they compute, if codes have 8 bits. Then part after part of a panel is multiplied by all
 * tiles: the next panel, which is fetched meanwhile, comes at an even pace, and not beside the first tile alone.
 */
static void
compute_shared_panels(const quantised_t *q, const rounded_t *r, int64_t cached_tiles, int64_t first, int64_t stop)
{
    multiply_t *multiply = multiply_of(q);
    float sums[MOST_TILES * INT_ROWS * COLUMNS] ALIGNED;
    const int64_t tiles = tiles_of(r, q->rows);
    const int64_t length = q->bits == 8 && q->rows <= EVEN_ROWS ? EVEN_SPANS * q->span : q->inner;
    for (int64_t begin = 0, end; begin < tiles; begin = end) {
        end = smaller(begin + cached_tiles, tiles);
        const int64_t top = first_row(r, q->rows, begin), bottom = first_row(r, q->rows, end);
        for (int64_t panel = first; panel < stop; panel++) {
            for (int64_t row = top; row < bottom; row++)
                prefetch_row(q, row, panel * COLUMNS);
            for (int64_t at = 0; at < q->inner; at += length)
                for (int64_t tile = begin; tile < end; tile++) {
                    const int64_t from = first_row(r, q->rows, tile), to = first_row(r, q->rows, tile + 1);
                    const part_t part = {at, smaller(at + length, q->inner)};
                    multiply((int)(to - from), q, r, panel, part, from, sums + (from - top) * COLUMNS);
                }
            finish_rounded_rows(q, r, top, bottom - top, panel, sums);
        }
    }
}

/* Panels from `first` on, before `stop`; where tiles of rows come in turn, as many at a time as the L2 cache keeps. */
static void
compute_panels(const quantised_t *q, const rounded_t *r, int64_t first, int64_t stop)
{
    const int64_t cached_tiles = smaller(CACHED / (INT_ROWS * r->words * WORD_BYTES) + 1, MOST_TILES);
    const int64_t panel_bytes = (q->inner * q->bits + 7) / 8 * COLUMNS;
    const int64_t panels = tiles_of(r, q->rows) > cached_tiles ? SHARED / panel_bytes + 1 : stop - first;
    for (int64_t panel = first; panel < stop; panel += panels)
        compute_shared_panels(q, r, cached_tiles, panel, smaller(panel + panels, stop));
}

#endif
