/* Panels that a block of a head's keys and values, as elements, is laid out in. */
#ifndef KV_PANELS_H
#define KV_PANELS_H

#include "kv_blocks.h"
#include "panels.h"

enum {
    TRANSPOSING = 2 * sizeof(element), /* lines of keys, and of values, fetched beside transposing 16 words of 16 keys */
    TRANSPOSING_CODES = 8, /* and beside transposing 64 codes of 16 keys */
};

/* One block of keys and values of one head. */
typedef struct {
    kv_block_t rows;
    element keys[KEYS * WIDEST] ALIGNED; /* two panels of 32 keys, [words of the width][32 keys] */
    int are_panels;                      /* whether rows of values are panels already, as in float32 whole ones are */
    const element *values;               /* panels of 32 elements, [words of 64 keys][32]: in `own_values`, or rows */
    int64_t value_step, value_stride;    /* from a panel to the next, and from a word of its columns to the next */
    element own_values[KEYS * WIDEST] ALIGNED;
} block_t;

/* The panels of the values of a block. */
static inline void
choose_panels(const attention_t *c, block_t *block)
{
    block->are_panels = PER_WORD == 1 && c->width % COLUMNS == 0;
    block->value_step = block->are_panels ? COLUMNS : KEYS * COLUMNS;
    block->value_stride = block->are_panels ? c->width : PANEL_STRIDE;
    block->values = block->are_panels && !c->code_bytes ? (const element *)block->rows.values : block->own_values;
}

/* The elements of rows: themselves or, of rows in int8, in `elements`. */
static inline const element *
read_elements(const attention_t *c, const char *rows, int count, element *elements)
{
    if (!c->code_bytes)
        return (const element *)rows;
    for (int row = 0; row < count; row++)
        dequantise_row(rows + row * row_bytes(c), c->width, elements + row * c->width);
    return elements;
}

/* Lays out up to 16 keys as words [words of the width][32 keys]; missing ones become 0. */
static void
lay_out_words(const attention_t *c, const char *rows, int count, element *to, ahead_t *ahead)
{
    const int width = (int)c->width;
    element elements[LANES * WIDEST] ALIGNED;
    const element *keys = read_elements(c, rows, count, elements);
    for (int at = 0; at < width; at += 16 * PER_WORD) {
        fetch(ahead, TRANSPOSING);
        const int words = (int)smaller(16, (width - at) / PER_WORD);
        if (count == LANES && words == 16) /* numbers that the compiler knows */
            transpose_words(keys + at, width, LANES, 16, to + at * COLUMNS, COLUMNS * PER_WORD);
        else
            transpose_words(keys + at, width, count, words, to + at * COLUMNS, COLUMNS * PER_WORD);
    }
}

/* A word of 32 columns of a panel of values: up to `count` elements of a key; in bfloat16 also of the next, if any. */
static inline void
lay_out_word(const element *from, const element *next, int64_t count, element *to)
{
#ifdef FLOAT32
    (void)next;
    vec_store(to, load_lanes(from, count));
    vec_store(to + LANES, count > LANES ? load_lanes(from + LANES, count - LANES) : vec_zero());
#else
    interleave(from, next, count, to);
#endif
}

#ifdef CODES_BECOME_PANELS

/* As `lay_out_words`, of rows in int8. */
static void
lay_out_codes(const attention_t *c, const char *rows, int count, element *to, ahead_t *ahead)
{
    const int width = (int)c->width;
    const int64_t bytes = kv_row_bytes(width, 1);
    float scales[LANES] ALIGNED = {0};
    for (int row = 0; row < count; row++)
        scales[row] = kv_row_scale(rows + row * bytes, bytes);
    for (int at = 0; at < width; at += CODES) {
        fetch(ahead, TRANSPOSING_CODES);
        const int8_t *codes = (const int8_t *)rows + at;
        const int64_t some = smaller(CODES, width - at);
        if (count == LANES && some == CODES) /* numbers that the compiler knows */
            transpose_codes(codes, bytes, scales, LANES, CODES, to + at * COLUMNS, COLUMNS * PER_WORD);
        else
            transpose_codes(codes, bytes, scales, count, some, to + at * COLUMNS, COLUMNS * PER_WORD);
    }
}

/* As `lay_out_values`, of rows in int8. */
static void
lay_out_value_codes(const attention_t *c, block_t *block, ahead_t *ahead)
{
    const int64_t width = c->width, bytes = kv_row_bytes(width, 1);
    for (int key = 0; key < block->rows.count; key += PER_WORD) {
        const char *from = block->rows.values + key * bytes, *next = key + 1 < block->rows.count ? from + bytes : NULL;
        const float scales[] = {kv_row_scale(from, bytes), next ? kv_row_scale(next, bytes) : 0};
        element *to = block->own_values + key * COLUMNS;
        for (int64_t at = 0; at < width; at += CODES, to += CODES * KEYS) {
            fetch(ahead, 2);
            const int8_t *even = (const int8_t *)from + at, *odd = next ? (const int8_t *)next + at : NULL;
            if (width - at >= CODES && odd) /* a number that the compiler knows */
                interleave_codes(even, odd, scales, CODES, to, KEYS * COLUMNS);
            else
                interleave_codes(even, odd, scales, smaller(CODES, width - at), to, KEYS * COLUMNS);
        }
    }
}

#endif

/* Lays out the block's keys, in whole panels. */
static void
lay_out_keys(const attention_t *c, block_t *block, ahead_t *ahead)
{
    for (int key = 0; key < (block->rows.count + COLUMNS - 1) / COLUMNS * COLUMNS; key += LANES) {
        const char *rows = block->rows.keys + key * row_bytes(c);
        const int count = block->rows.count > key ? (int)smaller(LANES, block->rows.count - key) : 0;
        element *to = block->keys + key / COLUMNS * COLUMNS * c->width + key % COLUMNS * PER_WORD;
#ifdef CODES_BECOME_PANELS
        if (c->code_bytes) {
            lay_out_codes(c, rows, count, to, ahead);
            continue;
        }
#endif
        lay_out_words(c, rows, count, to, ahead);
    }
}

/* Lays out the block's values, unless their rows are panels. */
static void
lay_out_values(const attention_t *c, block_t *block, ahead_t *ahead)
{
    const int64_t width = c->width;
    if (block->are_panels) {
        read_elements(c, block->rows.values, block->rows.count, block->own_values);
        return;
    }
#ifdef CODES_BECOME_PANELS
    if (c->code_bytes) {
        lay_out_value_codes(c, block, ahead);
        return;
    }
#endif
    element elements[KEYS * WIDEST] ALIGNED;
    const element *values = read_elements(c, block->rows.values, block->rows.count, elements);
    element *to = block->own_values;
    for (int64_t at = 0; at < width; at += COLUMNS, to += KEYS * COLUMNS)
        for (int key = 0; key < block->rows.count; key += PER_WORD) {
            fetch(ahead, 1);
            const element *from = values + key * width + at;
            lay_out_word(from, key + 1 < block->rows.count ? from + width : NULL, width - at, to + key * COLUMNS);
        }
}

#endif
