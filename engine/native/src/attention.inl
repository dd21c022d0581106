// Attention. To be written.
void store_kv(Pool&, const BatonStore&) {}
int64_t attention_scratch(int, int64_t, int64_t, int64_t, int32_t, int32_t) { return 0; }
void attention(Pool&, const BatonAttention&) {}
