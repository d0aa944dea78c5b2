/* Linear layers on quantised weights and on rows that are rounded to 8 bits: GEMMs of integers.
 *
 * A row is rounded in blocks of 32 elements, or of a weight's group if that has fewer: each element becomes code * scale,
 * see `rounding.h`. Products of codes are added as integers, which is exact. A block then adds, in float32,
 *
 *     row's scale * (weight's scale * sum of code * row's code + weight's offset * sum of row's codes)
 *
 * with one rounding for the first product and one for each multiplication and addition after it, block after block from the first
 * one on. Where a weight has no offset, its codes count from `zero`, a whole number. So a result has the same bits
 * whatever number of rows is computed together, and on all paths.
 *
 * Codes of the weights lie in panels of 32 columns, [panels][words][32 columns]: words of eight codes of 4 bits, the
 * first one lowest, or of four signed bytes. Scales and offsets are [panels][groups][32 columns]. They belong to the kernels in
 * float32; rows and results may be bfloat16 too.
 */
#ifdef FLOAT32
#include <stdlib.h>

#include "integer_tiles.h"
#include "rounded_rows.h"

enum {
    MANY = 256,     /* blocks from which threads share in rounding them */
    CACHED = 16384, /* bytes of rows' codes that panels are multiplied by in turn: half of an L1 cache */
};

/* `count` elements of a panel's columns times those of `rows` rows: products are added to `part`. */
INLINED void
add_block(int rows, int halves, int bits, int has_dot, const char *codes, const int8_t *x, int64_t count, ints part[][2])
{
#pragma GCC unroll 2
    for (int64_t at = 0; at < count; at += 32 / bits, codes += COLUMNS * WORD_BYTES, x += 32 / bits * rows)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            const words_t w = load_words((const element *)(codes + half * LANES * WORD_BYTES));
            const words_t left = bits == 4 ? split_nibbles(w, 0) : split_bytes(has_dot, w);
            const words_t right = bits == 4 ? split_nibbles(w, 1) : left;
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                ints *to = &part[i][half];
                if (bits == 4) {
                    *to = add_nibbles(has_dot, *to, left, x + i * WORD_BYTES);
                    *to = add_nibbles(has_dot, *to, right, x + (rows + i) * WORD_BYTES);
                } else
                    *to = add_bytes(has_dot, *to, left, x + i * WORD_BYTES);
            }
        }
}

/* A tile of `rows` rows, of which `row` is the first, times one or both halves of a panel's columns, from `first` on: sums
 * [rows, 32].
 */
INLINED void
multiply_codes(int rows, int halves, int bits, int has_dot, const quantised_t *q, const rounded_t *r, int64_t panel,
               int first, int64_t row, float *sums)
{
    const int is_short = bits == 4 && !has_dot; /* the sums of products, which have 16 bits */
    const int64_t words = (q->inner * bits + 31) / 32, groups = q->inner / q->group;
    const char *codes = q->codes + (panel * words * COLUMNS + first * LANES) * WORD_BYTES;
    const int8_t *x = r->codes + row * r->words * WORD_BYTES;
    const float *scales = r->scales + row * r->blocks, *totals = r->totals + row * r->blocks;
    const int32_t *starts = r->starts + row * r->blocks;
    vec sum[INT_ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < halves; half++)
            sum[i][half] = vec_zero();
    for (int64_t block = 0; block < r->blocks; block++, scales += rows, totals += rows, starts += rows) {
        const int64_t start = block * r->size, count = smaller(r->size, q->inner - start);
        ints part[INT_ROWS][2];
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < halves; half++)
                part[i][half] = ints_all(is_short ? 0 : starts[i]);
        if (count == BLOCK) /* a number that the compiler knows */
            add_block(rows, halves, bits, has_dot, codes, x, BLOCK, part);
        else
            add_block(rows, halves, bits, has_dot, codes, x, count, part);
        codes += (count * bits + 31) / 32 * COLUMNS * WORD_BYTES;
        x += (count + 3) / WORD_BYTES * rows * WORD_BYTES;
        const int64_t group = (panel * groups + start / q->group) * COLUMNS + first * LANES;
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            const vec scale = load_scales(q->scales, group + half * LANES, q->is_half);
            const vec offset = q->offsets ? load_scales(q->offsets, group + half * LANES, q->is_half) : scale;
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                ints all = part[i][half];
                if (is_short)
                    all = ints_add(nibble_sums(has_dot, all), ints_all(starts[i]));
                vec term = vec_mul(scale, vec_of_ints(all));
                if (q->offsets)
                    term = vec_fmadd(offset, vec_all(totals[i]), term);
                sum[i][half] = vec_fmadd(vec_all(scales[i]), term, sum[i][half]);
            }
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            vec_store(sums + i * COLUMNS + (first + half) * LANES, sum[i][half]);
}

/* `multiply_codes` of a whole panel. */
INLINED void
multiply_panel(int rows, int bits, int has_dot, const quantised_t *q, const rounded_t *r, int64_t panel, int64_t row,
               float *sums)
{
    if (rows <= INT_WIDE_ROWS) {
        multiply_codes(rows, 2, bits, has_dot, q, r, panel, 0, row, sums);
        return;
    }
    for (int half = 0; half < 2; half++)
        multiply_codes(rows, 1, bits, has_dot, q, r, panel, half, row, sums);
}

#define EACH_NUMBER(name, bits, has_dot)                                                                               \
    static void name(int rows, const quantised_t *q, const rounded_t *r, int64_t panel, int64_t row, float *sums)      \
    {                                                                                                                  \
        switch (rows) {                                                                                                \
            NUMBER(1, bits, has_dot) NUMBER(2, bits, has_dot) NUMBER(3, bits, has_dot)                                 \
            NUMBER(4, bits, has_dot) NUMBER(5, bits, has_dot) NUMBER(6, bits, has_dot)                                 \
            NUMBER(7, bits, has_dot) NUMBER(8, bits, has_dot) NUMBER(9, bits, has_dot)                                 \
            NUMBER(10, bits, has_dot) NUMBER(11, bits, has_dot) NUMBER(12, bits, has_dot)                              \
        }                                                                                                              \
    }
#define NUMBER(n, bits, has_dot)                                                                                       \
    case n:                                                                                                            \
        if (n <= INT_ROWS)                                                                                             \
            multiply_panel(n <= INT_ROWS ? n : 1, bits, has_dot, q, r, panel, row, sums);                              \
        break;
EACH_NUMBER(multiply_nibbles, 4, 0)
EACH_NUMBER(multiply_bytes, 8, 0)
#ifdef CAN_HAVE_DOT
EACH_NUMBER(multiply_nibbles_dot, 4, 1)
EACH_NUMBER(multiply_bytes_dot, 8, 1)
#endif
#undef NUMBER
#undef EACH_NUMBER

typedef void multiply_t(int, const quantised_t *, const rounded_t *, int64_t, int64_t, float *);

static multiply_t *
multiply_of(int32_t bits)
{
#ifdef CAN_HAVE_DOT
    if (processor_has_dot())
        return bits == 4 ? multiply_nibbles_dot : multiply_bytes_dot;
#endif
    return bits == 4 ? multiply_nibbles : multiply_bytes;
}

/* Panels from `first` on, before `stop`, times as many tiles of rows at a time as the L1 cache holds. */
static void
compute_panels(const quantised_t *q, const rounded_t *r, multiply_t *multiply, int64_t first, int64_t stop)
{
    float sums[INT_ROWS * COLUMNS] ALIGNED;
    const int64_t tiles = tiles_of(r, q->rows), together = CACHED / (INT_ROWS * r->words * WORD_BYTES) + 1;
    for (int64_t begin = 0; begin < tiles; begin += together)
        for (int64_t panel = first; panel < stop; panel++)
            for (int64_t tile = begin; tile < smaller(begin + together, tiles); tile++) {
                const int64_t from = first_row(r, q->rows, tile), to = first_row(r, q->rows, tile + 1);
                for (int64_t row = from; row < to; row++)
                    prefetch_row(q, row, panel * COLUMNS);
                multiply((int)(to - from), q, r, panel, from, sums);
                for (int64_t row = from; row < to; row++)
                    finish(q, row, panel * COLUMNS, sums + (row - from) * COLUMNS);
            }
}

/* A group has a multiple of 8 elements that 32 is a multiple of, or a multiple of 32, or is a whole row; a row is a
 * multiple of 8 elements if codes have 4 bits. Returns 0, or -1 if there is no memory for the rounded rows.
 */
static int32_t
compute(const quantised_t *q, int has_tiles, int32_t threads)
{
    const int is_for_amx = has_tiles && q->rows > INT_ROWS && fits_tiles(q); /* few rows do not fill tiles */
    const int64_t most = is_for_amx ? TILE_ROWS : INT_ROWS, space = is_for_amx ? (q->rows + most - 1) / most * most : q->rows;
    const int64_t size = q->group < BLOCK && q->group < q->inner ? q->group : BLOCK;
    const int64_t blocks = (q->inner + size - 1) / size, words = (q->inner + WORD_BYTES - 1) / WORD_BYTES;
    const int64_t row_bytes = blocks * (int64_t)(2 * sizeof(float) + sizeof(int32_t)) + words * WORD_BYTES;
    char *memory = malloc(space * row_bytes + 1);
    if (!memory)
        return -1;
    if (space > q->rows) /* missing rows */
        memset(memory, 0, space * row_bytes);
    float *row_scales = (float *)memory, *totals = row_scales + space * blocks;
    int32_t *starts = (int32_t *)(totals + space * blocks);
    int8_t *row_codes = (int8_t *)(starts + space * blocks);
    const rounded_t r = {size, blocks, words, most, is_for_amx, row_codes, row_scales, totals, starts};
    const int32_t excess = q->bits == 4 ? 0 : byte_excess(processor_has_dot());
    const int32_t begin = excess - (q->offsets ? 0 : (int32_t)q->zero);
#pragma omp parallel for num_threads(threads) if (q->rows * blocks >= MANY)
    for (int64_t row = 0; row < q->rows; row++)
        round_row(q, &r, begin, row);
    multiply_t *multiply = multiply_of(q->bits);
    const int64_t number = (q->columns + COLUMNS - 1) / COLUMNS;
    const int64_t share = number / (8 * threads) + 1; /* panels at a time: few, since threads differ in speed */
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t first = 0; first < number; first += share)
        if (is_for_amx)
            compute_panels_in_tiles(q, &r, first, smaller(first + share, number));
        else
            compute_panels(q, &r, multiply, first, smaller(first + share, number));
    free(memory);
    return 0;
}

/* As `quantised_linear`; see `compute`. */
#define INTEGER_LINEAR(name, has_tiles)                                                                                \
    int32_t name(const void *input, int32_t is_bfloat16, int64_t rows, int64_t inner, const void *codes, int32_t bits, \
                 int64_t group, const void *scales, const void *offsets, int32_t is_half, float zero, int64_t columns, \
                 const void *bias, int32_t then, const void *other, void *output, int32_t is_unrounded,                \
                 int32_t threads)                                                                                      \
    {                                                                                                                  \
        const quantised_t q = {codes, bits,    group,       scales, offsets,      is_half, zero,   input,       rows,  \
                               inner, columns, is_bfloat16, bias,   (then_t)then, other,   output, is_unrounded};      \
        return compute(&q, has_tiles, threads);                                                                        \
    }
INTEGER_LINEAR(integer_linear, 0)
INTEGER_LINEAR(integer_linear_amx, 1) /* on a processor with AMX, once the system keeps the state of tiles */
#endif
