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

#include "quantised.h"
#include "rounding.h"

enum {
    BLOCK = 32, /* elements of a row with one scale, at most */
    MANY = 256, /* blocks from which threads share in rounding them */
};

/* Rounded rows. Behind the codes of a row are at least 16 bytes. */
typedef struct {
    int64_t size, blocks; /* elements of a block, and blocks of a row */
    int64_t stride;       /* of a row's codes */
    int8_t *codes;        /* of 4 bits' words: of each eight those with even indices first */
    float *scales;        /* [rows, blocks] */
    int32_t *totals;      /* [rows, blocks]: sums of codes */
} rounded_t;

static void
round_row(const quantised_t *q, const rounded_t *to, int64_t row)
{
    int8_t *codes = to->codes + row * to->stride;
    memset(codes, 0, to->stride);
    for (int64_t block = 0; block < to->blocks; block++) {
        float lanes[BLOCK] ALIGNED;
        const int64_t first = block * to->size, count = smaller(to->size, q->inner - first);
        for (int64_t at = 0; at < count; at += LANES)
            vec_store(lanes + at, read_lanes(q->input, row * q->inner + first + at, count - at, q->is_bfloat16));
        const float scale = scale_of(lanes, count);
        vec total = vec_zero();
        if (scale > 0)
            for (int64_t at = 0; at < count; at += LANES) {
                const vec rounded = codes_of(vec_load(lanes + at), scale);
                store_codes(codes + first + at, rounded, q->bits == 4);
                total = vec_add(total, rounded);
            }
        to->scales[row * to->blocks + block] = scale;
        to->totals[row * to->blocks + block] = (int32_t)vec_sum(total);
    }
}

INLINED int32_t
word_at(const int8_t *codes)
{
    int32_t word;
    memcpy(&word, codes, sizeof word);
    return word;
}

/* `rows` rows from `row` on, times one or both halves of a panel's columns, from `first` on: sums [rows, 32]. */
INLINED void
multiply_codes(int rows, int halves, int bits, int has_dot, const quantised_t *q, const rounded_t *r, int64_t panel,
               int first, int64_t row, float *sums)
{
    enum { WORD_BYTES = 4 };
    const int64_t words = (q->inner * bits + 31) / 32;
    const char *codes = q->codes + ((panel * words) * COLUMNS + first * LANES) * WORD_BYTES;
    const int8_t *x = r->codes + row * r->stride;
    const float *scales = r->scales + row * r->blocks;
    const int32_t *totals = r->totals + row * r->blocks;
    const int32_t zero = (bits == 4 ? 0 : -byte_excess(has_dot)) + (q->offsets ? 0 : (int32_t)q->zero);
    vec sum[INT_ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = vec_zero();
    for (int64_t block = 0; block < r->blocks; block++) {
        const int64_t start = block * r->size, stop = smaller(start + r->size, q->inner);
        ints part[INT_ROWS][2];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++)
            part[i][0] = part[i][1] = ints_all(0);
#pragma GCC unroll 4
        for (int64_t at = start; at < stop; at += 32 / bits, codes += COLUMNS * WORD_BYTES)
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                const words_t w = load_words((const element *)(codes + half * LANES * WORD_BYTES));
                const words_t left = bits == 4 ? split_nibbles(w, 0) : split_bytes(has_dot, w);
                const words_t right = bits == 4 ? split_nibbles(w, 1) : left;
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++) {
                    const int8_t *of_row = x + i * r->stride + at;
                    ints *to = &part[i][half];
                    if (bits == 4) {
                        *to = add_nibbles(has_dot, *to, left, word_at(of_row));
                        *to = add_nibbles(has_dot, *to, right, word_at(of_row + 4));
                    } else
                        *to = add_bytes(has_dot, *to, left, word_at(of_row));
                }
            }
        const int64_t group = (panel * (q->inner / q->group) + start / q->group) * COLUMNS + first * LANES;
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            const vec scale = load_scales(q->scales, group + half * LANES, q->is_half);
            const vec offset = q->offsets ? load_scales(q->offsets, group + half * LANES, q->is_half) : scale;
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                const int32_t total = totals[i * r->blocks + block];
                const ints all = bits == 4 ? nibble_sums(has_dot, part[i][half]) : part[i][half];
                vec term = vec_mul(scale, vec_of_ints(ints_add(all, ints_all(zero * total))));
                if (q->offsets)
                    term = vec_fmadd(offset, vec_all((float)total), term);
                sum[i][half] = vec_fmadd(vec_all(scales[i * r->blocks + block]), term, sum[i][half]);
            }
        }
    }
#pragma GCC unroll 6
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

static void
compute_panel(const quantised_t *q, const rounded_t *r, multiply_t *multiply, int64_t panel)
{
    float sums[INT_ROWS * COLUMNS] ALIGNED;
    const int64_t tiles = (q->rows + INT_ROWS - 1) / INT_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t start = q->rows * tile / tiles, stop = q->rows * (tile + 1) / tiles;
        multiply((int)(stop - start), q, r, panel, start, sums);
        for (int64_t row = start; row < stop; row++)
            finish(q, row, panel * COLUMNS, sums + (row - start) * COLUMNS);
    }
}

/* As `quantised_linear`. A group has a multiple of 8 elements that 32 is a multiple of, or a multiple of 32, or is a whole row;
 * a row is a multiple of 8 elements if codes have 4 bits. Returns 0, or -1 if there is no memory for the rounded rows.
 */
int32_t
integer_linear(const void *input, int32_t is_bfloat16, int64_t rows, int64_t inner, const void *codes, int32_t bits,
               int64_t group, const void *scales, const void *offsets, int32_t is_half, float zero, int64_t columns,
               const void *bias, int32_t then, const void *other, void *output, int32_t is_unrounded, int32_t threads)
{
    const quantised_t q = {codes, bits,    group,       scales, offsets,      is_half, zero,   input,       rows,
                           inner, columns, is_bfloat16, bias,   (then_t)then, other,   output, is_unrounded};
    const int64_t size = group < BLOCK && group < inner ? group : BLOCK, blocks = (inner + size - 1) / size;
    const int64_t stride = (blocks * size + 2 * LANES - 1) / LANES * LANES;
    char *memory = malloc(rows * (blocks * (sizeof(float) + sizeof(int32_t)) + stride) + 1);
    if (!memory)
        return -1;
    float *row_scales = (float *)memory;
    int32_t *totals = (int32_t *)(row_scales + rows * blocks);
    const rounded_t r = {size, blocks, stride, (int8_t *)(totals + rows * blocks), row_scales, totals};
#pragma omp parallel for num_threads(threads) if (rows * blocks >= MANY)
    for (int64_t row = 0; row < rows; row++)
        round_row(&q, &r, row);
    multiply_t *multiply = multiply_of(bits);
    const int64_t number = (columns + COLUMNS - 1) / COLUMNS;
    const int64_t share = number / (8 * threads) + 1; /* panels at a time: few, since threads differ in speed */
#pragma omp parallel for schedule(dynamic, share) num_threads(threads)
    for (int64_t panel = 0; panel < number; panel++)
        compute_panel(&q, &r, multiply, panel);
    free(memory);
    return 0;
}
#endif
