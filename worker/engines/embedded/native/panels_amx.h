/* The micro-kernel of `panels.h` with AMX, in bfloat16: up to 32 rows, in one or two tiles of them.
 *
 * It sums in an order of its own, that of Intel's TDPBF16PS: in parts of 16 words, the products of first and those of second
 * elements each with one rounding (FMA), then these two sums, then what the parts before them had. Subnormal numbers are
 * 0. So the bits are not those of the other paths, but a row's result depends on the row alone here, too.
 */
#ifndef PANELS_AMX_H
#define PANELS_AMX_H

#include "amx.h"

enum { TILE_WORDS = 16 }; /* of a row or a column in a tile */

static __thread int configured; /* rows that this thread's tiles are configured for, or 0 */

/* Releases what a thread has used to multiply: AMX's tiles, if any. */
static inline void
end_multiplying(void)
{
    if (configured)
        release_tiles();
    configured = 0;
}

/* Adds the products of 16 words. */
INLINED void
add_words(int has_second, const element *row, int64_t row_stride, const element *panel, int64_t panel_stride)
{
    add_tiles(has_second, row, row_stride * sizeof *row, panel, panel + LANES * PER_WORD, panel_stride * sizeof *panel);
}

/* `add_words` of the last words of a row, fewer than 16: zeros take the place of the others. */
static void
add_rest(int rows, const element *row, int64_t row_stride, const element *panel, int64_t panel_stride, int64_t words)
{
    element some_rows[2 * TILE_ROWS][TILE_WORDS * PER_WORD] ALIGNED = {0};
    element some_words[TILE_WORDS][COLUMNS * PER_WORD] ALIGNED = {0};
    for (int r = 0; r < rows; r++)
        memcpy(some_rows[r], row + r * row_stride, words * PER_WORD * sizeof *row);
    for (int64_t word = 0; word < words; word++)
        memcpy(some_words[word], panel + word * panel_stride, sizeof *some_words);
    if (rows > TILE_ROWS)
        add_words(1, *some_rows, TILE_WORDS * PER_WORD, *some_words, COLUMNS * PER_WORD);
    else
        add_words(0, *some_rows, TILE_WORDS * PER_WORD, *some_words, COLUMNS * PER_WORD);
}

INLINED void
multiply_tiles(int has_second, int rows, const element *row, int64_t row_stride, const element *panel,
               int64_t panel_stride, int64_t words, float *sums, int64_t sums_stride, int continues)
{
    const int64_t whole = words / TILE_WORDS * TILE_WORDS;
    if (continues) {
        EACH_SUM(LOAD_TILE, has_second, sums, sums_stride)
    } else {
        EACH_SUM(ZERO_SUM, has_second, sums, sums_stride)
    }
    for (int64_t word = 0; word < whole; word += TILE_WORDS)
        add_words(has_second, row + word * PER_WORD, row_stride, panel + word * panel_stride, panel_stride);
    if (whole < words)
        add_rest(rows, row + whole * PER_WORD, row_stride, panel + whole * panel_stride, panel_stride, words - whole);
    EACH_SUM(STORE_TILE, has_second, sums, sums_stride)
}

/* As that of `panels.h`; `words` are a multiple of 16 if more follow. Then `end_multiplying`. */
static inline void
multiply(int rows, const element *row, int64_t row_stride, const element *panel, int64_t panel_stride, int64_t words,
         float *sums, int64_t sums_stride, int continues)
{
    if (configured != rows)
        configure_products(configured = rows);
    if (rows > TILE_ROWS)
        multiply_tiles(1, rows, row, row_stride, panel, panel_stride, words, sums, sums_stride, continues);
    else
        multiply_tiles(0, rows, row, row_stride, panel, panel_stride, words, sums, sums_stride, continues);
}

/* Rows up to which those of a second tile may be multiplied, whatever they are: to configure other tiles takes longer. */
static inline int
whole_tiles(int rows)
{
    return rows > TILE_ROWS ? 2 * TILE_ROWS : rows;
}

/* One sum of `multiply`, by its definition; of finite numbers none of which is subnormal. */
static inline float
sum_by_definition(const float *row, const float *column, int64_t words)
{
    float sum = 0;
    for (int64_t begin = 0; begin < words; begin += TILE_WORDS) {
        float first = 0, second = 0;
        for (int64_t word = begin; word < smaller(words, begin + TILE_WORDS); word++) {
            first = fmaf(row[2 * word], column[2 * word], first);
            second = fmaf(row[2 * word + 1], column[2 * word + 1], second);
        }
        sum += first + second;
    }
    return sum;
}

#endif
