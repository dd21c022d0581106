// Products. To be written.
int64_t packed_bytes(int32_t, int64_t, int64_t) { return 0; }
void pack(Pool&, const BatonPack&) {}
void linear(Pool&, const BatonLinear&) {}
