// A square of words: kLanes vectors of kLanes.

#if BATON_VECTOR_BYTES == 64
#define BATON_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define BATON_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif BATON_VECTOR_BYTES == 32
#define BATON_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define BATON_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define BATON_ZIP_LOW 0, 4, 1, 5
#define BATON_ZIP_HIGH 2, 6, 3, 7
#endif

// Rows become columns: each pass merges row i with row i + kLanes / 2.
BATON_INLINE void transpose(Words (&rows)[kLanes]) {
#pragma GCC unroll 4
    for (int width = 1; width < kLanes; width *= 2) {
        Words merged[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes / 2; ++i) {
            merged[2 * i] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_LOW);
            merged[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + kLanes / 2], BATON_ZIP_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = merged[i];
    }
}
#undef BATON_ZIP_LOW
#undef BATON_ZIP_HIGH
