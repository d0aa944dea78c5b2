/* Memory of another process of this machine, which the kernel copies, on all threads. Belongs to the kernels in float32. */
#ifdef FLOAT32
#define _GNU_SOURCE /* for process_vm_readv */
#include <errno.h>
#ifdef __linux__
#include <sys/uio.h>
#endif

#include "kernels.h"

enum {
    PIECES = 64,        /* of a system call, which takes up to 1024 */
    ALONE = 128 * 1024, /* bytes that one thread copies sooner than it wakes another */
};

/* Pieces of tensors, from number `start` on: `count` of each tensor, the same in all. A row of `pieces` is an offset in ours,
 * one in theirs, and a size.
 */
typedef struct {
    int64_t process;
    const uint64_t *ours, *theirs;
    const int64_t (*pieces)[3];
    int64_t count, start;
    _Atomic int32_t *failure;
} process_copy_t;

static int32_t
copy_in_one_call(const process_copy_t *copy, int64_t first, int64_t count)
{
#ifdef __linux__
    struct iovec ours[PIECES], theirs[PIECES];
    ssize_t wanted = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t number = copy->start + first + i, tensor = number / copy->count;
        const int64_t *piece = copy->pieces[number % copy->count];
        ours[i] = (struct iovec){(void *)(uintptr_t)(copy->ours[tensor] + piece[0]), piece[2]};
        theirs[i] = (struct iovec){(void *)(uintptr_t)(copy->theirs[tensor] + piece[1]), piece[2]};
        wanted += piece[2];
    }
    const ssize_t copied = process_vm_readv((pid_t)copy->process, ours, count, theirs, count, 0);
    return copied == wanted ? 0 : copied < 0 ? errno : -1;
#else
    (void)copy, (void)first, (void)count;
    return ENOSYS;
#endif
}

static void
copy_pieces(const void *arguments, int64_t first, int64_t stop)
{
    const process_copy_t *copy = arguments;
    for (; first < stop && !atomic_load(copy->failure); first += PIECES) {
        const int32_t failure = copy_in_one_call(copy, first, smaller(PIECES, stop - first));
        if (failure)
            atomic_store(copy->failure, failure);
    }
}

int32_t
copy_from_process(int64_t process, const uint64_t *ours, const uint64_t *theirs, const int64_t (*pieces)[3], int64_t count,
                  int64_t start, int64_t stop, const threads_t *threads)
{
    _Atomic int32_t failure = 0;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++)
        bytes += pieces[i][2];
    const process_copy_t copy = {process, ours, theirs, pieces, count, start, &failure};
    parallel_for(threads, stop - start, ALONE * count / (bytes + 1) + 1, copy_pieces, &copy);
    return failure;
}
#endif
