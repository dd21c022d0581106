// Rows of a table by their numbers: of a plain one, or of one that is packed for products (`linear_pack.inl`), so that an
// embedding and the head that is tied to it are one table.

// In a packed row each step lies a panel's step behind the one before it, in a line of memory of its own: so a row costs
// as much as many plain ones, some microseconds.
constexpr int64_t kPlainRowsPerPacked = 16;

template <class T>
void gather_packed_row(void* out, const void* packed, int64_t row, int64_t row_bytes) {
    constexpr int kInputs = Packing<T>::kInputs;
    const int64_t num_in = row_bytes / int64_t{sizeof(T)};
    const T* from = static_cast<const T*>(packed) + row / kPanelOutputs * num_steps<T>(num_in) * kStepElements<T> +
                    row % kPanelOutputs * kInputs;
    T* to = static_cast<T*>(out);
    for (int64_t k = 0; k < num_in; ++k) to[k] = from[k / kInputs * kStepElements<T> + k % kInputs];
}

void gather_row(char* out, const BatonGather& a, int64_t row) {
    switch (a.packed_as) {
        case BATON_FLOAT32:
            return gather_packed_row<float>(out, a.table, row, a.row_bytes);
        case BATON_BFLOAT16:
            return gather_packed_row<Bfloat16>(out, a.table, row, a.row_bytes);
        case BATON_FLOAT16:
            return gather_packed_row<Float16>(out, a.table, row, a.row_bytes);
    }
    __builtin_memcpy(out, static_cast<const char*>(a.table) + row * a.row_bytes, static_cast<size_t>(a.row_bytes));
}

void gather(Pool& threads, const BatonGather& a) {
    const int64_t row_size = a.row_bytes * (a.packed_as == BATON_NOT_PACKED ? 1 : kPlainRowsPerPacked);
    each_row(threads, a.num_rows, row_size, [&](int64_t row) {
        char* out = static_cast<char*>(a.out) + row * a.row_bytes;
        const int64_t from = a.rows[row];
        if (from >= 0 && from < a.num_table_rows) {
            gather_row(out, a, from);
        } else {
            __builtin_memset(out, 0xff, static_cast<size_t>(a.row_bytes));  // in every dtype not a number
        }
    });
}
