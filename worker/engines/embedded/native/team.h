/* Threads that share work. Each takes what lies behind what it took before: memory is read fastest from front to back.
 * Who has none left takes from another, since threads differ in speed.
 *
 * To gather threads, with OpenMP, takes as long as a small GEMM of one row. So for a series of jobs they gather once, and
 * poll for the next job in between.
 */
#ifndef TEAM_H
#define TEAM_H

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

#include "vector.h"

/* A number that threads wait for: polling, and asleep once it has taken about 0.1 ms, since who writes it may wait for
 * this processor; as GNU OpenMP does with the worker's settings (decision 10).
 */
typedef struct {
    _Atomic int32_t value ALIGNED;
    _Atomic int32_t sleepers;
} signal_t;

static inline void
sleep_while(signal_t *signal, int32_t seen)
{
#ifdef HAS_FUTEX
    atomic_fetch_add(&signal->sleepers, 1);
    syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); /* not if it has another value by now */
    atomic_fetch_sub(&signal->sleepers, 1);
#else
    (void)signal, (void)seen;
    sched_yield();
#endif
}

/* The first value that is not `seen`. */
static inline int32_t
wait_for_other(signal_t *signal, int32_t seen)
{
    enum { POLLS = 5000 };
    int32_t value;
    for (int64_t poll = 0; (value = atomic_load_explicit(&signal->value, memory_order_acquire)) == seen; poll++)
        if (poll >= POLLS)
            sleep_while(signal, seen);
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    return value;
}

static inline void
give_signal(signal_t *signal, int32_t value)
{
    atomic_store(&signal->value, value); /* before `sleepers` is read */
#ifdef HAS_FUTEX
    if (atomic_load(&signal->sleepers))
        syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
}

/* From `first` on, before `stop`. */
typedef void compute_t(const void *job, int64_t first, int64_t stop);

/* A job that threads share, in parts of at most `most`. */
typedef struct {
    compute_t *compute;
    const void *job;
    int64_t number, most;
} task_t;

/* What is left of a thread's part of it. */
typedef struct {
    _Atomic int64_t next ALIGNED;
} share_t;

/* Threads that have gathered, and their task. */
typedef struct {
    int32_t threads;
    share_t *shares; /* one for each of them */
    task_t task;
    signal_t posted, done;           /* the task's number, from 1; of `posted`, -1 if there are no more */
    _Atomic int64_t entered ALIGNED; /* its number, CLOSED once all of it is taken, and threads beside the first in it */
} crew_t;

enum { NUMBER = 32 }; /* bits of `entered` below the task's number */
#define CLOSED (INT64_C(1) << 31)

/* Who computes; `native/__init__.py` has it, too. */
typedef struct {
    int32_t threads;
    crew_t *crew; /* NULL: it gathers for each job */
} team_t;

static inline void
take_shares(crew_t *crew, int32_t own)
{
    const task_t *task = &crew->task;
    for (int32_t turn = 0; turn < crew->threads; turn++) {
        const int32_t owner = (own + turn) % crew->threads;
        const int64_t stop = task->number * (owner + 1) / crew->threads;
        for (int64_t first = 0; first < stop;) {
            first = atomic_fetch_add_explicit(&crew->shares[owner].next, task->most, memory_order_relaxed);
            if (first < stop)
                task->compute(task->job, first, smaller(first + task->most, stop));
        }
    }
}

/* Whether a thread may compute a task, which waits for it from then on. */
static inline int
enter(crew_t *crew, int32_t number)
{
    int64_t entered = atomic_load(&crew->entered);
    while (entered >> NUMBER == number && !(entered & CLOSED))
        if (atomic_compare_exchange_weak(&crew->entered, &entered, entered + 1))
            return 1;
    return 0;
}

/* Computes tasks of the first thread until there are no more. */
static inline void
follow(crew_t *crew, int32_t own)
{
    for (int32_t number = 0; (number = wait_for_other(&crew->posted, number)) > 0;) {
        if (!enter(crew, number))
            continue;
        take_shares(crew, own);
        if (atomic_fetch_sub(&crew->entered, 1) == ((int64_t)number << NUMBER | CLOSED | 1))
            give_signal(&crew->done, number);
    }
}

/* Computes a task with those who come in time: a thread that has no processor keeps nobody waiting. */
static inline void
lead(crew_t *crew, const task_t *task)
{
    const int32_t number = atomic_load(&crew->posted.value) + 1, before = atomic_load(&crew->done.value);
    crew->task = *task;
    for (int32_t owner = 0; owner < crew->threads; owner++)
        atomic_store_explicit(&crew->shares[owner].next, task->number * owner / crew->threads, memory_order_relaxed);
    atomic_store(&crew->entered, (int64_t)number << NUMBER);
    give_signal(&crew->posted, number);
    take_shares(crew, 0);
    if (atomic_fetch_or(&crew->entered, CLOSED) != (int64_t)number << NUMBER)
        wait_for_other(&crew->done, before);
}

typedef void work_t(const team_t *team, void *argument);

/* Does `work` in this thread, with a team of up to `threads` that has gathered. */
static inline void
with_crew(int32_t threads, work_t *work, void *argument)
{
    share_t shares[threads];
    crew_t crew = {.shares = shares};
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num())
        follow(&crew, omp_get_thread_num());
    else {
        crew.threads = omp_get_num_threads();
        work(&(team_t){crew.threads, &crew}, argument);
        give_signal(&crew.posted, -1);
    }
}

static inline void
lead_task(const team_t *team, void *task)
{
    lead(team->crew, task);
}

/* Computes 0 to `number` - 1 of a job, at most `most` at a time. */
static inline void
share_work(const team_t *team, int64_t number, int64_t most, compute_t *compute, const void *job)
{
    task_t task = {compute, job, number, most};
    if (team->threads == 1 || number <= most)
        compute(job, 0, number);
    else if (team->crew)
        lead(team->crew, &task);
    else
        with_crew(team->threads, lead_task, &task);
}

/* Of a GEMM's panels a thread takes so many at a time. */
static inline int64_t
few_of(int64_t panels, const team_t *team)
{
    return panels / (8 * team->threads) + 1;
}

#endif
