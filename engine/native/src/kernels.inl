// All kernels for one dispatch level. See the files of `levels/`.

namespace baton {
namespace BATON_LEVEL {
namespace {

#include "simd.h"
#include "elementwise.inl"
#include "linear.inl"
#include "attention.inl"

}  // namespace
}  // namespace BATON_LEVEL

#define BATON_TABLE(variable, name)                                                                                  \
    extern const KernelTable variable = {name,                                                                       \
                                         BATON_LEVEL::packed_bytes,                                                  \
                                         BATON_LEVEL::pack,                                                          \
                                         BATON_LEVEL::linear,                                                        \
                                         BATON_LEVEL::store_kv,                                                      \
                                         BATON_LEVEL::attention_scratch,                                             \
                                         BATON_LEVEL::attention,                                                     \
                                         BATON_LEVEL::add_norm,                                                      \
                                         BATON_LEVEL::norm_rotate,                                                   \
                                         BATON_LEVEL::gate}

}  // namespace baton
