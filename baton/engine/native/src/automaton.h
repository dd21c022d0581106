// A suffix automaton of several texts that grow at their ends. A state stands for the parts of the texts that end at the
// same places; the longest has `length` tokens, the shortest one more than the longest of `link`, which are ends of it.
//
// All is in flat arrays. The edges of a state are a list, the newest first, and a table of hashes finds one by its token.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace baton {

constexpr int32_t ROOT = 0, NOTHING = -1;

class Automaton {
public:
    struct State {
        int32_t length, link, first_edge;
        int32_t count;  // how often its parts were added
    };
    struct Edge {
        int32_t from, token, to, next;
    };

    Automaton() : states_{{0, NOTHING, NOTHING, 0}}, table_(1 << 8, NOTHING) {}

    // Room for so many tokens, so that adding them takes no pause in which all is moved.
    void reserve(int64_t num_tokens) {
        states_.reserve(2 * num_tokens + 1);
        edges_.reserve(3 * num_tokens);
        while (3 * table_.size() < 4 * size_t(3 * num_tokens)) grow();
    }

    int64_t num_tokens() const { return num_tokens_; }
    const State& state(int32_t place) const { return states_[place]; }
    const Edge& edge(int32_t place) const { return edges_[place]; }

    // The state behind `token`.
    int32_t after(int32_t state, int32_t token) const {
        const int32_t place = table_[slot(state, token)];
        return place == NOTHING ? NOTHING : edges_[place].to;
    }

    // The text that ends in `last`, all of which is the longest part of that state, goes on with `token`: where it ends
    // now. A text begins at the root.
    int32_t add(int32_t last, int32_t token) {
        ++num_tokens_;
        const int32_t known = after(last, token);
        const int32_t end = known == NOTHING ? add_state(last, token) : with_length(last, token, known);
        // ends that are shorter than all of these are nearly everywhere, and long repetitions have very many ends
        int32_t state = end;
        for (int32_t number = 0; state != ROOT && number < MAX_COUNTED; ++number, state = states_[state].link)
            ++states_[state].count;
        return end;
    }

private:
    static constexpr int32_t MAX_COUNTED = 16;

    int32_t add_state(int32_t last, int32_t token) {
        const int32_t end = new_state({states_[last].length + 1, ROOT, NOTHING, 0});
        int32_t state = last;
        for (; state != NOTHING && after(state, token) == NOTHING; state = states_[state].link)
            add_edge(state, token, end);
        if (state != NOTHING) {
            const int32_t link = with_length(state, token, after(state, token));
            states_[end].link = link;
        }
        return end;
    }

    // The state `to` behind `from` for the parts that are `from`'s longest and `token`. Where `to` has longer ones, these
    // and the shorter ones become a state of their own.
    int32_t with_length(int32_t from, int32_t token, int32_t to) {
        const int32_t length = states_[from].length + 1;
        if (states_[to].length == length) return to;
        const int32_t own = new_state({length, states_[to].link, NOTHING, states_[to].count});
        copy_edges(to, own);
        states_[to].link = own;
        for (int32_t state = from; state != NOTHING; state = states_[state].link) {
            const int32_t place = table_[slot(state, token)];
            if (place == NOTHING || edges_[place].to != to) break;
            edges_[place].to = own;
        }
        return own;
    }

    int32_t new_state(State state) {
        states_.push_back(state);
        return int32_t(states_.size()) - 1;
    }

    void copy_edges(int32_t from, int32_t to) {
        int32_t last = NOTHING;
        for (int32_t place = states_[from].first_edge; place != NOTHING; place = edges_[place].next) {
            const int32_t copy = put({to, edges_[place].token, edges_[place].to, NOTHING});
            if (last == NOTHING) states_[to].first_edge = copy;
            else edges_[last].next = copy;
            last = copy;
        }
    }

    void add_edge(int32_t from, int32_t token, int32_t to) {
        const int32_t place = put({from, token, to, states_[from].first_edge});
        states_[from].first_edge = place;
    }

    int32_t put(Edge edge) {
        if (4 * (edges_.size() + 1) > 3 * table_.size()) grow();
        const int32_t place = int32_t(edges_.size());
        edges_.push_back(edge);
        table_[slot(edge.from, edge.token)] = place;
        return place;
    }

    void grow() {
        table_.assign(2 * table_.size(), NOTHING);
        for (int32_t place = 0; place < int32_t(edges_.size()); ++place)
            table_[slot(edges_[place].from, edges_[place].token)] = place;
    }

    // Where the table has the edge, or may have it.
    size_t slot(int32_t state, int32_t token) const {
        const uint64_t key = uint64_t(uint32_t(state)) << 32 | uint32_t(token), mask = table_.size() - 1;
        size_t place = (key * 0x9e3779b97f4a7c15u) >> (64 - std::countr_zero(table_.size()));
        while (table_[place] != NOTHING && !is_edge(edges_[table_[place]], state, token)) place = (place + 1) & mask;
        return place;
    }

    static bool is_edge(const Edge& edge, int32_t state, int32_t token) {
        return edge.from == state && edge.token == token;
    }

    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> table_;  // of `edges_`; its size is a power of two, and a quarter of it is empty
    int64_t num_tokens_ = 0;
};

}  // namespace baton
