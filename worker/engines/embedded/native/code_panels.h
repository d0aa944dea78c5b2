/* Panels that a block of keys and values of 16 bits is laid out in, and their products with codes, in exact sums of 32 bits. */
#ifndef CODE_PANELS_H
#define CODE_PANELS_H

#include "kv_blocks.h"

enum {
    CODES_PER_WORD = 2,
    LAID_OUT = 1, /* lines of keys, and of values, fetched beside 16 words of 16 keys, or a word of 32 elements */
};

/* One block of keys and values of one head. */
typedef struct {
    kv_block_t rows;
    float key_scales[KEYS] ALIGNED, value_scales[KEYS] ALIGNED; /* 0 where there is no key */
    int32_t keys[KEYS * WIDEST / CODES_PER_WORD] ALIGNED;       /* panels of 32 keys, [words of the width][32] */
    int32_t values[KEYS * WIDEST / CODES_PER_WORD] ALIGNED;     /* panels of 32 elements, [words of the keys][32] */
} code_block_t;

/* Where the panel begins whose first column is number `first`, of columns of `codes` codes: the width, or KEYS. */
static inline int64_t
panel_at(int64_t first, int64_t codes)
{
    return first * codes / CODES_PER_WORD;
}

static inline void
read_scales(const char *rows, int64_t row_bytes, int count, float *scales)
{
    memset(scales, 0, KEYS * sizeof *scales);
    for (int key = 0; key < count; key++)
        scales[key] = kv_row_scale(rows + key * row_bytes, row_bytes);
}

/* Lays out the block's keys, in whole panels: missing ones are 0. */
static void
lay_out_key_codes(const attention_t *c, code_block_t *block, ahead_t *ahead)
{
    const int64_t width = c->width, bytes = row_bytes(c), stride = bytes / (int64_t)sizeof(element);
    for (int key = 0; key < (block->rows.count + COLUMNS - 1) / COLUMNS * COLUMNS; key += LANES) {
        const element *rows = (const element *)(block->rows.keys + key * bytes);
        const int count = block->rows.count > key ? (int)smaller(LANES, block->rows.count - key) : 0;
        element *to = (element *)(block->keys + panel_at(key / COLUMNS * COLUMNS, width) + key % COLUMNS);
        for (int64_t at = 0; at < width; at += LANES * CODES_PER_WORD, rows += LANES, to += LANES * COLUMNS) {
            fetch(ahead, LAID_OUT);
            const int words = (int)smaller(LANES, (width - at) / CODES_PER_WORD);
            if (count == LANES && words == LANES) /* numbers that the compiler knows */
                transpose_words(rows, stride, LANES, LANES, to, COLUMNS);
            else
                transpose_words(rows, stride, count, words, to, COLUMNS);
        }
    }
    read_scales(block->rows.keys, bytes, block->rows.count, block->key_scales);
}

/* Lays out the block's values. */
static void
lay_out_value_codes(const attention_t *c, code_block_t *block, ahead_t *ahead)
{
    const int64_t width = c->width, bytes = row_bytes(c);
    for (int64_t at = 0; at < width; at += COLUMNS) {
        uint16_t *to = (uint16_t *)(block->values + panel_at(at, KEYS));
        const uint16_t *from = (const uint16_t *)block->rows.values + at;
        for (int key = 0; key < block->rows.count; key += CODES_PER_WORD, to += COLUMNS * CODES_PER_WORD) {
            const uint16_t *even = from + key * bytes / (int64_t)sizeof *from, *odd = even + bytes / (int64_t)sizeof *from;
            fetch(ahead, LAID_OUT);
            if (key + 1 < block->rows.count && width - at >= COLUMNS) /* a number that the compiler knows */
                interleave(even, odd, COLUMNS, to);
            else
                interleave(even, key + 1 < block->rows.count ? odd : NULL, width - at, to);
        }
    }
    read_scales(block->rows.values, bytes, block->rows.count, block->value_scales);
}

/* What becomes of sums of products: with scales of columns, these times them; or they are added, times a scale of their row,
 * to what was there, times a factor of its row.
 */
typedef struct {
    const float *column_scales; /* or NULL */
    const float *scales, *fades;
    float *to; /* [rows, stride] */
    int64_t stride;
} finish_t;

/* The sums of a row and of 16 columns from number `at` on. */
INLINED void
finish_sums(const finish_t *f, int64_t row, int64_t at, ints sums)
{
    float *to = f->to + row * f->stride + at;
    if (f->column_scales)
        vec_store(to, vec_mul(vec_of_ints(sums), vec_load(f->column_scales + at)));
    else
        vec_store(to, vec_fmadd(vec_load(to), vec_all(f->fades[row]), vec_mul(vec_of_ints(sums), vec_all(f->scales[row]))));
}

/* Rows of `words` words times halves of the panel whose first column is number `at`. */
INLINED void
multiply_code_rows(int has_dot, int rows, int halves, const int16_t *row, int64_t row_stride, const int32_t *panel,
                   int64_t words, int64_t at, const finish_t *finish)
{
    ints sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            sum[r][half] = ints_all(0);
    for (int64_t word = 0; word < words; word++, panel += COLUMNS) {
        const ints left = load_ints(panel), right = load_ints(halves > 1 ? panel + LANES : panel);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t codes;
            memcpy(&codes, row + r * row_stride + word * CODES_PER_WORD, sizeof codes);
            const ints x = ints_all(codes);
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++)
                sum[r][half] = add_pairs(has_dot, sum[r][half], x, half ? right : left);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            finish_sums(finish, r, at + half * LANES, sum[r][half]);
}

/* `multiply_code_rows` of a whole panel; the halves of its columns one after the other if there are many rows. */
INLINED void
multiply_code_panel(int has_dot, int rows, const int16_t *row, int64_t row_stride, const int32_t *panel, int64_t words,
                    int64_t at, const finish_t *finish)
{
    if (rows <= WIDE_ROWS) {
        multiply_code_rows(has_dot, rows, 2, row, row_stride, panel, words, at, finish);
        return;
    }
    for (int half = 0; half < 2; half++)
        multiply_code_rows(has_dot, rows, 1, row, row_stride, panel + half * LANES, words, at + half * LANES, finish);
}

_Static_assert(ROWS <= 12, "each number of rows has a case below");

/* `multiply_code_panel` for 1 to ROWS rows, unrolled for each number, so that the sums stay in registers. */
INLINED void
multiply_any_codes(int has_dot, int rows, const int16_t *row, int64_t row_stride, const int32_t *panel, int64_t words,
                   int64_t at, const finish_t *finish)
{
#define NUMBER(n)                                                                                                      \
    case n:                                                                                                            \
        if (n <= ROWS)                                                                                                 \
            multiply_code_panel(has_dot, n <= ROWS ? n : 1, row, row_stride, panel, words, at, finish);                \
        break;
    switch (rows) {
        NUMBER(1) NUMBER(2) NUMBER(3) NUMBER(4) NUMBER(5) NUMBER(6)
        NUMBER(7) NUMBER(8) NUMBER(9) NUMBER(10) NUMBER(11) NUMBER(12)
    }
#undef NUMBER
}

static void
multiply_pairs(int has_dot, int rows, const int16_t *row, int64_t row_stride, const int32_t *panel, int64_t words, int64_t at,
               const finish_t *finish)
{
#ifdef CAN_HAVE_DOT
    if (has_dot) {
        multiply_any_codes(1, rows, row, row_stride, panel, words, at, finish);
        return;
    }
#else
    (void)has_dot;
#endif
    multiply_any_codes(0, rows, row, row_stride, panel, words, at, finish);
}

#endif
