/* Log probabilities: of a token of each row of logits with its rank, and of the highest ones.
 *
 * A log probability is, in float64, (logit - highest) - log(sum), where the sum is of exp(logit - highest) over the whole row,
 * in an order that is the same in all paths and on every processor. Logits, not their log probabilities, decide on ranks: what
 * is a tie does not depend on the sum. Everything belongs to the kernels in float32.
 */
#ifdef FLOAT32
#include "exponential.h"
#include "highest.h"
#include "weights.h"

enum {
    FEW_LOGITS = 1 << 16, /* that one thread scores in less time than it takes to wake another */
    SUMS = 32,            /* of a row: of the numbers with an index of the same remainder */
};

/* A specialization, which the compiler knows. */
typedef struct {
    int is_float64, is_divided;
} how_t;

/* A row, and what is found in it: logits, not divided. */
typedef struct {
    const scoring_t *scoring;
    const void *logits;
    double divisor, highest, chosen;
    int64_t token, rank;
    highest_t top;
} row_t;

INLINED double
logit_of(how_t how, const void *logits, int64_t id)
{
    return how.is_float64 ? ((const double *)logits)[id] : (double)((const float *)logits)[id];
}

INLINED doubles
load_logits(how_t how, const void *logits, int64_t at)
{
    if (how.is_float64) {
        doubles found;
        memcpy(&found, (const double *)logits + at, sizeof found);
        return found;
    }
    floats found;
    memcpy(&found, (const float *)logits + at, sizeof found);
    return __builtin_convertvector(found, doubles);
}

/* The logits from `first` on, before `stop`: BLOCK of them, in `buffer` where they are fewer, with -inf behind. */
INLINED const void *
block_of(how_t how, const void *logits, int64_t first, int64_t stop, double buffer[BLOCK])
{
    const int64_t size = how.is_float64 ? sizeof(double) : sizeof(float);
    const char *block = (const char *)logits + first * size;
    if (stop - first >= BLOCK)
        return block;
    for (int64_t i = 0; i < BLOCK; i++) {
        const double logit = i < stop - first ? logit_of(how, block, i) : -INFINITY;
        if (how.is_float64)
            buffer[i] = logit;
        else
            ((float *)buffer)[i] = (float)logit;
    }
    return buffer;
}

/* The highest of all logits; NaN where one of them is. */
INLINED double
highest_logit(how_t how, const void *logits, int64_t width)
{
    doubles highest[VECTORS], each[VECTORS];
    units no_numbers = {0};
    double buffer[BLOCK] ALIGNED;
    EACH highest[i] = (doubles){0} - INFINITY;
    for (int64_t first = 0; first < width; first += BLOCK) {
        const void *block = block_of(how, logits, first, width, buffer);
        for (int64_t at = 0; at < BLOCK; at += NUMBERS) {
            EACH each[i] = load_logits(how, block, at + i * WIDTH);
            EACH no_numbers |= (units)(each[i] != each[i]);
            EACH
            {
                const units is_higher = (units)(each[i] > highest[i]);
                highest[i] = (doubles)(((units)each[i] & is_higher) | ((units)highest[i] & ~is_higher));
            }
        }
    }
    double found = -INFINITY;
    for (int lane = 0; lane < WIDTH; lane++) {
        if (no_numbers[lane])
            return NAN;
        EACH found = highest[i][lane] > found ? highest[i][lane] : found;
    }
    return found;
}

/* The sum of exp(logit - highest), of divided logits. */
INLINED double
sum_of_exponentials(how_t how, const row_t *r, int64_t width)
{
    enum { COUNT = SUMS / WIDTH };
    doubles sums[COUNT] = {{0}}, x[VECTORS];
    double buffer[BLOCK] ALIGNED, each[SUMS];
    const double highest = r->highest / r->divisor;
    for (int64_t first = 0; first < width; first += BLOCK) {
        const void *block = block_of(how, r->logits, first, width, buffer);
#pragma GCC unroll 8
        for (int64_t at = 0; at < BLOCK; at += NUMBERS) {
            EACH x[i] = load_logits(how, block, at + i * WIDTH);
            if (how.is_divided)
                EACH x[i] = x[i] / r->divisor;
            EACH x[i] = x[i] - highest;
            exponential(x);
            EACH sums[(at / WIDTH + i) % COUNT] += x[i];
        }
    }
    memcpy(each, sums, sizeof each);
    for (int count = SUMS / 2; count; count /= 2)
        for (int i = 0; i < count; i++)
            each[i] += each[i + count];
    return each[0];
}

static int
is_never(const scoring_t *s, int64_t id)
{
    int64_t first = 0, stop = s->num_never;
    while (first < stop) {
        const int64_t middle = (first + stop) / 2;
        if (s->never[middle] == id)
            return 1;
        if (s->never[middle] < id)
            first = middle + 1;
        else
            stop = middle;
    }
    return 0;
}

/* Counts the tokens of a block that are ahead of the chosen one, and finds some of the highest. */
INLINED void
rank_block(how_t how, row_t *r, const void *block, int64_t first)
{
    const int64_t last = smaller(r->token, r->scoring->ranked); /* a tie before it is ahead */
    const units precedes = (units){0} - (uint64_t)(first + BLOCK <= last); /* all bits, or none */
    const doubles chosen = (doubles){0} + r->chosen, bar = (doubles){0} + bar_of(&r->top, -INFINITY);
    units ahead = {0}, above = {0};
#pragma GCC unroll 8
    for (int64_t at = 0; at < BLOCK; at += WIDTH) {
        const doubles each = load_logits(how, block, at);
        ahead -= (units)(each > chosen) | ((units)(each == chosen) & precedes);
        above |= (units)(each > bar);
    }
    uint64_t some = 0;
    for (int lane = 0; lane < WIDTH; lane++)
        r->rank += (int64_t)ahead[lane], some |= above[lane];
    for (int64_t id = first; id < last && last < first + BLOCK; id++)
        r->rank += logit_of(how, block, id - first) == r->chosen;
    for (int64_t id = first; some && id < first + BLOCK; id++)
        if (logit_of(how, block, id - first) > bar_of(&r->top, -INFINITY) && !is_never(r->scoring, id))
            add_value(&r->top, id, logit_of(how, block, id - first));
}

INLINED void
score_row(how_t how, row_t *r)
{
    const scoring_t *s = r->scoring;
    double buffer[BLOCK] ALIGNED;
    r->chosen = logit_of(how, r->logits, r->token);
    r->highest = highest_logit(how, r->logits, s->width);
    if (!isfinite(r->highest))
        return;
    for (int64_t first = 0; first < s->ranked; first += BLOCK)
        rank_block(how, r, block_of(how, r->logits, first, s->ranked, buffer), first);
    for (int64_t i = 0; i < s->num_never; i++) {
        const int64_t id = s->never[i];
        const double logit = logit_of(how, r->logits, id);
        r->rank -= logit > r->chosen || (logit == r->chosen && id < r->token);
    }
    sort_highest(&r->top);
    const double log_sum = log(sum_of_exponentials(how, r, s->width)), highest = r->highest / r->divisor;
    r->chosen = r->chosen / r->divisor - highest - log_sum;
    for (int64_t i = 0; i < r->top.found; i++)
        r->top.values[i] = r->top.values[i] / r->divisor - highest - log_sum;
}

static void
score_rows(const void *arguments, int64_t first, int64_t stop)
{
    const scoring_t *s = arguments;
    const int64_t size = s->is_float64 ? sizeof(double) : sizeof(float);
    for (int64_t row = first; row < stop; row++) {
        if (s->counts[row] < 0)
            continue;
        row_t r = {.scoring = s, .logits = (const char *)s->logits + row * s->stride * size,
                   .divisor = s->divisors ? s->divisors[row] : 1.0, .token = s->tokens[row], .rank = 1,
                   .top = {smaller(s->counts[row], s->ranked), 0, s->top_ids + row * s->most,
                           s->top_logprobs + row * s->most}};
        if (s->is_float64)
            s->divisors ? score_row((how_t){1, 1}, &r) : score_row((how_t){1, 0}, &r);
        else
            s->divisors ? score_row((how_t){0, 1}, &r) : score_row((how_t){0, 0}, &r);
        s->logprobs[row] = isfinite(r.highest) ? r.chosen : NAN;
        s->ranks[row] = r.rank;
        s->found[row] = r.top.found;
    }
}

void
score_tokens(const scoring_t *scoring, const threads_t *threads)
{
    const int64_t rows = scoring->rows;
    parallel_for(threads, rows, rows * scoring->width > FEW_LOGITS ? 1 : rows, score_rows, scoring);
}

#endif
