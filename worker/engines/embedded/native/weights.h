/* Masks, weights and log probabilities of tokens, for sampling: functions of the library in float32. */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "kernels.h"

enum { BLOCK = 64 }; /* tokens: `BLOCK` in adapters/sampling/candidates.py */

/* A packed mask, and the row that it is of; Python makes it of int64. */
typedef struct {
    int64_t row;
    const uint32_t *words; /* [count]; beyond them every logit is masked */
    int64_t count;
} mask_t;

/* Masks rows of logits of that width, none of them twice. */
KERNEL void apply_masks(float *logits, int64_t stride, int64_t width, const mask_t *masks, int64_t count,
                        const threads_t *threads);

/* The maxima [rows, ceil(width / 64)] of blocks of 64 logits, NaN where one of them is. A row begins `stride` after the one
 * before.
 */
KERNEL void block_maxima(const float *logits, int64_t rows, int64_t stride, int64_t width, float *maxima,
                         const threads_t *threads);

/* The highest of each row, NaN where one of its logits is, and the lowest id that has it, [rows] both; of a row with NaN 0. */
KERNEL void highest_ids(const float *logits, int64_t rows, int64_t stride, int64_t width, int64_t *ids, float *values,
                        const threads_t *threads);

/* exp of `count` numbers, none above 709, in place; 1 for 0, and 0 below -708 and for NaN. */
KERNEL void exponentials(double *values, int64_t count);

/* The weights of `logits` [width] in units: none of them is NaN or above the highest. Returns their sum, which must be
 * below 2 ** 62. `sums` [ceil(width / 64)] are those of blocks of 64 tokens. `sums` and `weights` [width] may be NULL.
 */
KERNEL int64_t weigh(const weighing_t *w, const float *logits, int64_t width, int64_t *sums, int64_t *weights);

/* The shortest prefix of `logits` [width], by falling logit and rising id, whose weights sum to at least `target`:
 * rising ids, and weights, of its tokens that have one. The sum of all weights is `total`. `ids` has room for
 * `width`, `keys` and `weights` for twice as many, which is overwritten. Returns the number of ids; -1 if `target` is
 * not from 1 to `total`, or the weights do not sum to that.
 */
KERNEL int64_t take_prefix(const weighing_t *w, const float *logits, int64_t width, int64_t total, int64_t target,
                           int64_t *ids, float *keys, int64_t *weights);

/* Keeps, of `count` tokens, those of the shortest prefix of weight `target` that have a weight; returns their number.
 * Keys that have one lie from `lowest` to `highest`. There is room for the keys and weights of twice as many.
 */
KERNEL int64_t keep_prefix(int64_t count, int64_t target, double lowest, double highest, int64_t *ids, float *keys,
                           int64_t *weights);

/* A number that rises with the logit. */
INLINED uint32_t
order_of(float logit)
{
    const float key = logit + 0.0f; /* turns -0.0 into 0.0 */
    uint32_t bits;
    memcpy(&bits, &key, sizeof bits);
    return bits ^ ((bits >> 31) * 0x7fffffff | 0x80000000u);
}

/* The order of the last key of the shortest prefix of `count` keys that has the mass `missing`, which is reduced by
 * those of higher keys.
 */
KERNEL uint32_t last_order(const float *keys, const int64_t *masses, int64_t count, int64_t *missing);

/* Bytes of memory that a thread needs to draw tokens of rows of that width. */
KERNEL int64_t drawing_memory(int64_t width);

/* Draws a token of each row. */
KERNEL void draw_tokens(const drawing_t *drawing, const threads_t *threads);

/* Log probabilities of tokens of each row, and their ranks. */
KERNEL void score_tokens(const scoring_t *scoring, const threads_t *threads);

#endif
