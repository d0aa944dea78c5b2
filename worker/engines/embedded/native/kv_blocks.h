/* Blocks of a head's keys and values in the paged KV cache: their rows, in place, or copied if they lie in several pages.
 */
#ifndef KV_BLOCKS_H
#define KV_BLOCKS_H

#include "arguments.h"
#include "kv_rows.h"

enum { KEYS = 64 }; /* of a block */

typedef struct {
    int64_t begin; /* position of the first key */
    int count;
    const char *keys, *values;                /* rows that follow each other */
    char copied[2][KEYS * ROW_BYTES] ALIGNED; /* those of keys and of values that lie in several pages */
} kv_block_t;

static inline int64_t
row_bytes(const attention_t *c)
{
    return kv_row_bytes(c->width, c->code_bytes);
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

/* The rows of `count` keys from the position `begin` on. */
static inline void
find_block(const attention_t *c, const tile_t *tile, int64_t head, int64_t begin, int count, kv_block_t *block)
{
    const int64_t where = find_row(c, tile, head, begin), stop = begin + count;
    block->begin = begin;
    block->count = count;
    block->keys = c->keys + where;
    block->values = c->values + where;
    if (count_rows(c, begin, stop) == count)
        return;
    block->keys = block->copied[0];
    block->values = block->copied[1];
    for (int64_t at = begin, rows, to = 0; at < stop; at += rows, to += rows * row_bytes(c)) {
        rows = count_rows(c, at, stop);
        const int64_t from = find_row(c, tile, head, at);
        memcpy(block->copied[0] + to, c->keys + from, rows * row_bytes(c));
        memcpy(block->copied[1] + to, c->values + from, rows * row_bytes(c));
    }
}

/* The part of the next block that is not fetched yet: rows of one page, and of those behind it. */
typedef struct {
    const attention_t *attention;
    const tile_t *tile;
    int64_t head, position, stop; /* of the pages behind */
    const char *keys, *values;
    int64_t bytes; /* of the keys, and of the values, of this page */
} ahead_t;

static inline ahead_t
rows_ahead(const attention_t *c, const tile_t *tile, int64_t head, int64_t begin)
{
    return (ahead_t){c, tile, head, begin, smaller(begin + KEYS, tile->position + tile->count), NULL, NULL, 0};
}

/* Goes on to the next page; returns whether there is one. */
static inline int
next_page(ahead_t *ahead)
{
    if (ahead->position >= ahead->stop)
        return 0;
    const attention_t *c = ahead->attention;
    const int64_t at = find_row(c, ahead->tile, ahead->head, ahead->position);
    const int64_t rows = count_rows(c, ahead->position, ahead->stop);
    ahead->keys = c->keys + at, ahead->values = c->values + at, ahead->bytes = rows * row_bytes(c);
    ahead->position += rows;
    return 1;
}

/* Fetches some of it: with few queries a block is computed in less time than it is read, and a processor that is told to
 * fetch all of it at once waits until it has nearly all.
 */
INLINED void
fetch(ahead_t *ahead, int64_t lines)
{
    enum { LINE = 64 };
    for (; lines > 0 && (ahead->bytes > 0 || next_page(ahead)); lines--) {
        fetch_to_l2(ahead->keys);
        fetch_to_l2(ahead->values);
        ahead->keys += LINE, ahead->values += LINE, ahead->bytes -= LINE;
    }
}

#endif
