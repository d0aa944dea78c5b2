/* Memory for what lies between kernels. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

/* At least so many bytes, on a cache line; many of them in huge pages, if the system has some: the rows of a prompt lie in
 * more pages than a processor knows the addresses of. NULL if there is no memory. For `free`.
 */
static inline void *
allocate(int64_t bytes)
{
    enum { LINE = 64, HUGE_PAGE = 1 << 21 };
    const int64_t unit = bytes < HUGE_PAGE ? LINE : HUGE_PAGE;
    const int64_t size = (bytes / unit + 1) * unit;
    void *memory = aligned_alloc(unit, size);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory && unit == HUGE_PAGE)
        madvise(memory, size, MADV_HUGEPAGE);
#endif
    return memory;
}

#endif
