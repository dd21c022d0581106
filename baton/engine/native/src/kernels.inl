// All kernels for one dispatch level. See the files of `levels/`.

namespace baton {
namespace BATON_LEVEL {
namespace {

#include "simd.h"
#include "transpose.inl"
#include "elementwise.inl"
#include "argmax.inl"
#include "sampling.inl"
#include "routing.inl"
#include "delta_rule.inl"
namespace products {
#include "linear.inl"
#include "quantized.inl"
#include "byte_dots.inl"
#include "rounded.inl"
#include "rounded_pack.inl"
#include "rounded_linear.inl"
#include "gather.inl"
#include "experts.inl"
}
namespace paged {
#include "attention.inl"
}
namespace rounding {
#include "quantize.inl"
}

}  // namespace
}  // namespace BATON_LEVEL

#define BATON_TABLE(variable, name) \
    extern const KernelTable variable = {name, \
                                         BATON_LEVEL::products::packed_bytes, \
                                         BATON_LEVEL::products::pack, \
                                         BATON_LEVEL::products::linear, \
                                         BATON_LEVEL::paged::store_kv, \
                                         BATON_LEVEL::paged::attention_scratch, \
                                         BATON_LEVEL::paged::attention, \
                                         BATON_LEVEL::add_norm, \
                                         BATON_LEVEL::norm_rotate, \
                                         BATON_LEVEL::gate, \
                                         BATON_LEVEL::products::gather, \
                                         BATON_LEVEL::argmax, \
                                         BATON_LEVEL::sample, \
                                         BATON_LEVEL::products::quantized_bytes, \
                                         BATON_LEVEL::products::quantized_pack, \
                                         BATON_LEVEL::products::quantized_linear, \
                                         BATON_LEVEL::rounding::quantize, \
                                         BATON_LEVEL::route, \
                                         BATON_LEVEL::products::experts, \
                                         BATON_LEVEL::products::rounded_bytes, \
                                         BATON_LEVEL::products::round_rows, \
                                         BATON_LEVEL::products::rounded_pack_bytes, \
                                         BATON_LEVEL::products::rounded_pack, \
                                         BATON_LEVEL::products::rounded_linear, \
                                         BATON_LEVEL::delta_rule}

}  // namespace baton
