/* The micro-kernel of all GEMMs: a few rows times a panel of 32 columns, with float32 accumulators.
 *
 * A panel holds the weights of 32 columns word by word, [words][32 columns]: one instruction multiplies the same word
 * of 16 columns, or one element of it, and the panel is read from front to back. Each sum runs over the words in order,
 * from the first to the last, and over the two elements of a bfloat16 word from the second to the first, as
 * AVX512-BF16 does it, whatever number of rows is computed together: the GEMM is batch-invariant.
 */
#ifndef PANELS_H
#define PANELS_H

#include "vector.h"

enum { PANEL_STRIDE = COLUMNS * PER_WORD }; /* elements from one word of a panel's columns to the next */

#ifdef WITH_AMX
#include "panels_amx.h"
#else

enum {
    CACHED_WORDS = 128, /* of a panel, 16 KiB, of which the second half is read after the first one */
    AHEAD = 8192,       /* bytes by which a panel is fetched before it is read */
    FETCHED_ROWS = 5,   /* rows from which it is: with fewer, a processor's own prefetching comes as far */
};

/* sums [rows, 16 * halves] = rows of `words` words times halves of a panel; added to `sums` if it `continues`. */
INLINED void
multiply_rows(int rows, int halves, const operand *row, int64_t row_stride, const element *panel, int64_t panel_stride,
              int64_t words, float *sums, int64_t sums_stride, int continues)
{
    vec sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            sum[r][half] = continues ? vec_load(sums + r * sums_stride + half * LANES) : vec_zero();
    for (int64_t word = 0; word < words; word++, panel += panel_stride) {
        if (halves == 1)
            __builtin_prefetch(panel + LANES * PER_WORD);
        else if (rows >= FETCHED_ROWS) {
            fetch_to_l2((const char *)panel + AHEAD);
            fetch_to_l2((const char *)(panel + LANES * PER_WORD) + AHEAD);
        }
        const words_t left = load_words(panel), right = load_words(halves > 1 ? panel + LANES * PER_WORD : panel);
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            const weights w[2] = {weights_of(left, part), weights_of(right, part)};
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int half = 0; half < halves; half++)
                    sum[r][half] = add_products(sum[r][half], row + r * row_stride + word * PER_WORD, part, w[half]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            vec_store(sums + r * sums_stride + half * LANES, sum[r][half]);
}

/* `multiply_rows` of a whole panel; the halves of its columns one after the other if there are many rows. */
INLINED void
multiply_panel(int rows, const operand *row, int64_t row_stride, const element *panel, int64_t panel_stride,
               int64_t words, float *sums, int64_t sums_stride, int continues)
{
    if (rows <= WIDE_ROWS) {
        multiply_rows(rows, 2, row, row_stride, panel, panel_stride, words, sums, sums_stride, continues);
        return;
    }
    for (int64_t word = 0; word < words; word += CACHED_WORDS) {
        const int64_t count = smaller(CACHED_WORDS, words - word);
        for (int half = 0; half < 2; half++)
            multiply_rows(rows, 1, row + word * PER_WORD, row_stride,
                          panel + word * panel_stride + half * LANES * PER_WORD, panel_stride, count,
                          sums + half * LANES, sums_stride, continues || word);
    }
}

/* `multiply_panel` for 1 to ROWS rows, unrolled for each number, so that the accumulators stay in registers. */
static inline void
multiply(int rows, const operand *row, int64_t row_stride, const element *panel, int64_t panel_stride, int64_t words,
         float *sums, int64_t sums_stride, int continues)
{
#define NUMBER(n)                                                                                                      \
    case n:                                                                                                            \
        if (n <= ROWS)                                                                                                 \
            multiply_panel(n <= ROWS ? n : 1, row, row_stride, panel, panel_stride, words, sums, sums_stride,          \
                           continues);                                                                                 \
        break;
    switch (rows) {
        NUMBER(1) NUMBER(2) NUMBER(3) NUMBER(4) NUMBER(5) NUMBER(6)
        NUMBER(7) NUMBER(8) NUMBER(9) NUMBER(10) NUMBER(11) NUMBER(12)
    }
#undef NUMBER
}

/* Releases what a thread has used to multiply: AMX's tiles, if any. */
static inline void
end_multiplying(void)
{
}

/* Rows up to which some more may be multiplied, whatever they are. */
static inline int
whole_tiles(int rows)
{
    return rows;
}

/* One sum of `multiply`, by its definition. */
static inline float
sum_by_definition(const float *row, const float *column, int64_t words)
{
    float sum = 0;
    for (int64_t word = 0; word < words; word++)
        for (int i = PER_WORD - 1; i >= 0; i--)
            sum = fmaf(row[word * PER_WORD + i], column[word * PER_WORD + i], sum);
    return sum;
}
#endif

#endif
