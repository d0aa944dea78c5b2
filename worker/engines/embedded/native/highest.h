/* The highest values of a row, by falling value and rising id: a heap whose root is the lowest of them. */
#ifndef HIGHEST_H
#define HIGHEST_H

#include <math.h>
#include <stdint.h>

typedef struct {
    int64_t wanted, found;
    int64_t *ids;
    double *values;
} highest_t;

/* Whether the first of two entries is the lower one. */
static inline int
is_lower(const highest_t *h, int64_t first, int64_t second)
{
    return h->values[first] < h->values[second] || (h->values[first] == h->values[second] && h->ids[first] > h->ids[second]);
}

static inline void
swap(highest_t *h, int64_t first, int64_t second)
{
    const int64_t id = h->ids[first];
    const double value = h->values[first];
    h->ids[first] = h->ids[second], h->values[first] = h->values[second];
    h->ids[second] = id, h->values[second] = value;
}

/* Moves the root of the first `count` entries down to its place. */
static inline void
sink(highest_t *h, int64_t count)
{
    for (int64_t at = 0, next; (next = 2 * at + 1) < count; at = next) {
        if (next + 1 < count && is_lower(h, next + 1, next))
            next++;
        if (!is_lower(h, next, at))
            return;
        swap(h, at, next);
    }
}

/* What a value must exceed to be one of the highest: `least` while there are too few. */
static inline double
bar_of(const highest_t *h, double least)
{
    if (h->found < h->wanted)
        return least;
    return h->wanted ? h->values[0] : INFINITY;
}

/* Adds a value that exceeds the bar, of a higher id than all before. */
static inline void
add_value(highest_t *h, int64_t id, double value)
{
    if (h->found == h->wanted) {
        h->ids[0] = id, h->values[0] = value;
        sink(h, h->found);
        return;
    }
    int64_t at = h->found++;
    h->ids[at] = id, h->values[at] = value;
    for (; at && is_lower(h, at, (at - 1) / 2); at = (at - 1) / 2)
        swap(h, at, (at - 1) / 2);
}

/* Puts the highest first. */
static inline void
sort_highest(highest_t *h)
{
    for (int64_t count = h->found - 1; count > 0; count--) { /* the lowest one goes to the end */
        swap(h, 0, count);
        sink(h, count);
    }
}

#endif
