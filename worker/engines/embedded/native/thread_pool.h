/* A thread pool for the kernels, with work stealing. Each thread computes a share of a job from front to back, since memory
 * is read fastest in order; a thread that has finished its share steals from another's, since threads differ in speed.
 *
 * To start a pool, with OpenMP, takes as long as a small GEMM of one row. So for a series of jobs it is started once, and
 * its threads poll for the next job in between.
 */
#ifndef THREAD_POOL_H
#define THREAD_POOL_H

#include <omp.h>
#include <stdatomic.h>
#if defined(__linux__) && __has_include(<linux/futex.h>)
#define HAS_FUTEX
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "arguments.h"

/* A counter that threads wait on: they poll, and after about 0.1 ms sleep, since the thread that will change it may need
 * their processor; as GNU OpenMP does with the worker's settings (decision 10).
 */
typedef struct {
    _Atomic int32_t value ALIGNED;
    _Atomic int32_t sleepers;
} counter_t;

static inline void
sleep_while(counter_t *counter, int32_t seen)
{
#ifdef HAS_FUTEX
    atomic_fetch_add(&counter->sleepers, 1);
    syscall(SYS_futex, &counter->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); /* returns if the value has changed */
    atomic_fetch_sub(&counter->sleepers, 1);
#else
    (void)counter, (void)seen;
    sched_yield();
#endif
}

/* Waits until the value is not `seen`, and returns it. */
static inline int32_t
wait_for_change(counter_t *counter, int32_t seen)
{
    enum { POLLS = 5000 };
    int32_t value;
    for (int64_t poll = 0; (value = atomic_load_explicit(&counter->value, memory_order_acquire)) == seen; poll++)
        if (poll >= POLLS)
            sleep_while(counter, seen);
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    return value;
}

static inline void
set_and_wake(counter_t *counter, int32_t value)
{
    atomic_store(&counter->value, value); /* before `sleepers` is read */
#ifdef HAS_FUTEX
    if (atomic_load(&counter->sleepers))
        syscall(SYS_futex, &counter->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

/* Computes the units of a job from `first` on, before `stop`. */
typedef void compute_t(const void *arguments, int64_t first, int64_t stop);

/* Work that threads share: `units` of it, at most `grain` at a time, and if it `shrinks` no more than half of what is
 * left of a share: threads that differ in speed end a job together.
 */
typedef struct {
    compute_t *compute;
    const void *arguments;
    int64_t units, grain;
    int32_t shrinks;
} job_t;

/* A thread's share of a job: the next unit of it that no thread has taken. */
typedef struct {
    _Atomic int64_t next ALIGNED;
} share_t;

/* Running threads and their job. */
typedef struct pool {
    int32_t count; /* threads */
    share_t *shares; /* of each thread */
    job_t job;
    counter_t posted, done;         /* numbers of jobs, from 1; `posted` is -1 when the pool stops */
    _Atomic int64_t active ALIGNED; /* the job's number, CLOSED once all units are taken, and worker threads in the job */
} pool_t;

enum { NUMBER = 32 }; /* bits of `active` below the job's number */
#define CLOSED (INT64_C(1) << 31)

/* Takes the next units of a share that ends before `stop`, from `first` on; returns their number. */
static inline int64_t
take_units(const job_t *job, share_t *share, int64_t stop, int64_t *first)
{
    if (!job->shrinks) {
        *first = atomic_fetch_add_explicit(&share->next, job->grain, memory_order_relaxed);
        return *first < stop ? smaller(job->grain, stop - *first) : 0;
    }
    int64_t count;
    *first = atomic_load_explicit(&share->next, memory_order_relaxed);
    do
        count = *first < stop ? smaller(job->grain, (stop - *first + 1) / 2) : 0;
    while (count && !atomic_compare_exchange_weak_explicit(&share->next, first, *first + count, memory_order_relaxed,
                                                           memory_order_relaxed));
    return count;
}

/* Computes a thread's own share, then steals from the shares of the others. */
static inline void
compute_shares(pool_t *pool, int32_t own)
{
    const job_t *job = &pool->job;
    for (int32_t turn = 0; turn < pool->count; turn++) {
        const int32_t owner = (own + turn) % pool->count;
        const int64_t stop = job->units * (owner + 1) / pool->count;
        for (int64_t first, count; (count = take_units(job, pool->shares + owner, stop, &first)) > 0;)
            job->compute(job->arguments, first, first + count);
    }
}

/* Whether a worker thread may join a job, which is not done before the thread has left it. */
static inline int
join_job(pool_t *pool, int32_t number)
{
    int64_t active = atomic_load(&pool->active);
    while (active >> NUMBER == number && !(active & CLOSED))
        if (atomic_compare_exchange_weak(&pool->active, &active, active + 1))
            return 1;
    return 0;
}

/* The worker threads' loop: computes jobs until the pool stops. */
static inline void
worker_loop(pool_t *pool, int32_t own)
{
    for (int32_t number = 0; (number = wait_for_change(&pool->posted, number)) > 0;) {
        if (!join_job(pool, number))
            continue;
        compute_shares(pool, own);
        if (atomic_fetch_sub(&pool->active, 1) == ((int64_t)number << NUMBER | CLOSED | 1))
            set_and_wake(&pool->done, number);
    }
}

/* Posts a job and computes it together with the threads that join in time: a thread without a processor delays no job. */
static inline void
run_job(pool_t *pool, const job_t *job)
{
    const int32_t number = atomic_load(&pool->posted.value) + 1, before = atomic_load(&pool->done.value);
    pool->job = *job;
    for (int32_t owner = 0; owner < pool->count; owner++)
        atomic_store_explicit(&pool->shares[owner].next, job->units * owner / pool->count, memory_order_relaxed);
    atomic_store(&pool->active, (int64_t)number << NUMBER);
    set_and_wake(&pool->posted, number);
    compute_shares(pool, 0);
    if (atomic_fetch_or(&pool->active, CLOSED) != (int64_t)number << NUMBER)
        wait_for_change(&pool->done, before);
}

typedef void work_t(const threads_t *threads, void *argument);

/* Does `work` in this thread, with a pool of up to `count` threads for its jobs. */
static inline void
with_pool(int32_t count, work_t *work, void *argument)
{
    share_t shares[count];
    pool_t pool = {.shares = shares};
#pragma omp parallel num_threads(count)
    if (omp_get_thread_num())
        worker_loop(&pool, omp_get_thread_num());
    else {
        pool.count = omp_get_num_threads();
        work(&(threads_t){pool.count, &pool}, argument);
        set_and_wake(&pool.posted, -1);
    }
}

static inline void
run_single_job(const threads_t *threads, void *job)
{
    run_job(threads->pool, job);
}

static inline void
parallel_for_job(const threads_t *threads, job_t *job)
{
    if (threads->count == 1 || job->units <= job->grain)
        job->compute(job->arguments, 0, job->units);
    else if (threads->pool)
        run_job(threads->pool, job);
    else
        with_pool(threads->count, run_single_job, job);
}

/* Computes all `units` of a job, at most `grain` at a time. */
static inline void
parallel_for(const threads_t *threads, int64_t units, int64_t grain, compute_t *compute, const void *arguments)
{
    parallel_for_job(threads, &(job_t){compute, arguments, units, grain, 0});
}

/* Panels of a GEMM that a thread takes at a time. */
static inline int64_t
panel_grain(int64_t panels, const threads_t *threads)
{
    return panels / (8 * threads->count) + 1;
}

#endif
