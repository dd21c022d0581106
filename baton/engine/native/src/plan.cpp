// The index arrays of a step, from where each of its sequences stands.
#include "kernels.h"

extern "C" int32_t baton_plan(BatonPlan* plan) {
    int64_t num_tokens = 0, num_blocks = 0, num_positions = 0;
    for (int64_t i = 0; i < plan->num_sequences; ++i) {
        const BatonSequence& sequence = plan->sequences[i];
        const int64_t context = sequence.start + sequence.num_tokens;
        const int64_t used = (context + plan->block_size - 1) / plan->block_size;
        if (sequence.start < 0 || sequence.num_tokens < 1 || used > sequence.num_blocks) return BATON_PLAN_WRONG;
        num_tokens += sequence.num_tokens;
        num_blocks += used;
        if (context > num_positions) num_positions = context;
    }
    plan->num_tokens = num_tokens;
    plan->num_blocks = num_blocks;
    plan->num_positions = num_positions;
    if (num_tokens > plan->max_tokens || num_blocks > plan->max_blocks || plan->num_sequences > plan->max_sequences)
        return BATON_PLAN_TOO_LARGE;
    int64_t token = 0, place = 0;
    for (int64_t i = 0; i < plan->num_sequences; ++i) {
        const BatonSequence& sequence = plan->sequences[i];
        const int64_t context = sequence.start + sequence.num_tokens;
        plan->first_token[i] = token;
        plan->start[i] = sequence.start;
        plan->counts[i] = sequence.num_tokens;
        plan->table_begin[i] = place;
        for (int64_t block = 0; block * plan->block_size < context; ++block)
            plan->block_tables[place++] = sequence.blocks[block];
        for (int64_t position = sequence.start; position < context; ++position)
            plan->slots[token++] =
                sequence.blocks[position / plan->block_size] * plan->block_size + position % plan->block_size;
    }
    return BATON_PLANNED;
}
