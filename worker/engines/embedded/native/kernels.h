/* Kernels that Python calls, and the kernels of one library each other; their arguments are in `arguments.h`. */
#ifndef KERNELS_H
#define KERNELS_H

#include "arguments.h"
#include "thread_pool.h"

/* A call stays within the library: those of the other paths and types have the same names. */
#define KERNEL __attribute__((visibility("protected")))

KERNEL linear_kernel_t linear;

KERNEL void rms_norm(const rms_norm_t *arguments, const threads_t *threads);

/* Splits the fused projection: rotated queries go to `query`, rotated keys and values into the cache. */
KERNEL void rotate_and_store(const rotation_t *arguments, const threads_t *threads);

/* `to` += `factor` * `rows`, both [count, width], rounded once. */
KERNEL void add_rows(element *to, const element *rows, int64_t count, int64_t width, float factor,
                     const threads_t *threads);

/* A linear layer with the LoRA of its rows: the first GEMM of layer `number` of their adapters. Returns 0, or -1 if there
 * is no memory.
 */
KERNEL int32_t adapted_linear(const step_t *step, int64_t number, const linear_t *layer, const threads_t *threads);

/* The mixture of a layer's experts: `input` [tokens, hidden] to `output`, the same. Returns 0, or -1 if there is no
 * memory.
 */
KERNEL int32_t mix_experts(const step_t *step, const layer_t *layer, const element *input, element *output,
                           const threads_t *threads);

/* Whether two layers are computed by one call of a kernel, so that one may follow the other. */
static inline int
have_one_kernel(const linear_t layers[2])
{
    return (layers[0].gemm->group > 0) == (layers[1].gemm->group > 0);
}

/* The outputs of linear layers of a step, of which those with quantised weights need other kernels. */
static inline int32_t
apply_all(const step_t *step, const linear_t *layers, int64_t count, const threads_t *threads)
{
    for (int64_t first = 0, stop; first < count; first = stop) {
        const int is_quantised = layers[first].gemm->group > 0;
        for (stop = first + 1; stop < count && (layers[stop].gemm->group > 0) == is_quantised; stop++)
            ;
        if ((is_quantised ? step->quantised : linear)(layers + first, stop - first, threads))
            return -1;
    }
    return 0;
}

static inline int32_t
apply(const step_t *step, const linear_t *layer, const threads_t *threads)
{
    return apply_all(step, layer, 1, threads);
}

KERNEL void attend(const attention_t *arguments, const threads_t *threads);

/* `hidden` [tokens, hidden] goes through all layers. Returns 0, or -1 if there is no memory. */
KERNEL int32_t decoder_layers(const step_t *step, const layer_t *layers, int64_t count, element *hidden,
                              const threads_t *threads);

#ifdef FLOAT32
/* Of the library in float32, also for bfloat16. A GEMM on unpacked weights, and one of integers on rows that are rounded
 * to 8 bits; with AMX on a processor that has it, once the system keeps the state of tiles.
 */
KERNEL linear_kernel_t quantised_linear, integer_linear, integer_linear_amx, dequantised_linear_amx;

/* `attend` over keys and values of 16 bits. */
KERNEL void attend_to_codes(const attention_t *arguments, const threads_t *threads);

/* Writes rows of a quantised weight. Returns 0, or -1 if there is no such row. */
KERNEL int32_t unpack_rows(const unpacking_t *arguments);

/* Rounds blocks of 32 weights to GGUF's types: codes [count][32], or [count][16] with two to a byte; scales and offsets
 * [count] are float16.
 */
KERNEL void round_q8_0(const blocks_t *blocks, const threads_t *threads);
KERNEL void round_q4_0(const blocks_t *blocks, const threads_t *threads);
KERNEL void round_q4_1(const blocks_t *blocks, const threads_t *threads);

/* Rounds super-blocks of 256 weights to Q4_K: two codes to a byte [count][128], scales and offsets [count][8] in float32.
 * To Q6_K: codes [count][256], scales [count][16].
 */
KERNEL void round_q4_k(const blocks_t *blocks, const threads_t *threads);
KERNEL void round_q6_k(const blocks_t *blocks, const threads_t *threads);

/* Packs `rows` [count][width] of elements of `size` bytes, 1, 2 or 4, into `panels` [ceil(count / 32)][width][32]; rows
 * that are missing in the last one are 0.
 */
KERNEL void fill_panels(const void *rows, int64_t count, int64_t width, int32_t size, void *panels,
                        const threads_t *threads);

/* x = cap * tanh(x / cap) for each of `count` numbers. */
KERNEL void soft_cap(float *x, int64_t count, float cap, const threads_t *threads);

/* Copies pieces of tensors from the process with that id, which has them at `theirs`: those from number `start` on, before
 * `stop`, of `count` in each tensor. A row of `pieces` [count][3] is an offset in ours, one in theirs, and a size, all in
 * bytes. Returns 0, an errno, or -1 if a piece is not all there.
 */
KERNEL int32_t copy_from_process(int64_t process, const uint64_t *ours, const uint64_t *theirs, const int64_t (*pieces)[3],
                                 int64_t count, int64_t start, int64_t stop, const threads_t *threads);
#endif

#endif
