/* A block of a head's keys and values in the paged KV cache, and the panels that they are laid out in: read in place, but
 * copied if the block lies in several pages.
 */
#ifndef KV_PANELS_H
#define KV_PANELS_H

#include "arguments.h"
#include "kv_rows.h"
#include "panels.h"

enum {
    KEYS = 64, /* of a block */
    TRANSPOSING = 2 * sizeof(element), /* lines of keys, and of values, fetched beside transposing 16 words of 16 keys */
    TRANSPOSING_CODES = 8, /* and beside transposing 64 codes of 16 keys */
};

/* One block of keys and values of one head. */
typedef struct {
    int64_t begin; /* position of the first key */
    int count;
    const char *key_rows, *value_rows;
    element keys[KEYS * WIDEST] ALIGNED; /* two panels of 32 keys, [words of the width][32 keys] */
    int are_panels;                      /* whether rows of values are panels already, as in float32 whole ones are */
    const element *values;               /* panels of 32 elements, [words of 64 keys][32]: in `own_values`, or rows */
    int64_t value_step, value_stride;    /* from a panel to the next, and from a word of its columns to the next */
    element own_values[KEYS * WIDEST] ALIGNED;
    char copied[2][KEYS * ROW_BYTES] ALIGNED; /* rows of keys and of values that lie in several pages */
} block_t;

static inline int64_t
row_bytes(const attention_t *c)
{
    return kv_row_bytes(c->width, c->is_int8);
}

/* The row of a head in the pages of the KV cache, by its position in the sequence: its distance in bytes. */
static inline int64_t
find_row(const attention_t *c, const tile_t *tile, int64_t head, int64_t position)
{
    const int64_t page = c->page_table[tile->pages + position / c->page_size];
    return ((page * c->kv_heads + head) * c->page_size + position % c->page_size) * row_bytes(c);
}

/* Rows that follow each other in memory from `position` on, before `stop`: those of its page. */
static inline int64_t
count_rows(const attention_t *c, int64_t position, int64_t stop)
{
    return smaller(c->page_size - position % c->page_size, stop - position);
}

/* The part of the next block that is not fetched yet. */
typedef struct {
    const char *keys, *values;
    int64_t bytes; /* of each */
} ahead_t;

static inline ahead_t
find_block(const attention_t *c, const tile_t *tile, int64_t head, int64_t begin)
{
    const int64_t at = find_row(c, tile, head, begin);
    const int64_t rows = count_rows(c, begin, smaller(begin + KEYS, tile->position + tile->count));
    return (ahead_t){c->keys + at, c->values + at, rows * row_bytes(c)};
}

/* Fetches some of it: with few queries a block is computed in less time than it is read, and a processor that is told to
 * fetch all of it at once waits until it has nearly all.
 */
INLINED void
fetch(ahead_t *ahead, int64_t lines)
{
    enum { LINE = 64 };
    for (; lines > 0 && ahead->bytes > 0; lines--) {
        fetch_to_l2(ahead->keys);
        fetch_to_l2(ahead->values);
        ahead->keys += LINE, ahead->values += LINE, ahead->bytes -= LINE;
    }
}

/* The block of `count` keys from the position `begin` on; nothing is laid out yet. */
static inline void
begin_block(const attention_t *c, const tile_t *tile, int64_t head, int64_t begin, int count, block_t *block)
{
    const int64_t where = find_row(c, tile, head, begin), stop = begin + count;
    block->begin = begin;
    block->count = count;
    block->key_rows = c->keys + where;
    block->value_rows = c->values + where;
    if (count_rows(c, begin, stop) < count) {
        block->key_rows = block->copied[0];
        block->value_rows = block->copied[1];
        for (int64_t at = begin, rows, to = 0; at < stop; at += rows, to += rows * row_bytes(c)) {
            rows = count_rows(c, at, stop);
            const int64_t from = find_row(c, tile, head, at);
            memcpy(block->copied[0] + to, c->keys + from, rows * row_bytes(c));
            memcpy(block->copied[1] + to, c->values + from, rows * row_bytes(c));
        }
    }
    block->are_panels = PER_WORD == 1 && c->width % COLUMNS == 0;
    block->value_step = block->are_panels ? COLUMNS : KEYS * COLUMNS;
    block->value_stride = block->are_panels ? c->width : PANEL_STRIDE;
    block->values = block->are_panels && !c->is_int8 ? (const element *)block->value_rows : block->own_values;
}

/* The elements of rows: themselves or, of rows in int8, in `elements`. */
static inline const element *
read_elements(const attention_t *c, const char *rows, int count, element *elements)
{
    if (!c->is_int8)
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
        scales[row] = kv_row_scale(rows + row * bytes, width);
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
    for (int key = 0; key < block->count; key += PER_WORD) {
        const char *from = block->value_rows + key * bytes, *next = key + 1 < block->count ? from + bytes : NULL;
        const float scales[] = {kv_row_scale(from, width), next ? kv_row_scale(next, width) : 0};
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
    for (int key = 0; key < (block->count + COLUMNS - 1) / COLUMNS * COLUMNS; key += LANES) {
        const char *rows = block->key_rows + key * row_bytes(c);
        const int count = block->count > key ? (int)smaller(LANES, block->count - key) : 0;
        element *to = block->keys + key / COLUMNS * COLUMNS * c->width + key % COLUMNS * PER_WORD;
#ifdef CODES_BECOME_PANELS
        if (c->is_int8) {
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
        read_elements(c, block->value_rows, block->count, block->own_values);
        return;
    }
#ifdef CODES_BECOME_PANELS
    if (c->is_int8) {
        lay_out_value_codes(c, block, ahead);
        return;
    }
#endif
    element elements[KEYS * WIDEST] ALIGNED;
    const element *values = read_elements(c, block->value_rows, block->count, elements);
    element *to = block->own_values;
    for (int64_t at = 0; at < width; at += COLUMNS, to += KEYS * COLUMNS)
        for (int key = 0; key < block->count; key += PER_WORD) {
            fetch(ahead, 1);
            const element *from = values + key * width + at;
            lay_out_word(from, key + 1 < block->count ? from + width : NULL, width - at, to + key * COLUMNS);
        }
}

#endif
