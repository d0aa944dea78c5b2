/* Linear layers in one call have the bits of one after the other. Some read the rows of the layer before, some follow it,
 * and some have no rows. Part of `native_fuzz.c`.
 */
enum { MOST_LAYERS = 5 };

#ifdef FLOAT32
/* A quantised weight, of codes in words if rows are rounded to 8 bits. */
static gemm_t *
some_quantised_gemm(int64_t columns, int64_t inner, int has_words)
{
    const int64_t padded = (columns + COLUMNS - 1) / COLUMNS * COLUMNS, scales = padded * (inner / 32);
    const int32_t bits = below(2) ? 4 : 8, has_offsets = (int32_t)below(2), is_e2m1 = bits == 4 && !has_offsets && below(2);
    unsigned char *codes = malloc(padded * inner * bits / 8);
    for (int64_t i = 0; i < padded * inner * bits / 8; i++)
        codes[i] = (unsigned char)below(256);
    gemm_t *gemm = calloc(1, sizeof *gemm);
    *gemm = (gemm_t){.columns = columns, .inner = inner, .weight = codes, .scales = some_numbers(scales, 1, 0),
                     .offsets = has_offsets ? some_numbers(scales, 1, 0) : NULL, .group = 32, .bits = bits, .is_half = 1,
                     .zero = is_e2m1 || bits == 8 ? 0.0f : -8.0f, .has_words = has_words, .is_e2m1 = is_e2m1};
    add_steps(gemm, padded);
    return gemm;
}
#endif

static void
fuzz_group(linear_kernel_t *kernel, int is_quantised, int has_words)
{
    linear_t layers[MOST_LAYERS];
    element *inputs[MOST_LAYERS] = {0}, *outputs[MOST_LAYERS], *expected[MOST_LAYERS];
    const int64_t count = 1 + below(MOST_LAYERS);
    const threads_t threads = some_threads();
    for (int64_t i = 0; i < count; i++) {
        const linear_t *before = layers + i - 1;
        const int shares = i > 0 && below(2), follows = shares && below(2);
        const int64_t rows = shares ? before->rows : below(40), inner = shares ? before->gemm->inner : 32 * (1 + below(3));
        const int64_t columns = follows ? before->gemm->columns : 1 + below(70);
        if (!shares)
            inputs[i] = some(rows * inner);
        outputs[i] = malloc(rows * columns * sizeof *outputs[i]);
        expected[i] = malloc(rows * columns * sizeof *expected[i]);
        layers[i] = (linear_t){.input = shares ? before->input : inputs[i], .rows = rows,
                               .epilogue = follows ? MULTIPLY : SILU, .is_bfloat16 = sizeof(element) == 2,
                               .follows = follows};
#ifdef FLOAT32
        layers[i].gemm = is_quantised ? some_quantised_gemm(columns, inner, has_words) : some_gemm(columns, inner);
#else
        (void)is_quantised, (void)has_words;
        layers[i].gemm = some_gemm(columns, inner);
#endif
    }
    for (int64_t i = 0; i < count; i++) {
        linear_t alone = layers[i];
        alone.follows = 0;
        alone.other = alone.epilogue == MULTIPLY ? expected[i - 1] : NULL;
        alone.output = expected[i];
        kernel(&alone, 1, &threads);
        layers[i].other = alone.epilogue == MULTIPLY ? outputs[i - 1] : NULL;
        layers[i].output = outputs[i];
    }
    kernel(layers, count, &threads);
    for (int64_t i = 0; i < count; i++) {
        const gemm_t *gemm = layers[i].gemm;
        const int64_t size = layers[i].rows * gemm->columns;
        if (memcmp(outputs[i], expected[i], size * sizeof *outputs[i]))
            abort();
        add_to_digest(outputs[i], size);
        void *const all[] = {inputs[i], outputs[i], expected[i], (void *)gemm->scales, (void *)gemm->offsets,
                             (void *)gemm->steps, (void *)gemm->units};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            free(all[k]);
        free_gemm(gemm);
    }
}
