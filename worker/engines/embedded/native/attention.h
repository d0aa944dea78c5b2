/* What attention over elements and over codes of 16 bits have in common: tiles of queries, the blocks of keys that each
 * attends to, and the units of work.
 *
 * A token's keys are read in blocks of 64 that begin at multiples of 64 in its sequence, in ascending order, with an
 * online softmax: its maximum, sum and result are carried from block to block (Milakov and Gimelshein, "Online
 * normalizer calculation for softmax", 2018). A token's result depends on nothing else: not on the tokens computed
 * beside it, nor on the page layout or the size of pages. So it is batch-invariant.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include "kernels.h"
#include "kv_blocks.h"

enum { QUERIES = 96 }; /* of a tile at most, which share a block once it is packed into panels */

/* A head's tile, and the one that is likely computed next; NULL for none. */
typedef struct {
    const tile_t *tile, *next;
    int64_t head, next_head;
} unit_t;

/* A unit of work, by its number, is a tile with the queries of one key head. */
static inline unit_t
unit_of(const attention_t *c, int64_t number)
{
    const int64_t heads = c->kv_heads, next = number + 1;
    return (unit_t){c->tiles + number / heads, next < c->num_tiles * heads ? c->tiles + next / heads : NULL,
                    number % heads, next % heads};
}

/* The block of a tile's keys that attention begins with: blocks begin at multiples of KEYS, wherever pages do. */
static inline int64_t
first_key(const attention_t *c, const tile_t *tile)
{
    const int64_t seen = c->window && tile->position >= c->window ? tile->position + 1 - c->window : 0;
    return seen - seen % KEYS;
}

static inline int64_t
stop_of(const tile_t *tile)
{
    return tile->position + tile->count;
}

/* The rows of the unit's block that begins at the position `begin`; returns those of the block that will come next. */
static inline ahead_t
begin_block(const attention_t *c, const unit_t *u, int64_t begin, kv_block_t *block)
{
    const int64_t stop = stop_of(u->tile);
    find_block(c, u->tile, u->head, begin, (int)smaller(KEYS, stop - begin), block);
    if (begin + block->count < stop)
        return rows_ahead(c, u->tile, u->head, begin + block->count);
    return u->next ? rows_ahead(c, u->next, u->next_head, first_key(c, u->next)) : (ahead_t){0};
}

/* The mask of a token at `position`: which keys of a block it attends to, one bit each. */
static inline uint64_t
seen_keys(const attention_t *c, const kv_block_t *block, int64_t position)
{
    const int64_t stop = smaller(position + 1 - block->begin, block->count);
    const int64_t start = c->window ? position + 1 - c->window - block->begin : 0;
    if (stop <= 0 || start >= stop)
        return 0;
    const uint64_t before = stop >= KEYS ? UINT64_MAX : (UINT64_C(1) << stop) - 1;
    return start > 0 ? before & (UINT64_MAX << start) : before;
}

/* The masks of some of a tile's queries, `rows` from `first` on; returns whether one of them sees a key. */
static inline int
see_keys(const attention_t *c, const tile_t *tile, const kv_block_t *block, int first, int rows, uint64_t *seen)
{
    uint64_t any = 0;
    for (int r = 0; r < rows; r++)
        any |= seen[r] = seen_keys(c, block, tile->position + (first + r) / c->group);
    return any != 0;
}

/* Number of the token that has query `r` of a unit, and of its head. */
static inline int64_t
token_of(const attention_t *c, const unit_t *u, int r)
{
    return u->tile->first + r / c->group;
}

static inline int64_t
head_of(const attention_t *c, const unit_t *u, int r)
{
    return u->head * c->group + r % c->group;
}

/* Maxima and sums before the first block: a sink weighs, and adds nothing. */
static inline void
begin_softmax(const attention_t *c, int64_t head, float *peak, float *sum)
{
    *peak = c->sinks ? c->sinks[head] * LOG2_E : -INFINITY;
    *sum = c->sinks ? 1 : 0;
}

/* 2 to the power of each of `fades`, the falls of some rows' maxima: factors of their sums and results. Behind them is a
 * vector's memory.
 */
static inline void
fade_rows(int rows, float *fades)
{
    memset(fades + rows, 0, LANES * sizeof *fades); /* the other lanes; on subnormal numbers processors are slow */
    for (int r = 0; r < rows; r += LANES)
        vec_store(fades + r, vec_exp2(vec_load(fades + r)));
}

/* Writes the results of a unit's queries, [rows, stride], divided by their sums. */
static inline void
store_results(const attention_t *c, const unit_t *u, int rows, const float *results, int64_t stride, const float *sums)
{
    const int64_t width = c->width;
    for (int r = 0; r < rows; r++) {
        element *to = c->output + (token_of(c, u, r) * c->kv_heads * c->group + head_of(c, u, r)) * width;
        for (int64_t at = 0; at < width; at += LANES)
            store_lanes(to + at, width - at, vec_div(vec_load(results + r * stride + at), vec_all(sums[r])));
    }
}

#endif
