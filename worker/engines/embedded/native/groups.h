/* Linear layers that are computed in one job: threads meet once for all of them, and rows that several layers read are
 * widened or rounded once.
 */
#ifndef GROUPS_H
#define GROUPS_H

#include "thread_pool.h"

/* A layer that may be computed: its units, such as the panels of its weight. */
typedef struct {
    const void *arguments;
    int64_t units;
    int32_t follows; /* whether its units are those of the layer before, and computed behind them */
} ready_t;

typedef struct {
    const ready_t *layers;
    int64_t count;
    compute_t *compute;
} group_job_t;

/* Units of layers in order; of those that follow none. */
static inline void
compute_group(const void *arguments, int64_t first, int64_t stop)
{
    const group_job_t *job = arguments;
    int64_t begin = 0;
    for (int64_t i = 0, next; i < job->count && begin < stop; i = next) {
        const int64_t end = begin + job->layers[i].units, from = begin < first ? first : begin;
        next = i;
        do {
            if (first < end)
                job->compute(job->layers[next].arguments, from - begin, smaller(stop, end) - begin);
            next++;
        } while (next < job->count && job->layers[next].follows);
        begin = end;
    }
}

/* Computes all units of some layers with `compute`, which is called for one layer at a time. */
static inline void
parallel_for_group(const threads_t *threads, const ready_t *layers, int64_t count, compute_t *compute)
{
    enum { LAYERS = 2 }; /* one, and what may follow it, are cut into as many parts as ever */
    const group_job_t job = {layers, count, compute};
    int64_t units = 0;
    for (int64_t i = 0; i < count; i++)
        units += layers[i].follows ? 0 : layers[i].units;
    const int64_t parts = count > LAYERS ? 4 : 1;
    parallel_for_job(threads, &(job_t){compute_group, &job, units, units / (8 * parts * threads->count) + 1, 1});
}

/* Whether a layer reads the rows of another one. */
static inline int
shares_rows(const linear_t *l, const linear_t *other)
{
    return l->input == other->input && l->rows == other->rows && l->gemm->inner == other->gemm->inner &&
           l->is_bfloat16 == other->is_bfloat16;
}

#endif
